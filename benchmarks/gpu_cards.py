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
    engines = {0: await bench.engine(), 1: await other.engine()}
    rows: list[list[object]] = []
    for batch in BATCHES:
        for card, engine in engines.items():
            rows.append([batch, f"card {card} alone", *await _beside_heartbeat(bench, {card: engine}, batch)])
        rows.append([batch, "both", *await _beside_heartbeat(bench, engines, batch)])
    await other.close()
    columns = ["texts a card", "on the loop", "tokens/s, first", "second", "busy, %, first", "second"]
    columns += ["both busy, %", "lag p50, ms", "p99", "max", "beats"]
    title = f"An engine a card on one loop, {bench.sizes.prompt} in, {bench.sizes.new} out; median of turns"
    return [Table(title, columns, rows)]


async def _beside_heartbeat(bench: Bench, engines: dict[int, Engine], batch: int) -> list[object]:
    async def once() -> dict[int, Run]:
        for engine in engines.values():
            engine.reset_prefix_cache()
        asked = (run(each, bench.prompts(batch, bench.sizes.prompt), bench.sizes.new) for each in engines.values())
        return dict(zip(engines, await asyncio.gather(*asked), strict=True))

    await captured(next(iter(engines.values())), once)
    turns: list[dict[int, Run]] = []
    async with Heartbeat() as heart:
        for _ in range(4 * bench.sizes.turns):
            turns.append(await once())
    turns.sort(key=lambda runs: sum(found.rate for found in runs.values()))
    runs = turns[len(turns) // 2]
    # Shares of the time in which each of the engines had texts to write.
    worked = {card: union(intervals(found.recording.steps)) for card, found in runs.items()}
    t0, t1 = max(int(ran[0, 0]) for ran in worked.values()), min(int(ran[-1, 1]) for ran in worked.values())
    shares = {card: 100 * total(clip(ran, t0, t1)) / (t1 - t0) for card, ran in worked.items()}
    both = 100 * total(clip(intersect(*worked.values()), t0, t1)) / (t1 - t0) if len(worked) == 2 else None
    rates = {card: found.rate for card, found in runs.items()}
    by_card = [values.get(card) for values in (rates, shares) for card in range(2)]
    return [*by_card, both, *spread(heart.lags), len(heart.lags)]
