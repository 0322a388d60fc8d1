"""Section of gpu.py about two cards: an engine on each, both driven by one loop."""

from __future__ import annotations

import asyncio

import torch
from gpu_bench import BATCHES, Bench, Heartbeat, Run, Table, captured, run, spread

from interactive_infer import Engine
from interactive_infer.timeline.intervals import clip, intersect, intervals, total, union


async def cards(bench: Bench) -> list[Table]:
    """Tokens/s, busy shares and the loop's lag: each card alone, and both at once."""
    devices = [torch.device("cuda", index) for index in range(2)] if bench.is_cuda else [bench.device] * 2
    if bench.is_cuda and torch.cuda.device_count() < 2:
        raise RuntimeError("this section needs two cards")
    other = Bench(bench.shape, devices[1], bench.sizes, compiled=False)
    engines = [await bench.engine(), await other.engine()]
    rows: list[list[object]] = []
    for batch in BATCHES:
        for index, engine in enumerate(engines):
            rows.append([batch, f"card {index} alone", *await _beside_heartbeat(bench, [engine], batch)])
        rows.append([batch, "both", *await _beside_heartbeat(bench, engines, batch)])
    await other.close()
    columns = ["texts a card", "on the loop", "tokens/s, first", "second", "busy, %, first", "second"]
    columns += ["both busy, %", "lag p50, ms", "p99", "max", "beats"]
    title = f"An engine a card on one loop, {bench.sizes.prompt} in, {bench.sizes.new} out; median of turns"
    return [Table(title, columns, rows)]


async def _beside_heartbeat(bench: Bench, engines: list[Engine], batch: int) -> list[object]:
    def once() -> asyncio.Future[list[Run]]:
        for engine in engines:
            engine.reset_prefix_cache()
        return asyncio.gather(
            *(run(engine, bench.prompts(batch, bench.sizes.prompt), bench.sizes.new) for engine in engines)
        )

    await captured(engines[0], once)
    turns: list[list[Run]] = []
    async with Heartbeat() as heart:
        for _ in range(4 * bench.sizes.turns):
            turns.append(await once())
    # The card's share of the time in which each of the engines had texts to write.
    turns.sort(key=lambda runs: sum(found.rate for found in runs))
    runs = turns[len(turns) // 2]
    worked = [union(intervals(found.recording.steps)) for found in runs]
    t0, t1 = max(int(found[0, 0]) for found in worked), min(int(found[-1, 1]) for found in worked)
    shares = [100 * total(clip(found, t0, t1)) / (t1 - t0) for found in worked]
    both = 100 * total(clip(intersect(*worked), t0, t1)) / (t1 - t0) if len(runs) == 2 else None
    blank = [None] * (2 - len(runs))
    return [*(found.rate for found in runs), *blank, *shares, *blank, both, *spread(heart.lags), len(heart.lags)]
