"""What a step tells its host by itself, from inside of its graphs: when it ran, and what was drawn."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from interactive_infer.core.kernels.launch import launch

_BEGUN, _ENDED = tl.constexpr(0), tl.constexpr(1)
_BLOCK = 1024


@triton.jit
def _begin_kernel(result):
    tl.store(result + _BEGUN, globaltimer())


@triton.jit(do_not_specialize=["words"])
def _reply_kernel(result, to, words, BLOCK: tl.constexpr, CLOCK: tl.constexpr):
    address = tl.load(to)
    if address != 0:
        host = address.to(tl.pointer_type(tl.int64))
        lane = tl.arange(0, BLOCK)
        for first in range(0, words, BLOCK):
            at = first + lane
            value = tl.load(result + at, mask=at < words)
            if CLOCK:
                value = tl.where(at == _ENDED, globaltimer(), value)
            tl.store(host + at, value, mask=at < words)


def note_begin(result: torch.Tensor) -> None:
    """Write the card's own clock, in ns, into `result[0]` (int64) once everything before is done. On a CPU nothing."""
    if result.device.type == "cuda":
        launch(_begin_kernel, 1)(result, num_warps=1)


def reply(result: torch.Tensor, to: torch.Tensor, words: int) -> None:
    """Copy the first `words` of `result` (int64) to the host's memory at the address `to[0]` (int64), once everything
    before is done; for word 1 the card's own clock (on a CPU nothing). Address 0: to nobody.

    The memory is pinned, so the card reaches it at the same address (unified addressing, CUDA C++ Programming Guide),
    and whoever has waited for what comes after finds it written. A copy by the card's copy engine would stand between
    this step and the next.
    """
    clock = result.device.type == "cuda"
    launch(_reply_kernel, 1)(result, to, words, BLOCK=_BLOCK, CLOCK=clock, num_warps=4)
