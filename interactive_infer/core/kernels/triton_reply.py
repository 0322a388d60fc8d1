"""What a step tells its host by itself, from inside of its graphs: when it ran, and what was drawn."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from interactive_infer.core.kernels.launch import launch

_BLOCK = 1024


@triton.jit
def _clock_kernel(at):
    tl.store(at, globaltimer())


@triton.jit(do_not_specialize=["words"])
def _reply_kernel(result, to, words, BLOCK: tl.constexpr, CLOCK_AT: tl.constexpr):
    address = tl.load(to)
    if address != 0:
        host = address.to(tl.pointer_type(tl.int64))
        lane = tl.arange(0, BLOCK)
        for first in range(0, words, BLOCK):
            at = first + lane
            value = tl.load(result + at, mask=at < words)
            if CLOCK_AT >= 0:
                value = tl.where(at == CLOCK_AT, globaltimer(), value)
            tl.store(host + at, value, mask=at < words)


def has_clock(device: torch.device) -> bool:
    """Whether kernels on it can read a clock (in Triton's interpreter they cannot)."""
    return device.type == "cuda"


def write_clock(at: torch.Tensor) -> None:
    """Write the card's own clock, in ns, into `at[0]` (int64) once everything before is done; without one nothing."""
    if has_clock(at.device):
        launch(_clock_kernel, 1)(at, num_warps=1)


def reply(result: torch.Tensor, to: torch.Tensor, words: int, *, clock_at: int) -> None:
    """Copy the first `words` of `result` (int64) to the host's memory at the address `to[0]` (int64), once everything
    before is done; as word `clock_at` the card's own clock, in ns, where it has one. Address 0: to nobody.

    The memory is pinned, so the card reaches it at the same address (unified addressing, CUDA C++ Programming Guide),
    and whoever has waited for what comes after finds it written. A copy by the card's copy engine would stand between
    this step and the next.
    """
    clock_at = clock_at if has_clock(result.device) else -1
    launch(_reply_kernel, 1)(result, to, words, BLOCK=_BLOCK, CLOCK_AT=clock_at, num_warps=4)
