"""The timeline checked against what is known otherwise, and what it costs.

    python benchmarks/timeline.py [section ...] [--shape 0.6b|8b|tiny] [--device cuda:0|cpu] [--quick]

busy      device busy by step events and by the kernels that torch.profiler saw, while 1 and 64 texts decode
clock     how far events on an idle stream lie outside the two readings of the host's clock that they were made between
planted   5 ms in which the host sleeps between two steps: how long the bubbles are, and what they are put down to
cost      tokens/s with the recorder and without it, in one process, by turns
figure    ms to draw a figure of thousands of spans

Models are Qwen3 shapes with random weights; nothing is downloaded. `--device cpu --shape tiny --quick` only shows that
the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gpu_models
import torch
from gpu_bench import BATCHES, QUICK, Bench, Sizes, run
from report import percentile, publish

from interactive_infer.core.flight import FlightQueue
from interactive_infer.timeline import Bubble, Phase, Recorder, Timeline
from interactive_infer.timeline.clock import DeviceClock
from interactive_infer.timeline.device_spans import cuda_clock

Rows = tuple[str, Sequence[str], list[list[object]]]

SLEEP_MS = 5.0
PLANTED = "planted sleep"


def sleep_exactly(ms: float) -> None:
    """`time.sleep` wakes late by a twentieth of a millisecond or more; the rest is spun."""
    end = time.perf_counter_ns() + round(ms * 1e6)
    time.sleep(max(ms - 1.0, 0.0) / 1e3)
    while time.perf_counter_ns() < end:
        pass


async def busy(bench: Bench) -> Rows:
    rows: list[list[object]] = []
    # Graphs that were captured before the profiler's first use may lack their kernels in its records.
    with Timeline().profile():
        torch.zeros(1, device=bench.device)
    engine = await bench.engine()
    steps = bench.sizes.steady_steps
    for batch in BATCHES:
        prompts = bench.prompts(batch, bench.sizes.context)
        group = engine.generate(prompts, temperature=0.0, ignore_eos=True, max_tokens=4 * steps + 64)
        while any(len(generation.token_ids) < 4 for generation in group):
            await asyncio.sleep(0.005)
        async with engine.timeline.profile(steps=steps) as profile:
            while not profile.done and not all(generation.finish_reason for generation in group):
                await asyncio.sleep(0.01)
        group.cancel()
        await group
        found = engine.timeline.summary(window=profile.window)
        assert found.profiled is not None
        by_steps, by_kernels = 100 * found.profiled.busy_by_steps, 100 * found.profiled.busy
        a_step = profile.num_kernels / max(found.steps, 1)
        rows.append([batch, found.steps, by_steps, by_kernels, by_steps - by_kernels, a_step])
    columns = ["texts", "steps", "busy by steps, %", "by kernels, %", "gap, points", "kernels a step"]
    return "Device busy by step events, an upper bound, and by kernels", columns, rows


async def clock(bench: Bench) -> Rows:
    columns = ["after, s", "events", "outside, µs: median", "worst", "readings apart, µs: median", "said error, µs"]
    rows: list[list[object]] = []
    if bench.is_cuda:
        tested = cuda_clock(bench.device)
        begun = time.perf_counter()
        for seconds in (0.0, 1.0, 3.0) if bench.sizes is QUICK else (0.0, 2.0, 4.5, 7.0, 12.0, 20.0):
            await asyncio.sleep(max(begun + seconds - time.perf_counter(), 0.0))
            outside, apart = _placed(tested, bench.device)
            rows.append(
                [
                    seconds,
                    len(outside),
                    statistics.median(outside),
                    max(outside),
                    statistics.median(apart),
                    tested.error_ns / 1e3,
                ]
            )
    return "Events on the host's clock: how far outside the two readings around them", columns, rows


def _placed(tested: DeviceClock, device: torch.device) -> tuple[list[float], list[float]]:
    stream = torch.cuda.Stream(device)
    outside, apart = [], []
    for _ in range(200):
        event = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter_ns()
        event.record(stream)
        event.synchronize()
        after = time.perf_counter_ns()
        at = tested.ns(event)
        outside.append(max(before - at, at - after, 0) / 1e3)
        apart.append((after - before) / 1e3)
    return outside, apart


async def planted(bench: Bench) -> Rows:
    rows = [["device spans alone", *_alone(bench)]]
    await bench.drop_engine()
    engine = await bench.load(steps_in_flight=1)
    try:
        engine.timeline.clear()
        [ids] = bench.prompts(1, 32)
        generation = engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=bench.sizes.new)

        def sleeps() -> None:
            if len(generation.token_ids) % 10 == 5 and generation.finish_reason is None:
                with engine.timeline.span(PLANTED):
                    sleep_exactly(SLEEP_MS)

        generation._output.listeners.append(sleeps)  # called in the commit, before the next launch
        await generation
        rows.append(["engine, one step in flight", *_said(engine.timeline)])
    finally:
        await engine.close()
    columns = [
        "where",
        "planted",
        "bubbles",
        "with its cause",
        "ms: median",
        "least",
        "most",
        "ms of the sleep: median",
    ]
    return f"{SLEEP_MS:.0f} ms of sleep planted between two steps", columns, rows


def _alone(bench: Bench) -> list[object]:
    """Matrix products as steps, with nothing of an engine's in between."""
    timeline = Timeline(device="GPU")
    size = 4096 if bench.is_cuda else 256
    matrix = torch.ones(size, size, device=bench.device, dtype=torch.bfloat16 if bench.is_cuda else torch.float32)
    matrix @ matrix
    for number in range(40):
        with timeline.span("product", device=True):
            for _ in range(10):
                matrix @ matrix
        if bench.is_cuda:
            torch.cuda.synchronize(bench.device)
        if number % 4 == 3:
            with timeline.span(PLANTED):
                sleep_exactly(SLEEP_MS)
    return _said(timeline)


def _said(timeline: Timeline) -> list[object]:
    held = timeline.recording()
    spans = held.spans[(held.names == PLANTED) & (held.spans["phase"] == Phase.USER)]
    last = int(max([*held.steps["end"], *held.work["end"]]))
    count = int((spans["end"] < last).sum())  # after the last one no step comes
    over = [b for b in timeline.summary().bubbles if _meets(b, spans)]
    right = [bubble for bubble in over if bubble.cause == PLANTED]
    ms = [bubble.duration_ns / 1e6 for bubble in right]
    due = [bubble.share * bubble.duration_ns / 1e6 for bubble in right]
    if not ms:
        return [count, len(over), 0, None, None, None, None]
    return [count, len(over), len(right), statistics.median(ms), min(ms), max(ms), statistics.median(due)]


def _meets(bubble: Bubble, spans: Any) -> bool:
    return bool(((spans["start"] < bubble.end_ns) & (spans["end"] > bubble.start_ns)).any())


async def cost(bench: Bench) -> Rows:
    engine = await bench.engine()
    rows: list[list[object]] = []
    for count in BATCHES:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(3 * bench.sizes.turns):
            for on in (True, False) if turn % 2 else (False, True):
                engine.reset_prefix_cache()
                with recording(on):
                    found = await run(engine, bench.prompts(count, bench.sizes.prompt), bench.sizes.new)
                rates[on].append(found.rate)
        with_it, without = (statistics.median(rates[on]) for on in (True, False))
        best = 100 * (1 - max(rates[True]) / max(rates[False]))
        rows.append([count, with_it, without, 100 * (1 - with_it / without), best])
    columns = ["texts", "tokens/s recorded", "not", "cost, % (medians)", "% (best)"]
    return "What recording costs", columns, rows


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """With `on` False nothing is recorded, nor is made ready for it."""
    owners = [(Recorder, name) for name in ("record", "step", "lag", "runnable", "asked")] + [(FlightQueue, "_record")]
    usual = [(owner, name, getattr(owner, name)) for owner, name in owners]
    if not on:
        for owner, name, _ in usual:
            setattr(owner, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for owner, name, method in usual:
            setattr(owner, name, method)


async def figure(bench: Bench) -> Rows:
    timeline = Timeline(device="GPU")
    recorder = timeline.recorder
    rows: list[list[object]] = []
    for steps in (200, 2_000, 10_000):
        recorder.clear()
        for i in range(steps):
            start = 3_000_000 * i
            recorder.runnable(start, i % 3 + 1)
            for phase in (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.DETOKENIZE):
                recorder.record(phase, start + 100_000 * phase, start + 100_000 * phase + 60_000, i)
            recorder.step(start, start + 2_900_000, step_id=i, batch_size=8, tokens=8, prefill_tokens=0)
            recorder.lag(start, 300_000 * (i % 7))
        took = []
        for _ in range(4):
            begun = time.perf_counter()
            timeline.figure()._repr_png_()
            took.append(1e3 * (time.perf_counter() - begun))
        rows.append([steps, 5 * steps, took[0], percentile(took[1:], 0.5)])
    return "ms to draw a figure and make its PNG", ["steps", "spans", "first", "later"], rows


SECTIONS: dict[str, Callable[[Bench], Coroutine[Any, Any, Rows]]] = {
    "busy": busy,
    "clock": clock,
    "planted": planted,
    "cost": cost,
    "figure": figure,
}


async def measure(names: Sequence[str], bench: Bench) -> None:
    try:
        for name in names:
            title, columns, rows = await SECTIONS[name](bench)
            if rows:
                publish(f"timeline-{name}", f"{title} ({bench.shape}, {bench.device})", columns, rows)
            else:
                print(f"\n{name}: nothing to measure on {bench.device}")
    finally:
        await bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; none: all of them")
    parser.add_argument("--shape", choices=list(gpu_models.SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see it work")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    bench = Bench(args.shape, torch.device(args.device), QUICK if args.quick else Sizes(), compiled=False)
    asyncio.run(measure([name for name in SECTIONS if not args.sections or name in args.sections], bench))


if __name__ == "__main__":
    main()
