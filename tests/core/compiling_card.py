"""A load as on a card, on a machine without one: kernels are compiled for it, and none is run.

So nothing that they would compute is looked at; only what is asked of the compiler, and when. Run as a script, in a
process of its own (see simulated_card.py), with a model's name. Prints what was found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from interactive_infer import Engine, assembly
from interactive_infer.core.graph_runner import GraphRunner
from interactive_infer.core.kernels import launch, triton_reply
from interactive_infer.core.parity import rehearse_check
from interactive_infer.progress import ProgressBar
from tests.core.simulated_card import simulate
from tests.tiny_models import tiny_model


class Driver:
    """In place of Triton's, which looks for a card. Of the H100's memory; what it loads goes nowhere."""

    launchers: ClassVar[list[str]] = []
    """Of which kernels, as they are built."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
            load_binary=lambda name, *_: (name, name, 0, 0, 1024),
        )

    def launcher_cls(self, src: Any, _: object) -> object:
        self.launchers.append(src.fn.__name__)
        return object()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def watch(found: dict[str, list[str]]) -> None:
    """Have each kernel that is not there yet named in `found`, under when it was asked for; and each that is loaded
    in time, under "loaded"."""
    when = "late"

    def note(**about: Any) -> None:
        found[when].append(about["fn"].name.rpartition(".")[2])

    compile_ahead = GraphRunner.compile_ahead

    def ahead(self: GraphRunner, check: Callable[[], object], begin: Callable[[], object]) -> None:
        nonlocal when
        when = "ahead"
        compile_ahead(self, check, begin)
        when = "late"
        found["loaded"] = list(Driver.launchers)

    GraphRunner.compile_ahead = ahead  # type: ignore[method-assign]
    triton.knobs.runtime.jit_cache_hook = note


def never_run() -> None:
    usual = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = usual(self, *args, grid=grid, warmup=True, **options)
        if not warmup:
            _ = kernel.run  # as a launch does, which loads it
        return kernel

    def check(self: Any) -> float:
        rehearse_check(self.model, self.runner, self.page_size, self.vocab_size)
        return 0.0

    JITFunction.run = run
    assembly.Parts._check = check  # type: ignore[method-assign]


async def main(name: str) -> None:
    driver.set_active(Driver())
    simulate()
    launch.can_overlap = triton_reply.has_clock = lambda _: True  # type: ignore[assignment]
    never_run()
    found: dict[str, list[str]] = {"ahead": [], "late": [], "loaded": []}
    watch(found)
    stages: list[str] = []
    ProgressBar.update = lambda self, stage, done: stages.append(stage)  # type: ignore[method-assign]
    engine = await Engine.load(
        tiny_model(name),
        kv_cache_tokens=4096,
        page_size=16,
        max_batch_size=16,
        max_step_tokens=64,
        progress=False,
        freeze_gc=False,
    )
    found["loaded late"] = Driver.launchers[len(found["loaded"]) :]
    print(json.dumps(found | {"stages": stages, "launches": engine.info().launches}), flush=True)
    os._exit(0)  # nothing can run: not even the end of an engine


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
