"""What sampling costs on a CUDA card: microseconds of a CUDA graph's replay, for each kind of request.

    python benchmarks/gpu_sampler.py [--quick] [--filters] [--rows 1 64] [--vocabulary 151936] [--search 2x16 1x32]

Logits are bfloat16. Normal ones (standard deviation 1) are flat: a nucleus of 0.9 holds about half the vocabulary.
Peaked ones are like a model's: a few tokens far above the rest. "more" is what a kind costs beyond the plain draw.
Beside it the draw by PyTorch's operators: softmax, and for top_p a sort of the whole row. `--filters`: only what looks
for a threshold, and no operators. `--search`: rounds and parts of that search, several to compare.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import publish

from interactive_infer.core import sampler_triton
from interactive_infer.core.sampler import Sampler
from interactive_infer.core.sampler_triton import TritonSampler
from interactive_infer.core.sampling_packed import PackedBuffer, PackedInputs, PackedOutputs
from interactive_infer.core.sampling_table import SamplingTable, penalized
from interactive_infer.sampling import SamplingParams

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "argmax": {"temperature": 0},
    "plain draw": {},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": PENALTIES,
    "top_k 50, top_p 0.9, min_p 0.01, penalties": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, **PENALTIES},
    "top_p 0.9, penalties": {"top_p": 0.9, **PENALTIES},
    "plain draw, 5 logprobs": {"logprobs": 5},
}


def replay_us(work: Callable[[], object], repeats: int) -> float:
    """Median time of a replay, in microseconds, of twenty measured together."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1000 / 20)
    return statistics.median(taken)


def made_logits(kind: str, rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocab_size, device="cuda", generator=generator)
    if kind == "peaked":
        logits *= 2.5
        # The largest logits of a row as steps, so that tens of tokens share nearly all of the mass.
        top = 24 - 0.7 * torch.arange(40, device="cuda")
        at = torch.randint(vocab_size, (rows, 40), device="cuda", generator=generator)
        logits.scatter_(1, at, top.expand(rows, -1))
    return logits.bfloat16()


def by_kernels(params: list[SamplingParams], logits: torch.Tensor, repeats: int) -> float:
    rows, vocab_size = logits.shape
    table, sampler = SamplingTable(rows, vocab_size), TritonSampler(vocab_size, rows, logits.device)
    for slot, param in enumerate(params):
        table.assign(slot, param)
        if penalized(param):
            sampler.load_history(slot, range(100), range(50, 300))
    host = np.zeros(table.packed_nbytes(rows), np.uint8)
    key = table.pack(np.arange(rows), np.arange(rows), None, rows, PackedBuffer(host))
    inputs = PackedInputs.views(torch.from_numpy(host).cuda(), key)
    result = torch.zeros(key.output_nbytes, dtype=torch.uint8, device="cuda")
    out = PackedOutputs.views(result, key)
    last_token = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    return replay_us(lambda: sampler(logits, inputs, out, last_token), repeats)


def by_operators(params: list[SamplingParams], logits: torch.Tensor, repeats: int) -> float:
    rows, vocab_size = logits.shape
    table, sampler = SamplingTable(rows, vocab_size), Sampler(vocab_size, rows, logits.device)
    for slot, param in enumerate(params):
        table.assign(slot, param)
        if penalized(param):
            sampler.load_history(slot, range(100), range(50, 300))
    inputs = table.rows(np.arange(rows), np.arange(rows)).to(logits.device)
    return replay_us(lambda: sampler(logits, inputs), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--filters", action="store_true")
    parser.add_argument("--search", nargs="+", default=[f"{sampler_triton.ROUNDS}x{sampler_triton.PIVOTS}"])
    parser.add_argument("--quick", action="store_true", help="three repeats: only to see it work")
    args = parser.parse_args()
    repeats = 3 if args.quick else args.repeats
    figures = []
    for rows in args.rows:
        for shape in ("normal", "peaked"):
            logits = made_logits(shape, rows, args.vocabulary)
            plain = None
            for name, kind in KINDS.items():
                params = [SamplingParams(**kind, seed=row) for row in range(rows)]
                filtered = not {"top_k", "top_p", "min_p"}.isdisjoint(kind)
                if args.filters and not filtered and name != "plain draw":
                    continue
                operators = None if args.filters else by_operators(params, logits, repeats)
                for search in args.search if filtered else args.search[:1]:
                    sampler_triton.ROUNDS, sampler_triton.PIVOTS = map(int, search.split("x"))
                    taken = by_kernels(params, logits, repeats)
                    if name == "plain draw":
                        plain = taken
                    more = taken - plain if plain is not None and taken != plain else None
                    figures.append([rows, shape, name, search if filtered else None, taken, more, operators])
    publish(
        "gpu_sampler",
        f"Sampling on {torch.cuda.get_device_name()}, a vocabulary of {args.vocabulary:,}, µs a replay",
        ["rows", "logits", "kind", "search", "kernels", "more", "operators"],
        figures,
    )


if __name__ == "__main__":
    main()
