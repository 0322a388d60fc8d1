"""Section of gpu.py about how much of the time the card works: by step events, by graphs, by kernels."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_bench import BATCHES, Bench, Table, collect, steady
from gpu_cupti import GraphTrace
from gpu_speed import decode_steps

from interactive_infer import Engine
from interactive_infer.timeline.intervals import total, union

SMALL_GAP_NS = 10_000


async def busy(bench: Bench) -> list[Table]:
    """Share of the time in which the card works while 1 and 64 generations decode."""
    engine = await bench.engine()
    events: list[list[object]] = []
    for batch in BATCHES:
        found = await decode_steps(bench, engine, batch)
        events.append([batch, statistics.median(found.periods_ms), 100 * found.busy])
    tables = [Table("GPU busy while generations decode, by step events", ["batch", "ms a step", "busy, %"], events)]
    if not bench.is_cuda:
        return tables
    await bench.drop_engine()
    tables.append(await _by_graphs(bench))  # before torch.profiler's first use
    engine = await bench.engine()
    shares: list[list[object]] = []
    kernels: list[list[object]] = []
    for batch in BATCHES:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        period_ms, by_steps = await _decode_within(profiler, bench, engine, batch)
        work = _work(profiler)
        profiled = kernel_shares(work)
        steps = profiled["span_ms"] / period_ms
        row: list[object] = [batch, period_ms, 100 * by_steps]
        row += [100 * profiled[name] for name in ("plain", "inside_graph", "anywhere")]
        row += [profiled["median_ms"], 100 * profiled["median_plain"], 100 * profiled["median_inside_graph"]]
        shares.append([*row, profiled["kernels"] / steps, profiled["largest_us"]])
        for name, (total_ms, count) in list(totals(work).items())[:10]:
            kernels.append([batch, name[:60], count / steps, total_ms / steps * 1e3])
    columns = ["batch", "ms a step", "step events, %", "kernels, %"]
    columns += ["+ gaps < 10 µs in a graph, %", "+ all gaps < 10 µs, %"]
    columns += ["median step, ms", "of it kernels, %", "+ gaps < 10 µs in a graph, %"]
    tables.append(Table("By torch.profiler's kernels", [*columns, "kernels a step", "largest gap, µs"], shares))
    tables.append(Table("Where a step goes", ["batch", "kernel", "a step", "µs a step"], kernels))
    return tables


async def _by_graphs(bench: Bench) -> Table:
    """Each graph as one piece, which slows nothing; also with one step in flight, where the card idles in between."""
    rows: list[list[object]] = []
    with GraphTrace() as trace:
        for in_flight in (2, 1):
            engine = await bench.load(steps_in_flight=in_flight)
            for batch in BATCHES:
                period_ms, by_steps = await _decode_within(trace.window(), bench, engine, batch)
                ran = union(trace.intervals[_settled(trace.intervals[:, 0])])
                by_graphs = total(ran) / int(ran[-1, 1] - ran[0, 0])
                rows.append(
                    [in_flight, batch, period_ms, 100 * by_steps, 100 * by_graphs, 100 * (by_steps - by_graphs)]
                )
            await engine.close()
            collect()
    columns = ["in flight", "batch", "ms a step", "step events, %", "graphs, %", "gap, points"]
    return Table("By step events, and by CUPTI's records of whole graphs", columns, rows)


async def _decode_within(
    trace: AbstractContextManager[Any], bench: Bench, engine: Engine, batch: int
) -> tuple[float, float]:
    """Decode steps of `batch` generations inside of `trace`: ms a step, and busy by step events."""
    steps, context = 4 * bench.sizes.steady_steps, bench.sizes.context
    engine.reset_prefix_cache()
    group = [
        engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=4 * steps + context)
        for ids in bench.prompts(batch, context // 2)
    ]
    readers = [asyncio.ensure_future(generation.future()) for generation in group]
    while len(group[-1].token_ids) < 8:
        await asyncio.sleep(0.005)
    with trace:
        engine.timeline.clear()
        seen = len(group[-1].token_ids)
        while len(group[-1].token_ids) < seen + steps:
            await asyncio.sleep(0.005)
        recording = engine.timeline.recorder.snapshot()
    for generation in group:
        generation.cancel()
    await asyncio.gather(*readers)
    found = steady(recording, batch)
    return statistics.median(found.periods_ms), found.busy


def _settled(starts: np.ndarray) -> np.ndarray:
    """Which of what began at `starts` (sorted) to look at: not the first half, which holds a profiler's own start, nor
    the end."""
    first, last = starts[0], starts[-1]
    found: np.ndarray = (starts >= first + 0.5 * (last - first)) & (starts < first + 0.95 * (last - first))
    return found


def _work(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """What ran on the card, in order: Chrome trace events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    # Synchronisation records and annotations are on the card's tracks too, and are no work.
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: event["ts"])
    if not work:
        raise RuntimeError("the profiler has recorded no kernel")
    wanted = _settled(np.array([event["ts"] for event in work]))
    return [event for event, want in zip(work, wanted, strict=True) if want]


def kernel_shares(work: list[dict[str, Any]]) -> dict[str, Any]:
    """Busy shares of the span that `work` (sorted by start) covers: the union of its intervals, and with small gaps.

    `inside_graph`: gaps under 10 µs between two pieces of one launch (one correlation id) count as busy.
    `anywhere`: all gaps under 10 µs do. `median_*`: the same of the median step, from one forward's first kernel to the
    next one's: the profiler itself stalls the card for milliseconds now and then, and adds to each launch.
    """
    starts = np.array([round(event["ts"] * 1e3) for event in work], np.int64)
    lengths = np.array([round(event["dur"] * 1e3) for event in work], np.int64)
    launch = np.array([event["args"].get("correlation", -1) for event in work])
    ends = np.maximum.accumulate(starts + lengths)
    gaps = np.maximum(starts[1:] - ends[:-1], 0)
    span = int(ends[-1] - starts[0])
    small = gaps < SMALL_GAP_NS
    inside = small & (launch[1:] == launch[:-1])
    idle = int(gaps.sum())
    counts: dict[int, int] = defaultdict(int)
    for number in launch.tolist():
        counts[number] += 1
    forwards = np.array([counts[number] > 100 for number in launch.tolist()])
    firsts = np.flatnonzero(forwards & np.append(True, launch[1:] != launch[:-1]))
    spans = np.diff(starts[firsts])

    def of_median_step(counted: np.ndarray) -> float:
        idle_until = np.append(0, np.cumsum(np.where(counted, gaps, 0)))  # before each piece
        return float(np.median(1 - np.diff(idle_until[firsts]) / spans)) if len(spans) else float("nan")

    return {
        "median_plain": of_median_step(np.full(len(gaps), True)),
        "median_inside_graph": of_median_step(~inside),
        "median_ms": float(np.median(spans)) / 1e6 if len(spans) else float("nan"),
        "plain": 1 - idle / span,
        "inside_graph": 1 - (idle - int(gaps[inside].sum())) / span,
        "anywhere": 1 - (idle - int(gaps[small].sum())) / span,
        "kernels": len(work),
        "largest_us": float(gaps.max()) / 1e3,
        "span_ms": span / 1e6,
    }


def totals(work: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """(ms, how many) by kernel, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in work:
        times[event["name"]].append(event["dur"] / 1e3)
    return {name: (sum(ms), len(ms)) for name, ms in sorted(times.items(), key=lambda item: -sum(item[1]))}
