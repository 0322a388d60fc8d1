"""The timeline checked against what is known otherwise, and what it costs.

    python benchmarks/timeline.py [section ...] [--shape 0.6b|8b|tiny] [--device cuda:0|cpu] [--quick]

graphs    whether torch.profiler sees the kernels of a CUDA graph that was captured before its first use
busy      device busy by step events and by the kernels that torch.profiler saw, while 1 and 64 texts decode
clock     events between two readings of the host's clock, placed on it: on an idle card, and while an engine writes
cost      tokens/s with the recorder and without it, in one process, by turns
planted   5 ms in which the host sleeps between two steps: how long the bubbles are, and what they are put down to
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
from gpu_bench import BATCHES, QUICK, Bench, Sizes, captured, run
from report import percentile, publish

from interactive_infer import Engine
from interactive_infer.core import cuda
from interactive_infer.core.flight import FlightQueue
from interactive_infer.timeline import Bubble, Phase, Recorder, Timeline
from interactive_infer.timeline.analysis import busy_intervals
from interactive_infer.timeline.clock import DeviceClock
from interactive_infer.timeline.device_spans import cuda_clock
from interactive_infer.timeline.intervals import total

Rows = tuple[str, Sequence[str], list[list[object]]]

SLEEP_MS = 5.0
PLANTED = "planted sleep"


def sleep_exactly(ms: float) -> None:
    """`time.sleep` wakes late by a twentieth of a millisecond or more; the rest is spun."""
    end = time.perf_counter_ns() + round(ms * 1e6)
    time.sleep(max(ms - 1.0, 0.0) / 1e3)
    while time.perf_counter_ns() < end:
        pass


async def graphs(bench: Bench) -> Rows:
    columns = ["captured", "kernels replayed", "seen"]
    rows: list[list[object]] = []
    if bench.is_cuda:
        matrix = torch.ones(512, 512, device=bench.device, dtype=torch.bfloat16)
        out = matrix @ matrix
        before = _capture(matrix, out)
        first = _seen(before, bench.device)
        after = _capture(matrix, out)
        rows = [["before the profiler's first use", 80, first], ["after it", 80, _seen(after, bench.device)]]
    return "Kernels of CUDA graphs that the profiler sees", columns, rows


def _capture(matrix: torch.Tensor, out: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(matrix.device), torch.cuda.graph(graph):
        for _ in range(8):
            torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize(matrix.device)
    return graph


def _seen(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    timeline = Timeline()
    with timeline.profile():
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize(device)
    return sum(not name.lower().startswith(("memcpy", "memset")) for name in timeline.recording().work_names)


async def busy(bench: Bench) -> Rows:
    rows: list[list[object]] = []
    # Graphs that were captured before the profiler's first use may lack their kernels in its records.
    with Timeline().profile():
        torch.zeros(1, device=bench.device)
    engine = await bench.engine()
    timeline, steps = engine.timeline, bench.sizes.steady_steps
    for batch in BATCHES:
        prompts = bench.prompts(batch, bench.sizes.context)
        group = engine.generate(prompts, temperature=0.0, ignore_eos=True, max_tokens=8 * steps + 64)
        while any(len(generation.token_ids) < 4 for generation in group):
            await asyncio.sleep(0.005)
        timeline.clear()
        begun = time.perf_counter_ns()
        while timeline.recorder.num_steps_after(begun) < steps:
            await asyncio.sleep(0.02)
        usual = timeline.summary()
        async with timeline.profile(steps=steps) as profile:
            while not profile.done and not all(generation.finish_reason for generation in group):
                await asyncio.sleep(0.01)
        group.cancel()
        await group
        found = timeline.summary(window=profile.window)
        if found.profiled is None or found.between_tokens is None or usual.between_tokens is None:
            raise RuntimeError(f"nothing was profiled while {batch} texts decoded")
        by_steps, by_kernels = 100 * found.profiled.busy_by_steps, 100 * found.profiled.busy
        rows.append(
            [
                batch,
                found.steps,
                100 * (usual.busy or 0.0),
                by_steps,
                by_kernels,
                by_steps - by_kernels,
                100 * _without_short_gaps(timeline, found.window_ns),
                usual.between_tokens.p50,
                found.between_tokens.p50,
                profile.num_kernels / max(found.steps, 1),
            ]
        )
    columns = [
        "texts",
        "steps",
        "busy by steps, %",
        "profiled: by steps",
        "by kernels",
        "gap, points",
        "by kernels and gaps < 10 µs",
        "ms a step",
        "profiled",
        "kernels a step",
    ]
    return "Device busy by step events, an upper bound, and by kernels", columns, rows


def _without_short_gaps(timeline: Timeline, window: tuple[int, int]) -> float:
    """Busy by kernels, where less than 10 µs between two count as busy: that is the card's own doing."""
    ran = busy_intervals(timeline.recording(), window, kernels=True)
    gaps = ran[1:, 0] - ran[:-1, 1]
    return float(total(ran) + gaps[gaps < 10_000].sum()) / (window[1] - window[0])


async def clock(bench: Bench) -> Rows:
    """Where the event really was between the readings nobody knows: it is off by at most the distance to the farther
    one. That bound is wide where the host was interrupted between them; what lies outside of them is an error."""
    columns = [
        "the card",
        "after, s",
        "events",
        "outside, µs: median",
        "worst",
        "off by at most, µs: median",
        "p99",
        "said error, µs",
    ]
    rows: list[list[object]] = []
    if bench.is_cuda:
        moments = (0.0, 1.0, 3.0) if bench.sizes is QUICK else (0.0, 2.0, 4.5, 7.0, 12.0)
        rows += await _over(moments, "idle", cuda_clock(bench.device), bench.device)
        engine = await bench.engine()
        writing = asyncio.create_task(_write(bench, engine))
        await asyncio.sleep(0.5)
        assert isinstance(engine.timeline.clock, DeviceClock)
        rows += await _over(moments, "writes 16 texts", engine.timeline.clock, bench.device)
        writing.cancel()
        [end] = await asyncio.gather(writing, return_exceptions=True)
        if isinstance(end, Exception):
            raise end
    return "Events on the host's clock: how far off they are placed", columns, rows


async def _write(bench: Bench, engine: Engine) -> None:
    """Texts, until it is cancelled."""
    while True:
        prompts = bench.prompts(16, 32)
        await engine.generate(prompts, temperature=0.0, ignore_eos=True, max_tokens=bench.sizes.endless)


async def _over(moments: Sequence[float], state: str, tested: DeviceClock, device: torch.device) -> list[list[object]]:
    begun = time.perf_counter()
    rows: list[list[object]] = []
    for seconds in moments:
        await asyncio.sleep(max(begun + seconds - time.perf_counter(), 0.0))
        outside, most = _placed(tested, device)
        rows.append(
            [
                state,
                seconds,
                len(outside),
                statistics.median(outside),
                max(outside),
                statistics.median(most),
                percentile(most, 0.99),
                tested.error_ns / 1e3,
            ]
        )
    return rows


def _placed(tested: DeviceClock, device: torch.device) -> tuple[list[float], list[float]]:
    """µs of 200 events: how far outside of the readings around it each was placed, and how far off it is at most."""
    stream = torch.cuda.Stream(device)
    outside, most = [], []
    for _ in range(200):
        event = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter_ns()
        event.record(stream)
        event.synchronize()
        after = time.perf_counter_ns()
        at = tested.ns(event)
        outside.append(max(before - at, at - after, 0) / 1e3)
        most.append(max(at - before, after - at) / 1e3)
    return outside, most


async def planted(bench: Bench) -> Rows:
    rows = [["device spans alone", *_alone(bench)]]
    model = gpu_models.make(bench.shape, bench.device)
    async with await Engine.load(model, steps_in_flight=1, max_batch_size=8, progress=False) as engine:

        async def once() -> None:
            [ids] = bench.prompts(1, 32)
            await engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=16)

        await captured(engine, once)
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
    columns = [
        "where",
        "planted",
        "bubbles",
        "with its cause",
        "ms: median",
        "least",
        "most",
        "other bubbles, ms: median",
        "longer than those by: median",
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
    """An engine's planted bubble also holds what any other between two steps does: waking up, planning, launching."""
    held = timeline.recording()
    spans = held.spans[(held.names == PLANTED) & (held.spans["phase"] == Phase.USER)]
    last = int(max([*held.steps["end"], *held.work["end"]]))
    count = int((spans["end"] < last).sum())  # after the last one no step comes
    bubbles = timeline.summary().bubbles
    over = [bubble for bubble in bubbles if _meets(bubble, spans)]
    others = [bubble.duration_ns / 1e6 for bubble in bubbles if not _meets(bubble, spans)]
    right = [bubble for bubble in over if bubble.cause == PLANTED]
    ms = [bubble.duration_ns / 1e6 for bubble in right]
    due = [bubble.share * bubble.duration_ns / 1e6 for bubble in right]
    if not ms or not others:
        return [count, len(over), len(right), *[None] * 6]
    usual, median = statistics.median(others), statistics.median(ms)
    return [count, len(over), len(right), median, min(ms), max(ms), usual, median - usual, statistics.median(due)]


def _meets(bubble: Bubble, spans: Any) -> bool:
    return bool(((spans["start"] < bubble.end_ns) & (spans["end"] > bubble.start_ns)).any())


async def cost(bench: Bench) -> Rows:
    engine = await bench.engine()
    rows: list[list[object]] = []
    for count in BATCHES:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(4 * bench.sizes.turns):
            for on in (True, False) if turn % 2 else (False, True):
                engine.reset_prefix_cache()
                with recording(on):
                    found = await run(engine, bench.prompts(count, bench.sizes.prompt), bench.sizes.new)
                rates[on].append(found.rate)
        with_it, without = (statistics.median(rates[on]) for on in (True, False))
        pairs = [100 * (1 - a / b) for a, b in zip(rates[True], rates[False], strict=True)]
        best = 100 * (1 - max(rates[True]) / max(rates[False]))
        rows.append([count, with_it, without, statistics.median(pairs), min(pairs), max(pairs), best])
    columns = ["texts", "tokens/s recorded", "not", "cost, %: median of pairs", "least", "most", "best over best"]
    return "What recording costs", columns, rows


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """With `on` False nothing is recorded, nor made ready for it, nor are a card's events placed on the host's clock.

    The events themselves stay, two a step: the second is what is awaited.
    """

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def unplaced(_: DeviceClock, free: list[Any], events: Any, *__: Any) -> tuple[int, int]:
        free.append(events)
        return 0, 0

    instead: list[tuple[Any, str, Any]] = [
        (Recorder, name, nothing) for name in ("record", "step", "lag", "runnable", "asked")
    ]
    instead += [(FlightQueue, "_record", nothing), (cuda, "_interval", unplaced)]
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in instead]
    if not on:
        for owner, name, other in instead:
            setattr(owner, name, other)
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
    "graphs": graphs,
    "busy": busy,
    "clock": clock,
    "cost": cost,
    "planted": planted,
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
