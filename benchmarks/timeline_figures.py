"""Draws the figures of docs/timeline.md, each in light and in dark.

    python benchmarks/timeline_figures.py [--folder docs/images] [--device cuda:0 --shape 0.6b|8b|tiny]

ways      the same texts, waited for in three ways
cell      a text is being written, and a cell computes without awaiting anything
storm     four texts are being written, and eight long prompts arrive at once
paused    three texts: one is paused, then all are, then they go on

The default model, on a card where there is one; with `--shape` random weights instead (nothing is downloaded), as long
as steps take. Each scene is played once before it is recorded. The figures show what a timeline looks like; how fast
anything is depends on the machine and what else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import captured
from report import ROOT, prompts, wait_until_idle

from interactive_infer import Engine
from interactive_infer.timeline import Phase, Timeline, compare

WAYS: dict[str, dict[str, Any]] = {
    "blocking": {"waiting": "block", "steps_in_flight": 1},
    "awaiting": {"steps_in_flight": 1},
    "two in flight": {"steps_in_flight": 2},
}


@dataclass(slots=True)
class Play:
    """What is played: new tokens a text, tokens of a long prompt, how long a cell computes or a pause lasts."""

    device: str
    shape: str | None
    tokens: int
    long_prompt: int
    held_s: float
    asked: int = 0

    async def load(self, **options: Any) -> Engine:
        model = None if self.shape is None else gpu_models.make(self.shape, torch.device(self.device))
        return await Engine.load(model, device=self.device, max_batch_size=16, progress=False, **options)

    def prompts(self, engine: Engine, count: int, length: int | None = None) -> list[list[int]]:
        """`count` of them, of some tens of tokens or of `length`, that none before begins like: nothing is cached."""
        self.asked += 1
        if self.shape is not None:
            return gpu_models.prompts(gpu_models.SHAPES[self.shape]["vocab_size"], count, length or 40, self.asked)
        ids = prompts(engine.tokenizer, count)
        return [[1_000 + self.asked, *((each * 20)[: length - 1] if length else each)] for each in ids]


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


async def plain(play: Play, engine: Engine) -> None:
    await engine.generate(play.prompts(engine, 4), max_tokens=play.tokens // 2, **GREEDY)


async def cell(play: Play, engine: Engine) -> None:
    [prompt] = play.prompts(engine, 1)
    text = engine.generate(prompt, max_tokens=play.tokens, **GREEDY)
    async for token in text:
        if token.index == play.tokens // 4:
            break
    start = time.perf_counter_ns()
    time.sleep(play.held_s)
    engine.timeline.recorder.record(Phase.CELL, start, time.perf_counter_ns(), 12)  # as the notebook layer does
    await text


async def storm(play: Play, engine: Engine) -> None:
    long_prompts = play.prompts(engine, 8, play.long_prompt)
    first = engine.generate(play.prompts(engine, 4), max_tokens=play.tokens, **GREEDY)
    async for token in first[0]:
        if token.index == play.tokens // 4:
            break
    await engine.generate(long_prompts, max_tokens=4, **GREEDY)
    await first


async def paused(play: Play, engine: Engine) -> None:
    group = engine.generate(play.prompts(engine, 3), max_tokens=play.tokens, **GREEDY)
    async for token in group[0]:
        if token.index == play.tokens // 4:
            break
    group[1].pause()
    await asyncio.sleep(play.held_s)
    group.pause()
    await asyncio.sleep(1.5 * play.held_s)
    group.resume()
    await group


async def recorded(scene: Callable[[Play, Engine], Coroutine[Any, Any, None]], play: Play, engine: Engine) -> Timeline:
    """The scene's timeline, once everything that it needs has been captured."""
    await captured(engine, partial(scene, play, engine))
    if play.device == "cpu":
        await asyncio.to_thread(wait_until_idle)
    engine.timeline.clear()
    await scene(play, engine)
    return engine.timeline.copy()


async def draw(play: Play, folder: Path) -> None:
    ways: dict[str, Timeline] = {}
    scenes: dict[str, Timeline] = {}
    for way, options in WAYS.items():
        async with await play.load(**options) as engine:
            ways[way] = await recorded(plain, play, engine)
            if options == WAYS["two in flight"]:
                scenes = {scene.__name__: await recorded(scene, play, engine) for scene in (cell, storm, paused)}
    for theme in ("light", "dark"):
        figures = {name: timeline.figure(theme=theme) for name, timeline in scenes.items()}
        for name, figure in {"ways": compare(ways, theme=theme), **figures}.items():
            path = folder / f"timeline-{name}-{theme}.png"
            figure.savefig(path)
            print(path)
    for name, timeline in {**ways, **scenes}.items():
        print(f"{name}: {timeline.summary().headline()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--device", default="auto", help="cpu or cuda:0; by default a card where there is one")
    parser.add_argument("--shape", choices=list(gpu_models.SHAPES), help="random weights of this shape")
    args = parser.parse_args()
    device = args.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    on_card = device.startswith("cuda")
    play = Play(device, args.shape, *((160, 2_000, 0.05) if on_card else (40, 300, 0.2)))
    args.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(play, args.folder))


if __name__ == "__main__":
    main()
