"""The keys and values themselves: one pool of pages for each, for every attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer: heads and head size (the same for both)."""

    kv_heads: int
    head_dim: int


class KVPools:
    """`layers`: a key and a value pool each, `[num_pages + 1, page_size, kv_heads, head_dim]`; page 0 is the null page.

    They begin as zeros: masked positions still meet values, and 0 * NaN is NaN.
    """

    def __init__(
        self, shapes: list[LayerShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        sizes = [(num_pages + 1, page_size, shape.kv_heads, shape.head_dim) for shape in shapes]
        self.layers: list[tuple[Tensor, Tensor]] = [
            (_zeros(size, dtype, device), _zeros(size, dtype, device)) for size in sizes
        ]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages, in the current stream's order."""
        index = torch.tensor(pages, device=self._device)
        for keys, values in self.layers:
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    def free(self) -> None:
        self.layers = []


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost memory only where they are written, on a CPU: NumPy asks the system for zero pages, while
    `torch.zeros` writes them all."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
