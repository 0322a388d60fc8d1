"""Tokens per second of 1, 8 and 32 generations, beside the ways transformers offers, and each way's peak memory.

    python benchmarks/throughput.py [--dtype float32 bfloat16] [--cpu-time] [--quick]

All ways run in one process on the same prompts (16 to 64 tokens), greedily, to the same number of new tokens, with
the same thread count; they take turns, forwards and then backwards, and the best and the median of the turns are
shown. Tokens per second are new tokens over the time from the call to the last token, prefill included. `generate`
runs on a model object of its own with transformers' SDPA attention. The prefix cache is emptied before every turn.

`staggered`: a request joins every 50 ms and writes half to one and a half times as many tokens, so requests join
and leave throughout. Memory is the peak resident size of a fresh process that runs that way alone, once.
`--cpu-time` is for a machine that others use too: one thread, and tokens per second of this process's processor time
instead of the wall clock's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from report import load_plain, prompts, publish, wait_until_idle
from transformers import ContinuousBatchingConfig, GenerationConfig

from interactive_infer import Engine

Way = Callable[[list[list[int]], int], Awaitable[int]]
Clock = Callable[[], float]
WAYS = ("engine", "engine, staggered", "generate, one by one", "generate, one padded batch", "generate_batch")


def with_engine(engine: Engine) -> dict[str, Way]:
    async def together(ids: list[list[int]], new_tokens: int) -> int:
        group = engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=new_tokens)
        return sum(len(completion.token_ids) for completion in await group)

    async def staggered(ids: list[list[int]], new_tokens: int) -> int:
        started = []
        for index, prompt in enumerate(ids):
            length = new_tokens // 2 + (index * 13) % (new_tokens + 1)
            started.append(engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=length).future())
            await asyncio.sleep(0.05)
        return sum(len(completion.token_ids) for completion in await asyncio.gather(*started))

    return {"engine": together, "engine, staggered": staggered}


def with_transformers(model: Any) -> dict[str, Way]:
    def greedy(new_tokens: int) -> GenerationConfig:
        return GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, eos_token_id=None)

    async def one_by_one(ids: list[list[int]], new_tokens: int) -> int:
        written = 0
        for prompt in ids:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
                generation_config=greedy(new_tokens),
            )
            written += out.shape[1] - len(prompt)
        return written

    async def padded(ids: list[list[int]], new_tokens: int) -> int:
        width = max(map(len, ids))
        batch = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in ids])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in ids])
        out = model.generate(batch, attention_mask=mask, generation_config=greedy(new_tokens))
        return len(ids) * (out.shape[1] - width)

    async def continuous(ids: list[list[int]], new_tokens: int) -> int:
        # The pool and the budget of a step are the engine's defaults. The manager stays from turn to turn; blocks are
        # not shared, or a later turn would find the prompts of an earlier one.
        out = model.generate_batch(
            ids,
            generation_config=greedy(new_tokens),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16,
                num_blocks=2048,
                max_batch_tokens=256,
                max_requests_per_batch=64,
                allow_block_sharing=False,
            ),
            persistent_manager=True,
        )
        failed = [output.error for output in out.values() if output.error]
        if failed or len(out) < len(ids):
            raise RuntimeError(f"generate_batch: {failed or 'requests are missing'}")
        return sum(len(output.generated_tokens) for output in out.values())

    return {"generate, one by one": one_by_one, "generate, one padded batch": padded, "generate_batch": continuous}


async def timed(way: Way, ids: list[list[int]], new_tokens: int, clock: Clock = time.perf_counter) -> float:
    start = clock()
    written = await way(ids, new_tokens)
    return written / (clock() - start)


async def measure(dtype: str, counts: list[int], new_tokens: int, turns: int, clock: Clock) -> list[dict[str, Any]]:
    """One entry a way and count, with the rate of every turn in tokens/s, or why the way does not run."""
    model, tokenizer = load_plain(dtype)
    engine = await Engine.load(dtype=dtype, progress=False)
    ways = with_engine(engine) | with_transformers(model)
    ids = prompts(tokenizer, max(counts))
    entries = []
    for way in ways.values():  # one untimed short run each: lazy initialisation is not what is compared
        if way is not ways["generate_batch"]:
            await timed(way, ids[:2], 4)
    for count in counts:
        names = [name for name in WAYS if count > 1 or name not in ("engine, staggered", "generate, one padded batch")]
        if count > 8:
            names.remove("generate, one by one")  # its rate does not depend on how many there are
        rates: dict[str, list[float]] = {name: [] for name in names}
        problems: dict[str, str] = {}
        for turn in range(turns):
            for name in names if turn % 2 == 0 else reversed(names):
                if name in problems:
                    continue
                engine.reset_prefix_cache()
                try:
                    if name == "generate_batch" and not rates[name]:
                        await timed(ways[name], ids[:1], 2)  # starts its manager
                    rates[name].append(await timed(ways[name], ids[:count], new_tokens, clock))
                except Exception as error:
                    if name != "generate_batch":
                        raise
                    problems[name] = f"{type(error).__name__}: {error}"
                outcome = problems[name] if name in problems else f"{rates[name][-1]:.1f} tokens/s"
                print(f"{dtype}, {count} generations, {name}: {outcome}", flush=True)
        entries += [
            {"dtype": dtype, "count": count, "way": name, "rates": rates[name], "problem": problems.get(name)}
            for name in names
        ]
    await engine.close()
    if manager := getattr(model, "_cached_continuous_batching_manager", None):
        manager.stop(block=True)
    return entries


async def run_alone(name: str, dtype: str, count: int, new_tokens: int) -> dict[str, float]:
    """This process's peak resident size in MB before and after one run of one way."""
    if name.startswith("engine"):
        engine = await Engine.load(dtype=dtype, progress=False)
        ways, tokenizer = with_engine(engine), engine.tokenizer
    else:
        model, tokenizer = load_plain(dtype)
        ways = with_transformers(model)
    loaded = peak_mb()
    await ways[name](prompts(tokenizer, count), new_tokens)
    return {"loaded": loaded, "peak": peak_mb()}


def peak_mb() -> float:
    """Peak resident size of this process. Not `ru_maxrss` on Linux: a child inherits its parent's there."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text(encoding="ascii").split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def memory_of(name: str, dtype: str, count: int, new_tokens: int, threads: int) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--alone", name, "--dtype", dtype, "--threads", str(threads)]
    command += ["--counts", str(count), "--new-tokens", str(new_tokens)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        return None
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="16 new tokens, one turn, no memory: only to see it work")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by processor time: for a busy machine")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.new_tokens, args.turns = 16, 1
    if args.cpu_time:
        args.threads = 1
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if args.alone:
        print(json.dumps(asyncio.run(run_alone(args.alone, args.dtype[0], args.counts[0], args.new_tokens))))
        return
    if not args.cpu_time and not args.quick:
        wait_until_idle()
    entries = [
        entry
        for dtype in args.dtype
        for entry in asyncio.run(measure(dtype, args.counts, args.new_tokens, args.turns, clock))
    ]
    most = max(args.counts)
    peaks = {}
    if not args.quick and not args.cpu_time:
        for dtype in args.dtype:
            for name in WAYS:
                count = 2 if "one by one" in name else most  # memory does not grow with what follows
                peaks[name, dtype] = memory_of(name, dtype, count, args.new_tokens, args.threads)
    rows = []
    for dtype in args.dtype:
        for name in WAYS:
            row: list[object] = [dtype, name]
            for count in args.counts:
                found = [e for e in entries if (e["dtype"], e["way"], e["count"]) == (dtype, name, count)]
                rates = found[0]["rates"] if found else []
                best = max(rates, default=0.0)
                shown = f"{best:.0f} ({statistics.median(rates):.0f})" if len(rates) > 1 else f"{best:.0f}"
                row.append(shown if rates else "–" if not found else "fails")
            if peaks:
                peak = peaks.get((name, dtype))
                row.append(f"{peak['peak']:,.0f}" if peak else "–")
            rows.append(row)
    for entry in entries:
        if entry["problem"]:
            print(f"{entry['way']} with {entry['count']} in {entry['dtype']}: {entry['problem']}")
    unit = "tokens a second of processor time" if args.cpu_time else "tokens/s"
    publish(
        "throughput-cpu-time" if args.cpu_time else "throughput",
        f"SmolLM2-135M, greedy, {args.new_tokens} new tokens each; {unit}: "
        f"{'one turn' if args.turns == 1 else f'best (median) of {args.turns} turns'}"
        f"{f'; peak MB: of a process with {most}' if peaks else ''}",
        ["dtype", "way", *(str(count) for count in args.counts), *(["peak MB"] if peaks else [])],
        rows,
        entries=entries,
        memory=[{"way": way, "dtype": dtype, "mb": mb} for (way, dtype), mb in peaks.items()],
    )


if __name__ == "__main__":
    main()
