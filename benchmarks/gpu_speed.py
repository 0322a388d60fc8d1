"""Sections of gpu.py about speed: decode steps against the floor of memory, sampling, steps without a loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from typing import Any

import gpu_models
from gpu_bench import BATCHES, Bench, Run, Steady, Table, captured, collect, read_bandwidth, run, spread, steady

from interactive_infer import Engine
from interactive_infer.core.flight import Flight


async def decode_steps(bench: Bench, engine: Engine, batch: int, **sampling: Any) -> Steady:
    """Decode steps of `batch` sequences around `bench.sizes.context` tokens of context."""
    context, steps = bench.sizes.context, bench.sizes.steady_steps
    # The first sequences decode while the last ones' prompts are still worked on.
    extra = batch * context // engine.info().max_step_tokens + 8

    async def once() -> Run:
        engine.reset_prefix_cache()
        return await run(engine, bench.prompts(batch, context - steps // 2), steps + extra, **sampling)

    return steady((await captured(engine, once)).recording, batch)


async def floor(bench: Bench) -> list[Table]:
    """Decode steps against the time to read weights and KV once at the bandwidth measured here."""
    bandwidth = read_bandwidth(bench.device, bench.sizes.buffer_bytes)
    engine = await bench.engine()
    rows: list[list[object]] = []
    for batch in BATCHES:
        found = await decode_steps(bench, engine, batch)
        num_bytes = gpu_models.step_bytes(engine.model, batch, bench.sizes.context)
        floor_ms = num_bytes / bandwidth * 1e3
        period, own = statistics.median(found.periods_ms), statistics.median(found.own_ms)
        p99 = spread(found.periods_ms)[1]
        rows.append(
            [batch, len(found.own_ms), floor_ms, period, p99, own, 100 * floor_ms / period, 100 * floor_ms / own]
        )
    return [
        Table(
            f"Decode steps, about {bench.sizes.context} tokens of context, greedy; ms; read bandwidth measured "
            f"{bandwidth / 1e12:.2f} TB/s",
            [
                "batch",
                "steps",
                "floor",
                "step to step",
                "p99",
                "step alone",
                "floor / step to step, %",
                "floor / alone, %",
            ],
            rows,
            {"bandwidth": bandwidth, "launches": engine.info().launches, "attention": engine.info().attention},
        )
    ]


async def sampling(bench: Bench) -> list[Table]:
    """What sampling adds to a step of 64."""
    engine = await bench.engine()
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "plain draw": {"temperature": 1.0},
        "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
        "top-k 50": {"temperature": 1.0, "top_k": 50},
        "top-k 50, top-p 0.9, min-p 0.02, penalties": {
            "temperature": 0.8,
            "top_k": 50,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
        },
        "plain draw, 5 logprobs": {"temperature": 1.0, "logprobs": 5},
    }
    periods = {
        name: statistics.median((await decode_steps(bench, engine, 64, **way)).periods_ms) for name, way in ways.items()
    }
    plain = periods["plain draw"]
    return [
        Table(
            "Sampling, 64 generations: a step, and what it takes more than a plain draw",
            ["sampling", "ms a step", "µs more"],
            [[name, period, (period - plain) * 1e3] for name, period in periods.items()],
        )
    ]


# ---- the same steps without a loop ----------------------------------------------------------------------------------


class BareWait:
    """Stands in for an engine's waiter thread: whoever drives waits for the event itself, and asks for no times."""

    def __init__(self) -> None:
        self._watched: dict[Any, tuple[Any, Any]] = {}

    def watch(self, event: Any, completion: Any, read: Any, *, interval: Any = None) -> None:
        self._watched[completion] = (event, read)

    def wait(self, flight: Flight) -> None:
        completion = flight.completion
        while completion not in self._watched:  # the launch thread is still at it
            if completion.done():  # its launch has failed
                return
            time.sleep(0)
        event, read = self._watched.pop(completion)
        event.synchronize()
        completion.set_result(read())


async def blocking(bench: Bench) -> list[Table]:
    """Tokens/s of the async engine over those of the same steps, planned, launched and committed by a blocking loop."""
    sizes = bench.sizes
    engine = await bench.engine()
    rows: list[list[object]] = []
    for batch in BATCHES:
        rates: dict[str, list[float]] = defaultdict(list)
        for turn in range(2 * sizes.turns):
            for way in ("engine", "bare") if turn % 2 else ("bare", "engine"):
                engine.reset_prefix_cache()
                ids = bench.prompts(batch, sizes.prompt)
                if way == "engine":
                    rates[way].append((await run(engine, ids, sizes.new)).rate)
                else:
                    rates[way].append(_bare(engine, ids, sizes.new))
                await asyncio.sleep(0.05)
        best = {name: max(found) for name, found in rates.items()}
        middle = {name: statistics.median(found) for name, found in rates.items()}
        rows.append(
            [
                batch,
                best["engine"],
                best["bare"],
                100 * best["engine"] / best["bare"],
                100 * middle["engine"] / middle["bare"],
            ]
        )
    return [
        Table(
            f"tokens/s of the engine and of a bare blocking loop over the same steps, {sizes.prompt} in, {sizes.new} "
            f"out, best of {2 * sizes.turns}",
            ["requests", "engine", "blocking loop", "best, %", "medians, %"],
            rows,
        )
    ]


def _bare(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens/s of a loop that begins, waits and finishes in place, on a loop that stands still meanwhile."""
    device = engine._parts.device
    usual = getattr(device, "_waiter", None)
    bare = BareWait() if usual is not None else None
    if bare is not None:
        device._waiter = bare  # type: ignore[attr-defined]
    flights, steps = engine._parts.flights, engine._steps
    try:
        start = time.perf_counter()
        group = [
            engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=new_tokens) for ids in prompts
        ]  # no turn of the loop comes in between, so its task has no step yet
        while any(generation.finish_reason is None for generation in group):
            while flights.begin() is not None:
                pass
            flight = flights.oldest
            assert flight is not None
            if bare is not None:
                bare.wait(flight)
            else:
                flight.completion.wait()
            steps.settle(flight)
        seconds = time.perf_counter() - start
        while (flight := flights.oldest) is not None:  # the surplus step after the last token
            bare.wait(flight) if bare is not None else flight.completion.wait()
            steps.settle(flight)
    finally:
        if usual is not None:
            device._waiter = usual  # type: ignore[attr-defined]
    return sum(len(generation.token_ids) for generation in group) / seconds


async def ways(bench: Bench) -> list[Table]:
    """Ways of waiting and steps in flight, each an engine of its own."""
    await bench.drop_engine()
    rows: list[list[object]] = []
    for in_flight, waiting in ((2, "thread"), (2, "spin"), (2, "block"), (1, "thread"), (1, "block"), (3, "thread")):
        engine = await bench.load(steps_in_flight=in_flight, waiting=waiting)
        row: list[object] = [in_flight, waiting]
        for batch in BATCHES:
            best: Run | None = None
            for _ in range(bench.sizes.turns):
                engine.reset_prefix_cache()
                found = await run(engine, bench.prompts(batch, bench.sizes.prompt), bench.sizes.new)
                best = found if best is None or found.rate > best.rate else best
            assert best is not None
            row.append(best.rate)
        await engine.close()
        collect()
        rows.append(row)
    return [
        Table(
            f"tokens/s by the way of waiting, {bench.sizes.prompt} in, {bench.sizes.new} out",
            ["in flight", "waiting", "1 request", "64 requests"],
            rows,
        )
    ]
