"""Sections of gpu.py about an engine's life: how long it takes to load, and whether it gives its memory back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import Bench, Table, collect

from interactive_infer import Engine

RUNS = ("first, nothing compiled", "second, compiled kernels in Triton's cache")


async def load(bench: Bench) -> list[Table]:
    """A folder of safetensors to the first token, in fresh processes; and a model object, in this one."""
    await bench.drop_engine()
    bench.drop_peer()
    model = gpu_models.make(bench.shape, bench.device)
    start = time.perf_counter()
    with gpu_models.on_disk(model) as folder, tempfile.TemporaryDirectory() as cache:
        saved = time.perf_counter() - start
        del model
        collect()
        for file in folder.glob("*.safetensors"):  # all of it into the system's cache
            with file.open("rb") as content:
                while content.read(1 << 26):
                    pass
        runs = {name: await asyncio.to_thread(_child, folder, bench.device, cache) for name in RUNS}
    stages = list(dict.fromkeys(stage for found in runs.values() for stage in found))
    rows: list[list[object]] = [[stage, *(found.get(stage) for found in runs.values())] for stage in stages]
    engine = await bench.engine()
    start = time.perf_counter()
    await engine.generate(bench.prompts(1, 16)[0], temperature=0.0, max_tokens=1)
    rows.append(["Engine.load of a model object, in a process that has run", bench.loads[-1], None])
    rows.append(["first token of that", time.perf_counter() - start, None])
    return [
        Table(
            f"From Engine.load of a folder to the first token, seconds; files in the system's cache (written in "
            f"{saved:.0f} s)",
            ["stage", *RUNS],
            rows,
            {"stages": runs},
        )
    ]


def _child(folder: Path, device: torch.device, cache: str) -> dict[str, float]:
    environment = dict(os.environ, TRITON_CACHE_DIR=cache)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("gpu_load.py")), str(folder), str(device)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if result.returncode:
        raise RuntimeError(f"the loading process failed: {result.stderr[-1500:]}")
    stages: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return stages


async def memory(bench: Bench) -> list[Table]:
    """Free memory of the card, from before a model is made until after its engine and it are gone."""
    await bench.drop_engine()
    bench.drop_peer()
    first = _free(bench.device)
    rows: list[list[object]] = []

    def note(moment: str) -> None:
        free = _free(bench.device)
        held = torch.cuda.memory_reserved(bench.device) if bench.is_cuda else 0
        rows.append([moment, free / 1e9, (free - first) / 1e9, held / 1e9])

    note("before")
    model = gpu_models.make(bench.shape, bench.device)
    note("model made")
    made = _free(bench.device)
    engine = await Engine.load(model, progress=False)
    info = engine.info()
    note("Engine.load")
    await bench.warm_up(engine)
    note("generations have run")
    reader = asyncio.create_task(_hold_up(engine.generate(bench.prompts(1, 16)[0], max_tokens=100, ignore_eos=True)))
    await asyncio.sleep(0.1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    kept: Exception | None = None
    try:
        async for _ in engine.generate(bench.prompts(1, 16)[0], max_tokens=100, ignore_eos=True):
            raise ValueError("in the middle of a stream")
    except ValueError as error:
        kept = error
    note("a reader interrupted, an exception held")
    freed = await engine.close()
    note("engine.close(), the exception still held")
    lacking = made - _free(bench.device)
    del engine
    collect()
    note("collected, caches emptied")
    del model
    collect()
    note("model gone")
    assert kept is not None
    return [
        Table(
            f"Free memory, GB. KV cache {info.kv_cache_bytes / 1e9:.2f}, weights {info.weights_bytes / 1e9:.2f}; "
            f"close() says {freed / 1e9:.2f} freed; after it {lacking / 1e9:.2f} less are free than once the model "
            "was made",
            ["moment", "free", "since before", "held by torch"],
            rows,
            {"lacking_bytes": lacking, "freed_bytes": freed},
        )
    ]


async def _hold_up(generation: Any) -> None:
    async for _ in generation:
        await asyncio.sleep(10)


def _free(device: torch.device) -> int:
    """Free bytes of the card; of a CPU, what this process holds, negative."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.mem_get_info(device)[0]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return -pages * os.sysconf("SC_PAGE_SIZE")
