"""Sections of gpu.py that stand the engine beside transformers: `generate`, and its continuous batching."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from gpu_bench import BATCHES, Bench, Table, collect, run, spread
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from interactive_infer import Engine


async def tokens(bench: Bench) -> list[Table]:
    """Tokens/s of 1 and 64 equal requests, engine and `generate` in turn."""
    sizes = bench.sizes
    engine, model = await bench.engine(), bench.peer()
    rows: list[list[object]] = []
    for batch in BATCHES:
        ids = bench.prompts(batch, sizes.prompt)
        inputs = torch.tensor(ids, device=bench.device)

        def generate(cache: str, inputs: torch.Tensor = inputs) -> float:
            return _generate(model, inputs, sizes.new, cache)

        ways: dict[str, Callable[[], float]] = {"dynamic": lambda g=generate: g("dynamic")}
        generate("dynamic", inputs[:, :8]) if batch == 1 else None  # lazy initialisation
        compile_s = None
        if bench.compiled:
            ways["static"] = lambda g=generate: g("static")
            start = time.perf_counter()
            generate("static")
            generate("static")
            compile_s = time.perf_counter() - start
        rates: dict[str, list[float]] = defaultdict(list)
        for turn in range(sizes.turns):
            engine.reset_prefix_cache()
            rates["engine"].append((await run(engine, ids, sizes.new)).rate)
            for name, way in ways.items():
                if turn == 0 or name != "dynamic":  # slow, and the same at every turn
                    rates[name].append(way())
        best = {name: max(found) for name, found in rates.items()}
        rows.append(
            [
                batch,
                best["engine"],
                best["dynamic"],
                best["engine"] / best["dynamic"],
                best.get("static"),
                best["engine"] / best["static"] if "static" in best else None,
                compile_s,
            ]
        )
    return [
        Table(
            f"tokens/s, {sizes.prompt} in, {sizes.new} out, greedy, best of {sizes.turns}",
            ["requests", "engine", "generate, dynamic", "×", "generate, compiled static", "×", "compiling, s"],
            rows,
        )
    ]


def _generate(model: Any, inputs: torch.Tensor, new_tokens: int, cache: str) -> float:
    """Tokens/s of one blocking `generate`."""
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        eos_token_id=None,
        cache_implementation=cache,
    )
    start = time.perf_counter()
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    written = out[:, inputs.shape[1] :].cpu().numel()
    return written / (time.perf_counter() - start)


# ---- requests that arrive one after the other -----------------------------------------------------------------------

CONTINUOUS: dict[str, dict[str, Any]] = {
    "its defaults": {},
    "CUDA graphs, async batching": {"use_cuda_graph": True, "use_async_batching": True},
    "CUDA graphs, compiled": {"use_cuda_graph": True, "default_compile_level": 1},
}
_CPU_POOL = {"page_size": 16, "num_blocks": 2048, "max_batch_tokens": 256}  # it sizes itself on a card only


async def arrivals(bench: Bench) -> list[Table]:
    """64 requests over two seconds, and at once: the engine beside transformers' continuous batching."""
    sizes = bench.sizes
    engine = await bench.engine()
    rows: list[list[object]] = []
    for way, over_s in (("over time", sizes.arrival_s), ("at once", 0.0)):
        for _ in range(sizes.turns):
            engine.reset_prefix_cache()
            rows.append(["engine", way, *await _arrive(engine, bench.prompts(64, sizes.prompt), sizes.new, over_s)])
    await bench.drop_engine()  # its peer takes a share of what is free
    model = bench.peer()
    problems: dict[str, str] = {}
    for name, settings in CONTINUOUS.items():
        if "compiled" in name and not bench.compiled:
            continue
        try:
            rows += await asyncio.to_thread(_continuous, bench, model, name, settings)
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
            print(f"generate_batch, {name}: {problems[name]}", flush=True)
        collect()
    return [
        Table(
            f"64 requests of {sizes.prompt} in, {sizes.new} out; over time: one every "
            f"{sizes.arrival_s / 64 * 1e3:.0f} ms; time to first token in ms",
            ["way", "arrivals", "tokens/s", "seconds", "first token p50", "p99", "max"],
            rows,
            {"problems": problems},
        )
    ]


async def _arrive(engine: Engine, prompts: list[list[int]], new_tokens: int, over_s: float) -> list[object]:
    start = time.perf_counter()

    async def ask(index: int) -> Any:
        await asyncio.sleep(max(0.0, start + over_s * index / len(prompts) - time.perf_counter()))
        return await engine.generate(prompts[index], temperature=0.0, ignore_eos=True, max_tokens=new_tokens)

    completions = await asyncio.gather(*map(ask, range(len(prompts))))
    seconds = time.perf_counter() - start
    written = sum(len(completion.token_ids) for completion in completions)
    firsts = [completion.timing.time_to_first_token * 1e3 for completion in completions]
    return [written / seconds, seconds, *spread(firsts)]


def _continuous(bench: Bench, model: Any, name: str, settings: dict[str, Any]) -> list[list[object]]:
    """transformers' continuous batching, its manager made and warm before the clock starts."""
    sizes = bench.sizes
    config = GenerationConfig(do_sample=False, max_new_tokens=sizes.new, pad_token_id=0, eos_token_id=-1)
    pool = {"max_memory_percent": 0.5} if bench.is_cuda else _CPU_POOL
    rows: list[list[object]] = []
    with model.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**pool, **settings, allow_block_sharing=False),
        timeout=10,
        workload_hints=WorkloadHints(sizes.prompt, sizes.new, 64),
    ) as manager:
        _feed(manager, bench.prompts(64, sizes.prompt), min(16, sizes.new), 0.0)
        for way, over_s in (("over time", sizes.arrival_s), ("at once", 0.0)):
            found = _feed(manager, bench.prompts(64, sizes.prompt), sizes.new, over_s)
            rows.append([f"generate_batch, {name}", way, *found])
    return rows


def _feed(manager: Any, prompts: list[list[int]], new_tokens: int, over_s: float) -> list[object]:
    asked: dict[str, float] = {}
    firsts: list[float] = []
    written = 0
    start = time.perf_counter()
    deadline = start + 120
    while len(firsts) < len(prompts):
        now = time.perf_counter()
        if now > deadline or not manager.is_running():
            raise RuntimeError(f"{len(prompts) - len(firsts)} of {len(prompts)} requests did not end within 120 s")
        while len(asked) < len(prompts) and start + over_s * len(asked) / len(prompts) <= now:
            request = manager.add_request(prompts[len(asked)], max_new_tokens=new_tokens, record_timestamps=True)
            asked[request] = time.perf_counter()
        result = manager.get_result(timeout=0.002)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            written += len(result.generated_tokens)
            firsts.append((result.timestamps[0] - asked[result.request_id]) * 1e3)
    seconds = time.perf_counter() - start
    return [written / seconds, seconds, *spread(firsts)]
