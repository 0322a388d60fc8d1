"""Sections of gpu.py about the event loop: how late it is, and what the engine spends on it."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
from gpu_bench import Bench, Crowd, Heartbeat, Table, captured, spread

from interactive_infer.timeline.recorder import Phase, Recording

HOST = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT)


async def lag(bench: Bench) -> list[Table]:
    """The heartbeat while generations decode at full rate, and on a loop that is woken as often and has no work."""
    beats = bench.sizes.beats
    engine = await bench.engine()
    rows: list[list[object]] = []
    spans: list[list[object]] = []
    async with Heartbeat() as heart:
        await heart.until(beats // 10)
    rows.append(["nothing", None, None, *spread(heart.lags), len(heart.lags)])
    for count, wanted in ((64, beats), (1, beats // 5)):
        engine.reset_prefix_cache()
        async with Crowd(bench, engine, count) as crowd:
            engine.timeline.clear()
            before, start = crowd.tokens, time.perf_counter()
            async with Heartbeat() as heart:
                await heart.until(wanted)
            seconds = time.perf_counter() - start
            crowd.raise_failure()
            rate = (crowd.tokens - before) / seconds
            recording = engine.timeline.recorder.snapshot()
        rows.append([f"generations: {count}", rate, rate / count, *spread(heart.lags), len(heart.lags)])
        spans += [[count, *row] for row in _spans_us(recording)]
        async with _woken(rate / count), Heartbeat() as heart:
            await heart.until(wanted)
        rows.append(["woken as often, no work", None, rate / count, *spread(heart.lags), len(heart.lags)])
    return [
        Table(
            "Lag of a 5 ms heartbeat in ms, each generation read token by token on the same loop",
            ["on the loop", "tokens/s", "steps/s", "p50", "p99", "max", "beats"],
            rows,
        ),
        Table(
            "Host spans meanwhile, µs (the newest of them)",
            ["generations", "span", "mean", "p50", "p99", "max", "spans"],
            spans,
        ),
    ]


class _woken:
    """`async with _woken(rate):` a thread wakes the loop `rate` times a second, for a callback that does nothing."""

    def __init__(self, rate: float) -> None:
        self._period = 1.0 / rate
        self._ended = threading.Event()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            while not self._ended.is_set():
                time.sleep(self._period)
                loop.call_soon_threadsafe(_nothing)

        self._thread = threading.Thread(target=wake)
        self._thread.start()

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _nothing() -> None:
    pass


def _spans_us(recording: Recording) -> list[list[object]]:
    rows: list[list[object]] = []
    for phase in (*HOST, Phase.DETOKENIZE, Phase.PUBLISH, Phase.GC):
        spans = recording.spans[recording.spans["phase"] == phase]
        if len(spans):
            us = ((spans["end"] - spans["start"]) / 1e3).tolist()
            rows.append([phase.name.lower(), statistics.fmean(us), *spread(us), len(us)])
    return rows


async def prefill(bench: Bench) -> list[Table]:
    """The heartbeat, and the gaps between tokens of 32 generations, while a long prompt is prefilled beside them."""
    sizes = bench.sizes
    engine = await bench.engine()
    engine.reset_prefix_cache()
    rows: list[list[object]] = []
    async with Crowd(bench, engine, 32) as crowd:
        prompts = bench.prompts(sizes.long_prompts, sizes.long_prompt)

        async def once() -> None:
            await engine.generate(bench.prompts(1, sizes.long_prompt)[0], temperature=0.0, max_tokens=1)

        await captured(engine, once)
        since = time.perf_counter_ns()
        async with Heartbeat() as heart:
            await heart.until(sizes.beats // 10)
        rows.append(["32 generations", len(heart.lags), *spread(heart.lags), *spread(crowd.gaps_ms(since)), None])
        since, firsts = time.perf_counter_ns(), []
        engine.timeline.clear()
        async with Heartbeat() as heart:
            for prompt in prompts:
                engine.reset_prefix_cache()
                completion = await engine.generate(prompt, temperature=0.0, max_tokens=1)
                firsts.append(completion.timing.time_to_first_token * 1e3)
                crowd.raise_failure()
        recording = engine.timeline.recorder.snapshot()
        name = f"+ a prompt of {sizes.long_prompt:,} tokens, {sizes.long_prompts} times"
        gaps = crowd.gaps_ms(since)
        rows.append([name, len(heart.lags), *spread(heart.lags), *spread(gaps), statistics.median(firsts)])
    steps = recording.steps[recording.steps["prefill_tokens"] > 0]
    step_ms = ((steps["end"] - steps["start"]) / 1e6).tolist()
    return [
        Table(
            f"While a long prompt is prefilled beside 32 generations; ms. A step with a chunk takes "
            f"{statistics.median(step_ms):.1f} (median), {max(step_ms):.1f} (longest)",
            ["on the loop", "beats", "lag p50", "p99", "max", "token gap p50", "p99", "max", "first token of it"],
            rows,
            {"chunk_steps": len(step_ms), "firsts_ms": firsts},
        ),
        Table("Host spans meanwhile, µs", ["span", "mean", "p50", "p99", "max", "spans"], _spans_us(recording)),
    ]


async def host(bench: Bench) -> list[Table]:
    """What a step of many generations costs on the host."""
    engine = await bench.engine()
    count = min(256, engine.info().max_batch_size)
    new = bench.sizes.new
    rows: list[list[object]] = []
    for reading in ("nobody", "await", "async for"):
        engine.reset_prefix_cache()
        engine.timeline.clear()
        group = [
            engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=new) for ids in bench.prompts(count, 16)
        ]
        readers = [asyncio.ensure_future(_read(generation, reading)) for generation in group]
        while len(group[-1].token_ids) < 2:
            await asyncio.sleep(0.002)
        used, began, seen = time.thread_time(), time.perf_counter(), len(group[-1].token_ids)
        while len(group[0].token_ids) < new - 4:
            await asyncio.sleep(0.02)
        used, seconds = time.thread_time() - used, time.perf_counter() - began
        passed = len(group[-1].token_ids) - seen
        while any(generation.finish_reason is None for generation in group):
            await asyncio.sleep(0.005)
        await asyncio.gather(*readers)
        per_step = _host_us(engine.timeline.recorder.snapshot(), count)
        rows += [
            [reading, name, statistics.fmean(us), *spread(us), len(us)] for name, us in per_step.items() if len(us)
        ]
        rows.append([reading, "loop thread's processor time", used / passed * 1e6, None, None, None, passed])
        rows.append([reading, "step to step", seconds / passed * 1e6, None, None, None, passed])
    return [
        Table(
            f"Host time a step with {count} generations running, µs; processor time is all that the loop's thread "
            "does, readers and heartbeat included",
            ["read by", "what", "mean", "p50", "p99", "max", "steps"],
            rows,
        )
    ]


async def _read(generation: Any, how: str) -> None:
    if how == "await":
        await generation
    elif how == "async for":
        async for _ in generation:
            pass


def _host_us(recording: Recording, count: int) -> dict[str, list[float]]:
    """µs of each kind of span, and of all of them, step by step, in steps where `count` sequences decode."""
    steps = recording.steps
    wanted = set(steps["step_id"][(steps["batch_size"] == count) & (steps["prefill_tokens"] == 0)].tolist())
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    spans = recording.spans[np.isin(recording.spans["phase"], HOST)]
    for start, end, phase, ref in spans[["start", "end", "phase", "ref"]].tolist():
        if ref in wanted:
            by_step[ref][Phase(phase).name.lower()] = (end - start) / 1e3
    whole = [found for found in by_step.values() if len(found) == len(HOST)]
    names = [phase.name.lower() for phase in HOST]
    return {name: [found[name] for found in whole] for name in names} | {
        "plan + launch + commit": [sum(found.values()) for found in whole]
    }


async def cancel(bench: Bench) -> list[Table]:
    """From `cancel()` to the pages being free, with 64 generations running."""
    engine = await bench.engine()
    pages_ms: list[float] = []
    plans: list[float] = []
    async with Crowd(bench, engine, 63) as crowd:
        for prompt in bench.prompts(20, bench.sizes.context):
            generation = engine.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=bench.sizes.endless)
            async for token in generation:
                if token.index == 8:
                    break
            # The others take pages meanwhile, so this one's are looked for themselves.
            sequence = generation._sequence
            engine.timeline.clear()
            start = time.perf_counter()
            generation.cancel()
            while sequence.pages:
                await asyncio.sleep(0)
            pages_ms.append((time.perf_counter() - start) * 1e3)
            spans = engine.timeline.recorder.snapshot().spans
            plans.append(float((spans["phase"] == Phase.PLAN).sum()))
            crowd.raise_failure()
    return [
        Table(
            "From cancel() to the pages being free, 64 generations running",
            ["what", "p50", "p99", "max", "times"],
            [
                ["ms", *spread(pages_ms), len(pages_ms)],
                ["steps planned meanwhile", *spread(plans), len(plans)],
            ],
        )
    ]
