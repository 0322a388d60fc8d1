"""How long one process takes from nothing to an engine's first token, stage by stage: one line of JSON, in seconds.

    python benchmarks/gpu_load.py FOLDER DEVICE

Nothing but torch is imported before the clock starts. `gpu.py load` runs this.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import torch


class StageClock:
    """Stands in for the engine's progress bar: when each stage began. A stage may come again."""

    times: list[tuple[str, float]]

    def __init__(self, shown: bool) -> None:
        StageClock.times = [("before the first stage", time.perf_counter())]

    def __enter__(self) -> StageClock:
        return self

    def update(self, stage: str, done: float) -> None:
        if stage != self.times[-1][0]:
            self.times.append((stage, time.perf_counter()))

    def __exit__(self, *_: object) -> None:
        pass


async def load_once(folder: str, device: str) -> dict[str, float]:
    """Seconds, stage by stage, of a first load in this process."""
    found: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        found[name] = time.perf_counter() - start
        start = time.perf_counter()

    import transformers  # noqa: F401  (torch is imported at the top)

    lap("import transformers")
    import interactive_infer.assembly  # noqa: F401  (what Engine.load imports)
    from interactive_infer import Engine, engine

    lap("import interactive_infer and the modules of transformers that it needs")
    torch.zeros(1, device=device)
    lap("the device's context")
    engine.ProgressBar = StageClock  # type: ignore[attr-defined]
    loaded: Any = await Engine.load(folder, device=device)
    end = time.perf_counter()
    for (stage, began), (_, ended) in itertools.pairwise([*StageClock.times, ("", end)]):
        found[f"load: {stage}"] = found.get(f"load: {stage}", 0.0) + ended - began
    found["load: all of it"] = end - start
    start = time.perf_counter()
    await loaded.generate([1, 2, 3, 4] * 4, temperature=0.0, ignore_eos=True, max_tokens=1)
    lap("first token")
    await loaded.generate([4, 3, 2, 1] * 4, temperature=0.0, ignore_eos=True, max_tokens=1)
    lap("another generation's first token")
    found["Engine.load to first token"] = found["load: all of it"] + found["first token"]
    await loaded.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load_once(*sys.argv[1:]))))
