"""What recording costs: ns a call, in one thread and in four, and ms a snapshot and a summary of full rings.

    python benchmarks/recorder.py [--json build/recorder.json]

The loop around the calls is measured empty and taken off. The target is 2 µs a span.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from interactive_infer.timeline import Phase, Recorder, Timeline

CALLS = 100_000


def ns_per_call(call: Callable[[int], object], repeats: int = 5) -> float:
    """The best of `repeats` loops of CALLS calls."""

    def loop(call: Callable[[int], object]) -> int:
        start = time.perf_counter_ns()
        for i in range(CALLS):
            call(i)
        return time.perf_counter_ns() - start

    best = min(loop(call) for _ in range(repeats))
    empty = min(loop(lambda i: None) for _ in range(repeats))
    return (best - empty) / CALLS


def ns_per_call_in_threads(call: Callable[[int], object], threads: int) -> float:
    """Wall time over all calls of all threads."""
    workers = [threading.Thread(target=lambda: [call(i) for i in range(CALLS)]) for _ in range(threads)]
    start = time.perf_counter_ns()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (time.perf_counter_ns() - start) / (threads * CALLS)


def measure() -> dict[str, float]:
    recorder = Recorder()

    def span(i: int) -> None:
        with recorder.span(Phase.PLAN, i):
            pass

    def step(i: int) -> None:
        recorder.step(i, i + 1, step_id=i, batch_size=8, tokens=8, prefill_tokens=0, stream=0)

    many = list(range(64))

    def full_step(i: int) -> None:
        recorder.step(
            i,
            i + 1,
            step_id=i,
            batch_size=64,
            tokens=64,
            prefill_tokens=0,
            generations=many,
            drawn=[i + each for each in many],
        )

    def record(i: int) -> None:
        recorder.record(Phase.PLAN, i, i + 1, i)

    figures = {
        "record, ns": ns_per_call(record),
        "record with a name, ns": ns_per_call(lambda i: recorder.record(Phase.USER, i, i + 1, i, "my work")),
        "with span(), ns": ns_per_call(span),
        "step, ns": ns_per_call(step),
        "step of 64 generations, ns": ns_per_call(full_step),
        "lag, ns": ns_per_call(lambda i: recorder.lag(i, 1)),
        "runnable, ns": ns_per_call(lambda i: recorder.runnable(i, i)),
        "record from 4 threads, ns": ns_per_call_in_threads(record, 4),
    }
    recorder.clear()
    for i in range(16_384):
        start = 1_000_000 * i
        for phase in (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.AWAIT):
            recorder.record(phase, start + 100 * phase, start + 100 * phase + 90, i)
        recorder.step(start + 200, start + 900_000, step_id=i, batch_size=8, tokens=8, prefill_tokens=0)
    newest = [int(rows["number"][-1]) if len(rows) else 0 for rows in recorder.tail()]
    timeline = Timeline(recorder)
    for name, call in (
        ("what is new (nothing)", lambda: recorder.tail(newest)),
        ("snapshot", recorder.snapshot),
        ("summary", timeline.summary),
    ):
        start = time.perf_counter_ns()
        call()
        figures[f"{name} of full rings, ms"] = (time.perf_counter_ns() - start) / 1e6
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=Path("build/recorder.json"))
    path: Path = parser.parse_args().json
    figures = measure()
    for name, value in figures.items():
        print(f"{name:<32}{value:>10,.1f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
