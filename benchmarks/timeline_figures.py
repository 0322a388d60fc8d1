"""Draws the figures of docs/timeline.md, each in light and in dark.

    python benchmarks/timeline_figures.py [--folder docs/images]

The default model, on a card where there is one. They show what a timeline looks like; how fast anything is depends on
the machine and what else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from report import ROOT, prompts

from interactive_infer import Engine
from interactive_infer.timeline import Phase, Timeline, compare

WAYS: dict[str, dict[str, Any]] = {
    "blocking": {"waiting": "block", "steps_in_flight": 1},
    "awaiting": {"steps_in_flight": 1},
    "two in flight": {"steps_in_flight": 2},
}


async def ways() -> dict[str, Timeline]:
    """The same texts, waited for in three ways."""
    kept = {}
    for way, options in WAYS.items():
        async with await Engine.load(progress=False, **options) as engine:
            await engine.generate("Warming up", max_tokens=8)
            engine.timeline.clear()
            ids = prompts(engine.tokenizer, 4)
            await engine.generate(ids, max_tokens=24, temperature=0, ignore_eos=True)
            kept[way] = engine.timeline.copy()
    return kept


async def cell(engine: Engine) -> None:
    """A text is written; a cell computes for 0.2 s without awaiting anything."""
    text = engine.generate("Once upon a time", max_tokens=40, temperature=0, ignore_eos=True)
    async for token in text:
        if token.index == 10:
            break
    start = time.perf_counter_ns()
    time.sleep(0.2)
    engine.timeline.recorder.record(Phase.CELL, start, time.perf_counter_ns(), 12)  # as the notebook layer does
    await text


async def storm(engine: Engine) -> None:
    """Four texts are being written; eight long prompts arrive at once."""
    ids = prompts(engine.tokenizer, 12)
    first = engine.generate(ids[:4], max_tokens=40, temperature=0, ignore_eos=True)
    async for token in first[0]:
        if token.index == 10:
            break
    await engine.generate([(each * 20)[:300] for each in ids[4:]], max_tokens=4, temperature=0, ignore_eos=True)
    await first


async def paused(engine: Engine) -> None:
    """Three texts; one is paused, then all are, then they go on."""
    group = engine.generate(prompts(engine.tokenizer, 3), max_tokens=40, temperature=0, ignore_eos=True)
    async for token in group[0]:
        if token.index == 10:
            break
    group[1].pause()
    await asyncio.sleep(0.2)
    group.pause()
    await asyncio.sleep(0.3)
    group.resume()
    await group


async def draw(folder: Path) -> None:
    def save(name: str, figure: Any, theme: str) -> None:
        path = folder / f"timeline-{name}-{theme}.png"
        figure.savefig(path)
        print(path)

    kept = await ways()
    for theme in ("light", "dark"):
        save("ways", compare(kept, theme=theme), theme)
    async with await Engine.load(progress=False) as engine:
        await engine.generate("Warming up", max_tokens=8)
        for scene in (cell, storm, paused):
            engine.reset_prefix_cache()
            await asyncio.sleep(0.1)  # the drawing before has held the loop
            engine.timeline.clear()
            await scene(engine)
            for theme in ("light", "dark"):
                save(scene.__name__, engine.timeline.figure(theme=theme), theme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(folder))


if __name__ == "__main__":
    main()
