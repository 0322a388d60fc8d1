"""How long cancel, pause, resume and update take to act while eight generations run.

    python benchmarks/control.py [--dtype bfloat16] [--quick]

All times run from the call, in ms, and are medians and maxima over some repeats; a step's own time is stated beside
them. `tokens` are what still arrived after the call: DESIGN rule 5 allows none after cancel and two after pause, and
update holds from the next planned step, after what is in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
from report import prompts, publish, wait_until_idle

from interactive_infer import Engine, Generation

RUNNING = 8


def ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


async def started(generation: Generation, tokens: int) -> None:
    """Returns once `generation` has `tokens` tokens."""
    async for token in generation:
        if token.index + 1 >= tokens:
            return


async def cancel(engine: Engine, ids: list[int], from_thread: bool) -> dict[str, tuple[float, int]]:
    generation = engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=400)
    await started(generation, 8)
    held = engine.info().kv_tokens_in_use
    reader = generation.future()
    await asyncio.sleep(0)
    before, start = len(generation.token_ids), time.perf_counter()
    if from_thread:
        await asyncio.to_thread(generation.cancel)
    else:
        generation.cancel()
    await reader
    ended = ms_since(start)
    published = len(generation.token_ids) - before
    while engine.info().kv_tokens_in_use >= held:
        await asyncio.sleep(0)
    where = " from a thread" if from_thread else ""
    return {f"cancel{where}: reader returns": (ended, published), f"cancel{where}: pages back": (ms_since(start), 0)}


async def pause_and_resume(engine: Engine, ids: list[int], pause_s: float) -> dict[str, tuple[float, int]]:
    generation = engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=400)
    await started(generation, 8)
    before, start = len(generation.token_ids), time.perf_counter()
    generation.pause()
    last = 0.0
    seen = before
    while ms_since(start) < pause_s * 1e3:
        await asyncio.sleep(0.0005)
        if len(generation.token_ids) > seen:
            seen, last = len(generation.token_ids), ms_since(start)
    start = time.perf_counter()
    generation.resume()
    await started(generation, seen + 1)
    resumed = ms_since(start)
    generation.cancel()
    return {"pause: last token arrives": (last, seen - before), "resume: first token arrives": (resumed, 0)}


async def update(engine: Engine, ids: list[int], marker: int) -> dict[str, tuple[float, int]]:
    generation = engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=400)
    await started(generation, 8)
    before, start = len(generation.token_ids), time.perf_counter()
    generation.update(logit_bias={marker: 100.0})
    async for token in generation:
        if token.index >= before and token.id == marker:
            break
    took = ms_since(start)
    generation.cancel()
    return {"update: first token under it": (took, token.index - before)}


async def measure(dtype: str, repeats: int) -> tuple[list[list[object]], float]:
    engine = await Engine.load(dtype=dtype, progress=False)
    ids = prompts(engine.tokenizer, RUNNING + 1)
    # The other seven run on, restarted whenever they end.
    finished = asyncio.Event()

    async def keep_running(prompt: list[int]) -> None:
        while not finished.is_set():
            await engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=1000)

    others = [asyncio.create_task(keep_running(prompt)) for prompt in ids[: RUNNING - 1]]
    await asyncio.sleep(1.0)
    marker = engine.tokenizer("!", add_special_tokens=False)["input_ids"][0]
    found: dict[str, list[tuple[float, int]]] = {}
    for _ in range(repeats):
        for result in (
            await cancel(engine, ids[-1], from_thread=False),
            await cancel(engine, ids[-1], from_thread=True),
            await pause_and_resume(engine, ids[-1], pause_s=0.3),
            await update(engine, ids[-1], marker),
        ):
            for name, figures in result.items():
                found.setdefault(name, []).append(figures)
    steps = engine.timeline.recorder.snapshot().steps
    step_ms = statistics.median(((steps["end"] - steps["start"]) / 1e6).tolist())
    finished.set()
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await engine.close()
    rows: list[list[object]] = [
        [
            dtype,
            name,
            statistics.median([took for took, _ in figures]),
            max(took for took, _ in figures),
            max(tokens for _, tokens in figures),
        ]
        for name, figures in found.items()
    ]
    return rows, step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two repeats: only to see it work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wait_until_idle()
    rows, step_ms = asyncio.run(measure(args.dtype, 2 if args.quick else args.repeats))
    publish(
        "control",
        f"What acts when, {RUNNING} generations running, a step takes {step_ms:.1f} ms (median), SmolLM2-135M",
        ["dtype", "call: effect", "median ms", "max ms", "tokens after the call (max)"],
        rows,
        step_ms=step_ms,
    )


if __name__ == "__main__":
    main()
