"""The whole path of a card's step on a CPU: Triton interprets the kernels, a graph is the function that it captured.

Run as a script, in a process of its own, since Triton decides when it is imported whether it interprets. Prints what
was found as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Hashable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from interactive_infer import Engine, assembly
from interactive_infer.core import cuda, graph_runner
from interactive_infer.core.device import CPUDevice
from tests.core.interpreter import let_scalars_be_bounds
from tests.tiny_models import VOCAB_SIZE, tiny_model

NEW = 4


class Graphs:
    """In place of `core.graphs.Graphs`: replays by calling again."""

    def __init__(self, _: torch.device) -> None:
        self._work: dict[Hashable, Callable[[], object]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def __len__(self) -> int:
        return len(self._work)

    def replay(self, key: Hashable) -> None:
        self._work[key]()

    def capture(self, key: Hashable, work: Callable[[], object]) -> None:
        self._work[key] = work

    def clear(self) -> None:
        self._work.clear()


class Stream:
    def synchronize(self) -> None:
        pass


class Card(CPUDevice):
    """In place of `core.cuda.CUDADevice`."""

    def __init__(self, torch_device: torch.device, waiting: str) -> None:
        super().__init__()
        self.stream = Stream()
        self.here = 0

    def submit(self, work: Callable[[], Callable[[], Any]], *, here: bool = False) -> Any:
        self.here += here
        return super().submit(work)


def simulate() -> None:
    let_scalars_be_bounds()
    graph_runner.Graphs = Graphs
    graph_runner._SAMPLING_BYTES = 2048  # which a hundred entries of logit bias outgrow
    cuda.CUDADevice = Card
    cuda.missing_for_kernels = lambda place: None
    assembly._kind_of_device = lambda model: "cuda"
    zeros = torch.zeros
    torch.zeros = lambda *size, pin_memory=False, **options: zeros(*size, **options)
    torch.cuda.device = torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()


def prompt(length: int) -> list[int]:
    return torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(ids) :].tolist()


async def greedy(engine: Engine, *lengths: int) -> list[list[int]]:
    asked = [engine.generate(prompt(n), temperature=0, max_tokens=NEW, ignore_eos=True) for n in lengths]
    return [list((await generation).token_ids) for generation in asked]


async def run(name: str) -> dict[str, Any]:
    model = tiny_model(name)
    found: dict[str, Any] = {}
    async with await Engine.load(
        model,
        progress=False,
        freeze_gc=False,
        page_size=4,
        kv_cache_tokens=96,
        max_batch_size=3,
        max_step_tokens=12,
    ) as engine:
        lengths = (17, 5, 9, 1)
        expected = [reference(model, prompt(n)) for n in lengths]
        found["together"] = await greedy(engine, *lengths) == expected
        found["layers"], found["launches"] = engine.info().layers, engine.info().launches
        found["launched on the loop"] = engine._parts.device.here

        hook = model.register_forward_hook(lambda *_: None)
        found["with a hook"] = (await greedy(engine, 17))[0] == expected[0]
        found["launches with a hook"] = engine.info().launches
        hook.remove()

        sampled = engine.generate(
            prompt(9), max_tokens=NEW, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=5, logprobs=2, ignore_eos=True
        )
        first = (await sampled).token_ids
        found["logprobs"] = all(len(token.alternatives) == 2 for token in sampled.tokens)
        again = engine.generate(
            prompt(9), max_tokens=NEW, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=5, ignore_eos=True
        )
        others = engine.generate(prompt(5), max_tokens=NEW, seed=1, ignore_eos=True)
        found["seeded"] = (await again).token_ids == first
        await others
        bias = {token: -50.0 for token in range(VOCAB_SIZE - 20)}
        biased = engine.generate(prompt(5), max_tokens=NEW, logit_bias=bias, temperature=0, ignore_eos=True)
        beside = engine.generate(prompt(17), max_tokens=NEW, temperature=0, ignore_eos=True)
        found["much logit bias"] = min((await biased).token_ids) >= VOCAB_SIZE - 20
        found["beside much logit bias"] = list((await beside).token_ids) == expected[0]
        engine._parts.cache.check(held=[])
    return found


if __name__ == "__main__":
    simulate()
    print(json.dumps({name: asyncio.run(run(name)) for name in sys.argv[1:]}))
