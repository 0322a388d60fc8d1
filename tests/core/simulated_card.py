"""The whole path of a card's step on a CPU: Triton interprets the kernels, a graph is the function that it captured.

Capturing calls it, so that whoever listens to the model is seen there too; at once, since what it reads and writes is
the step's that has just run.

Run as a script, in a process of its own, since Triton decides when it is imported whether it interprets. Prints what
was found as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Hashable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from interactive_infer import Engine, assembly
from interactive_infer.core import cuda, graph_runner
from interactive_infer.core.device import CPUDevice
from interactive_infer.core.device import _run as run_on_this_thread
from interactive_infer.core.shapes import Shape
from interactive_infer.waiting import Completion
from tests.core.interpreter import let_scalars_be_bounds
from tests.tiny_models import VOCAB_SIZE, tiny_model

NEW = 4


class Graphs:
    """In place of `core.graphs.Graphs`: replays by calling again.

    `capturing`: what is called at the start of a forward's capture; `in_capture`: whether one is going on.
    """

    capturing: Callable[[], object] = staticmethod(lambda: None)
    in_capture = False

    def __init__(self, _: torch.device) -> None:
        self._work: dict[Hashable, Callable[[], object]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def __len__(self) -> int:
        return len(self._work)

    def replay(self, key: Hashable) -> None:
        self._work[key]()

    def capture(self, key: Hashable, work: Callable[[], object], *, uses_blas: bool) -> None:
        if uses_blas:  # a second sampling would count in the penalties
            Graphs.in_capture = True
            try:
                Graphs.capturing()
                work()
            finally:
                Graphs.in_capture = False
        self._work[key] = work

    def forwards(self) -> int:
        return sum(isinstance(key, Shape) for key in self._work)

    def clear(self) -> None:
        self._work.clear()


class Stream:
    def synchronize(self) -> None:
        pass


class CaptureThread:
    """In place of the capture's `WorkThread`: not one."""

    def __init__(self, _: str) -> None:
        pass

    def put(self, job: Callable[[], None]) -> None:
        job()

    def close(self) -> None:
        pass


class Card(CPUDevice):
    """In place of `core.cuda.CUDADevice`: what may be launched here is run here, while the thread has nothing.

    `offered`: how much could be; `here`: how much was; `told`: how much of that says how long it took.
    """

    def __init__(self, torch_device: torch.device, waiting: str) -> None:
        super().__init__()
        self.stream = Stream()
        self.offered = self.here = self.told = 0
        self._last: Completion[Any] | None = None

    def submit(
        self, work: Callable[[], Callable[[], Any]], *, here: bool = False, took: Callable[[], int] | None = None
    ) -> Any:
        self.offered += here
        if here and (self._last is None or self._last.done()):
            self.here += 1
            self.told += took is not None
            self._last = Completion()
            run_on_this_thread(work, self._last)
        else:
            self._last = super().submit(work)
        return self._last

    def give_back(self) -> None:
        pass


def simulate() -> None:
    if os.environ["TRITON_INTERPRET"] == "1":
        let_scalars_be_bounds()
    graph_runner.Graphs = Graphs
    graph_runner.WorkThread = CaptureThread
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
        steps = engine.timeline.recorder.snapshot().steps
        found["replayed"], found["steps"] = int(steps["graph"].sum()), len(steps)
        found["launched on the loop"], found["told"] = engine._parts.device.here, engine._parts.device.told
        found["sampled"] = int((steps["sampled"] > 0).sum())

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


async def load_small(name: str, **options: Any) -> Engine:
    """The model `name` with few shapes, so that little is captured."""
    options = {"page_size": 4, "kv_cache_tokens": 96, "max_batch_size": 2, "max_step_tokens": 8} | options
    model = options.pop("model", None) or tiny_model(name)
    return await Engine.load(model, progress=False, freeze_gc=False, **options)


async def hook_at_load() -> dict[str, Any]:
    """A hook that no capture bears, there before the model is loaded; then one added in the middle of a capture."""
    model = tiny_model("llama")
    expected = reference(model, prompt(9))
    tokens: list[int] = []

    def see(_: object, inputs: tuple[torch.Tensor], __: object) -> None:
        if Graphs.in_capture:
            raise RuntimeError("a hook in a capture")
        tokens.append(inputs[0].shape[1])

    hook = model.model.layers[0].register_forward_hook(see)
    found: dict[str, Any] = {}
    async with await load_small("llama", model=model) as engine:
        graphs = engine._parts.runner._graphs
        found["launches"], found["layers"] = engine.info().launches, engine.info().layers
        found["captured at load"] = graphs.forwards()
        tokens.clear()
        found["text"] = (await greedy(engine, 9))[0] == expected
        found["seen"] = sum(tokens)  # nine and all but the last of those drawn
        hook.remove()
        tokens.clear()

        added: list[Any] = []
        runner, logits_of = engine._parts.runner, engine._parts.runner._logits_of

        def add(*given: Any) -> torch.Tensor:
            if Graphs.in_capture:
                added.append(model.model.layers[0].register_forward_hook(lambda *_: None))
            return logits_of(*given)

        runner._logits_of = add
        found["text, hooks added meanwhile"] = (await greedy(engine, 9))[0] == expected
        found["hooks added meanwhile"] = len(added)
        found["captured meanwhile"] = graphs.forwards()
        del runner._logits_of
        for each in added:
            each.remove()

        found["text, first time without"] = (await greedy(engine, 9))[0] == expected
        offered = engine._parts.device.offered
        found["text, second time without"] = (await greedy(engine, 9))[0] == expected
        found["replayed"] = engine._parts.device.offered - offered
        found["captured without"] = graphs.forwards()
        found["seen without"] = sum(tokens)
        found["launches without"], found["layers without"] = engine.info().launches, engine.info().layers
    return found


async def captures_that_fail() -> dict[str, Any]:
    """Of a forward, with an error that says nothing. Half precision: the linear kernels run too."""
    model = tiny_model("llama").to(torch.float16)

    def fail() -> None:
        raise AssertionError

    Graphs.capturing = fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = await load_small("llama", model=model)
    async with engine:
        long = await engine.generate(prompt(20), max_tokens=2, ignore_eos=True)  # chunks, of which one samples
        found = {"launches": engine.info().launches, "tokens": len(long.token_ids)}
    Graphs.capturing = lambda: None
    return {**found, "warnings": [str(warning.message) for warning in caught]}


async def one_capture_that_fails() -> dict[str, Any]:
    """The third of the forwards: a shape of its own, which says nothing of the others."""
    captures = 0

    def fail_once() -> None:
        nonlocal captures
        captures += 1
        if captures == 3:
            raise MemoryError("no room for this one")

    Graphs.capturing = fail_once
    model = tiny_model("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = await load_small("llama", model=model)
    Graphs.capturing = lambda: None
    async with engine:
        forwards = engine._parts.runner._graphs.forwards()
        lengths = (20, 9, 3, 1)
        texts = await greedy(engine, *lengths) == [reference(model, prompt(n)) for n in lengths]
        graph = engine.timeline.recorder.snapshot().steps["graph"]
        return {
            "captures": captures,
            "forwards": forwards,
            "warnings": len(caught),
            "launches": engine.info().launches,
            "texts": texts,
            "replayed": int(graph.sum()),
        }


async def launches_that_fail() -> dict[str, Any]:
    """Once in the middle, after its inputs were sent; then twice before anything was, on the loop."""
    found: dict[str, Any] = {}
    model = tiny_model("llama")
    expected = reference(model, prompt(9))
    async with await load_small("llama", model=model) as engine:
        runner = engine._parts.runner

        def fail(*_: object) -> None:
            failures.append(True)
            raise ArithmeticError("a launch that fails")

        for owner, name, times in ((runner._graphs, "replay", 1), (runner, "_pack_sampling", 2)):
            failures: list[bool] = []
            found[name] = []
            setattr(owner, name, fail)
            for _ in range(times):
                asked = [engine.generate(prompt(length), max_tokens=3) for length in (5, 9)]
                ended = await asyncio.gather(*asked, return_exceptions=True)
                found[name] += [type(error).__name__ for error in ended]
            delattr(owner, name)
            found[f"{name} failed"] = len(failures)
            found[f"text after {name}"] = (await greedy(engine, 9))[0] == expected
        engine._parts.cache.check(held=[])
    return found


async def fixed_rope() -> dict[str, Any]:
    async with await load_small("phi3_longrope") as engine:
        await greedy(engine, 5)
        return {"launches": engine.info().launches, "offered": engine._parts.device.offered}


async def smallest_cache() -> dict[str, Any]:
    """Smaller than the texts of the check at load time; and what kinds of sampling are run at load."""
    kinds: set[tuple[bool, int | None]] = set()
    sample = graph_runner.TritonSampler.__call__

    def note(self: Any, logits: Any, inputs: Any, *more: Any) -> None:
        kinds.add((inputs.key.filtered, inputs.key.logprobs))
        sample(self, logits, inputs, *more)

    graph_runner.TritonSampler.__call__ = note
    async with await load_small("llama", kv_cache_tokens=16) as engine:
        graph_runner.TritonSampler.__call__ = sample
        found = {"kv_cache_tokens": engine.info().kv_cache_tokens, "tokens": len((await greedy(engine, 9))[0])}
        sampler = engine._parts.runner._sampler
        found["room for penalties or bias"] = sampler._scores is not None or sampler._history is not None
    return {**found, "kinds at load": sorted(kinds, key=str)}


_CASES = (hook_at_load, captures_that_fail, one_capture_that_fails, launches_that_fail, fixed_rope, smallest_cache)
CASES = {case.__name__: case for case in _CASES}


if __name__ == "__main__":
    simulate()
    print(json.dumps({name: asyncio.run(CASES[name]() if name in CASES else run(name)) for name in sys.argv[1:]}))
