"""How late the event loop runs a callback that was due, while 1, 8 and 32 generations are written on it.

    python benchmarks/loop_lag.py [--dtype bfloat16] [--quick]

A heartbeat sleeps 5 ms and takes how much later than that it woke. Every generation has a reader, `async for`, on the
same loop, so the decoding of text is included. Lag and tokens/s come from the same run. The row `idle loop` is the
heartbeat alone: what the timer (rounded up to 1 ms by epoll) and the machine's other processes add. The last row is
the same heartbeat beside a blocking `model.generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable

import torch
from report import load_plain, percentile, prompts, publish, wait_until_idle

from interactive_infer import Engine, Generation

PERIOD_S = 0.005


async def beside_heartbeat(work: Awaitable[int]) -> tuple[float, list[float]]:
    """Tokens/s of `work`, which returns its number of tokens, and the heartbeat's lags in ms meanwhile."""
    lags: list[float] = []

    async def beat() -> None:
        while True:
            due = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            lags.append((time.perf_counter() - due) * 1e3)

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0)  # its first sleep has begun
    start = time.perf_counter()
    written = await work
    seconds = time.perf_counter() - start
    await asyncio.sleep(2 * PERIOD_S)  # the beat that a blocking call held up is counted too
    heart.cancel()
    return written / seconds, lags


async def generations(engine: Engine, ids: list[list[int]], new_tokens: int) -> int:
    async def read(generation: Generation) -> int:
        return sum([1 async for _ in generation])

    group = engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=new_tokens)
    return sum(await asyncio.gather(*map(read, group)))


async def idle(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return 0


async def measure(dtype: str, counts: list[int], new_tokens: int) -> list[list[object]]:
    model, tokenizer = load_plain(dtype)
    engine = await Engine.load(dtype=dtype, progress=False)
    ids = prompts(tokenizer, max(counts))
    await generations(engine, ids[:2], 4)  # lazy initialisation

    async def blocking() -> int:
        out = model.generate(torch.tensor([ids[0]]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return int(out.shape[1]) - len(ids[0])

    runs = [("idle loop", idle(2.0))]
    runs += [(f"engine, {count}", generations(engine, ids[:count], new_tokens)) for count in counts]
    runs += [("blocking generate, 1", blocking())]
    rows: list[list[object]] = []
    for name, work in runs:
        engine.reset_prefix_cache()
        rate, lags = await beside_heartbeat(work)
        late = [percentile(lags, 0.5), percentile(lags, 0.99), max(lags)]
        rows.append([dtype, name, rate if rate else None, *late, len(lags)])
        spoken = f"{rate:.1f} tokens/s, " if rate else ""
        print(f"{dtype}, {name}: {spoken}lag p99 {late[1]:.1f} ms", flush=True)
    await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="16 new tokens, on a busy machine too: to see it work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.quick:
        wait_until_idle()
    rows = []
    for dtype in args.dtype:
        rows += asyncio.run(measure(dtype, args.counts, 16 if args.quick else args.new_tokens))
    publish(
        "loop_lag",
        f"Lag of a {PERIOD_S * 1e3:.0f} ms heartbeat in ms, SmolLM2-135M, {args.threads} threads",
        ["dtype", "on the loop", "tokens/s", "p50", "p99", "max", "beats"],
        rows,
    )


if __name__ == "__main__":
    main()
