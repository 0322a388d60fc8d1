"""How our Triton kernels are launched: overlapped with the kernel before them, where the card can."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


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


@triton.jit
def prefetch(pointers):
    """Ask the L2 cache for the lines of 128 bytes at `pointers`. Allowed before the wait: the cache is where memory
    is coherent, so nothing stale is read later."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
