"""How our Triton kernels are launched: overlapped with the kernel before, where the card can; or compiled ahead."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

_asked: ContextVar[set[object] | None] = ContextVar("_asked", default=None)
"""While kernels are compiled ahead: what has been asked for."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 16 elsewhere (in Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the card has programmatic dependent launch (compute capability 9.0 and up).

    With it a kernel's blocks may start while the kernel before them drains, which hides most of a launch's latency,
    also under a CUDA graph. The rules that keep it correct:

    - a block waits (`griddepcontrol.wait`) before it touches anything that the kernel before may read or write, and
      lets its successor go only after that;
    - a block with nothing to do may end without waiting, but in every grid at least one waits.

    So a grid ends after its predecessor has, and whatever was there before the predecessor began may be read before
    the wait: weights, and a step's lengths and page tables, which several kernels lie behind.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def options(device: torch.device, *, overlap: bool = True, **options: Any) -> dict[str, Any]:
    """`options` of a launch, with the overlapping ones added where they hold and are wanted: the kernel parameter
    `OVERLAP` and Triton's `launch_pdl`."""
    if overlap and can_overlap(device):
        return {**options, "OVERLAP": True, "launch_pdl": True}
    return {**options, "OVERLAP": False}


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """`launch(kernel, 3, 2)(…)`: launches `kernel` on that grid. In `compile_ahead` it only has it compiled."""
    asked = _asked.get()
    if asked is not None:
        return partial(_compile, asked, kernel, grid)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


def _compile(asked: set[object], kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Ask once for each kind of call: Triton looks into its cache on disk for each, until the kernel is there."""
    call = (kernel, *map(_kind, args), *constants.items())
    if call not in asked:
        asked.add(call)
        kernel.warmup(*args, grid=grid, **constants)


def _kind(value: object) -> object:
    """What Triton specializes an argument on that is not a constant of the kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return type(value), value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)


def can_compile_ahead() -> bool:
    """Whether this Triton (3.5 and up; not its interpreter) compiles on several threads."""
    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


def is_compiling_ahead() -> bool:
    """Whether this is inside of `compile_ahead`."""
    return _asked.get() is not None


def compile_ahead(device: torch.device, work: Callable[[], object]) -> None:
    """Call `work`. What it asks `launch` for is compiled and loaded, as many kernels at a time as we have cores, and
    not run: what they would have written holds anything. All are ready at the end.

    An engine has dozens, which would else be compiled one by one. One that fails will tell when it is launched.
    """
    # In a context of its own: an interrupt leaves Triton's mode switched on, and what it asked for waiting.
    copy_context().run(_compile_ahead, device, work)


def _compile_ahead(device: torch.device, work: Callable[[], object]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = ThreadPoolExecutor(cores)
    _asked.set(set())
    try:
        with triton.AsyncCompileMode(_Loading(threads, device), ignore_errors=True):
            work()
    finally:
        threads.shutdown(cancel_futures=True)


class _Loading:
    """An executor for `AsyncCompileMode`, whose jobs compile: it has what they compiled loaded, too.

    That is what Triton leaves to a kernel's first launch. It has a C compiler build a launcher for each signature (once
    a machine), which takes as long as the kernel.
    """

    def __init__(self, threads: ThreadPoolExecutor, device: torch.device) -> None:
        self._threads = threads
        self._device = device

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(self._compile_and_load, compile_kernel)

    def _compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with torch.cuda.device(self._device):
            _ = kernel.run  # looking at it loads
        return kernel


@triton.jit
def prefetch(pointers):
    """Ask the L2 cache for the lines of 128 bytes at `pointers`. Allowed before the wait: the cache is where memory
    is coherent, so nothing stale is read later."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
