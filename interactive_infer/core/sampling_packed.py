"""How a step's sampling, its inputs and its results, lies in a card's memory and in the host's.

Both are cut into sections whose places depend on a `PackedKey` alone, so a CUDA graph captured for a key
serves every step of that key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

REALS = 7
WHOLE = 6
PADDING_REALS = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5])
"""`reals` and, with its slot behind, `whole` of a row of padding: greedy, without anything else."""
PADDING_WHOLE = (1, 0, 0, -1, 0)
_ALIGN = 16  # bytes: the kernels' vector loads, whatever the number of rows
_TORCH = {"f8": torch.float64, "f4": torch.float32, "i4": torch.int32}
_Sections = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class PackedKey:
    """What is static about a step's sampling: its buffers' layout and the kernels it launches.

    `rows`: padded; `all_greedy`: every row takes the most likely token; `filtered`: a row has top_k, top_p or min_p;
    `penalized`: a row has penalties; `sparse`: room for additions to single logits, 0 where nobody has any;
    `logprobs`: room for alternatives, None where nobody asked for log-probabilities.
    """

    rows: int
    all_greedy: bool = False
    filtered: bool = False
    penalized: bool = False
    sparse: int = 0
    logprobs: int | None = None

    @cached_property
    def input_sections(self) -> _Sections:
        """`reals` as `SamplingInputs.reals`; `whole`: greedy, top_k, penalized, logprobs (-1: none), processed, slot;
        the additions of row r are numbers `sparse_start[r]` to `sparse_start[r + 1]`."""
        return {
            "reals": ("f8", (REALS, self.rows)),
            "whole": ("i4", (WHOLE, self.rows)),
            "sparse_start": ("i4", (self.rows + 1,)),
            "sparse_ids": ("i4", (self.sparse,)),
            "sparse_values": ("f4", (self.sparse,)),
        }

    @cached_property
    def output_sections(self) -> _Sections:
        """`ranks` are 0 in rows that asked for no log-probabilities; `counts`: how many alternatives a row has."""
        sections: _Sections = {"token_ids": ("i4", (self.rows,)), "invalid": ("i4", (self.rows,))}
        if self.logprobs is not None:
            sections |= {
                "logprobs": ("f4", (self.rows,)),
                "ranks": ("i4", (self.rows,)),
                "counts": ("i4", (self.rows,)),
                "alternative_ids": ("i4", (self.rows, self.logprobs)),
                "alternative_logprobs": ("f4", (self.rows, self.logprobs)),
            }
        return sections

    @cached_property
    def input_nbytes(self) -> int:
        """Bytes that `SamplingTable.pack` writes, and that go to the card."""
        return _nbytes(self.input_sections)

    @cached_property
    def output_nbytes(self) -> int:
        """Bytes of a step's results."""
        return _nbytes(self.output_sections)


class TooShortError(ValueError):
    """A buffer has no room for a step's sampling."""


class PackedBuffer:
    """A host's buffer for a step's sampling (uint8, contiguous), with views of it by key.

    `holds`: what was packed into it last, in whatever words its writer uses, and the key of that; None for nothing.
    """

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.nbytes = array.nbytes
        self.holds: tuple[object, PackedKey] | None = None
        self._array = array
        self._sections: dict[PackedKey, dict[str, npt.NDArray[Any]]] = {}

    def sections(self, key: PackedKey) -> dict[str, npt.NDArray[Any]]:
        """Where a step of `key` has its inputs. TooShortError where the buffer is shorter than they are."""
        found = self._sections.get(key)
        if found is None:
            if key.input_nbytes > self.nbytes:
                raise TooShortError(f"the buffer has {self.nbytes} bytes, and this step's sampling {key.input_nbytes}")
            found = self._sections[key] = arrays(self._array, key.input_sections)
        return found


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Views of a card's buffer, filled by a copy of what `SamplingTable.pack` wrote."""

    key: PackedKey
    reals: Tensor
    whole: Tensor
    sparse_start: Tensor
    sparse_ids: Tensor
    sparse_values: Tensor

    @classmethod
    def views(cls, buffer: Tensor, key: PackedKey) -> PackedInputs:
        """`buffer`: uint8, at least `key.input_nbytes` long and 16-byte aligned."""
        return cls(key, **tensors(buffer, key.input_sections))


@dataclass(frozen=True, slots=True)
class PackedOutputs:
    """Views of a card's buffer into which the sampler writes; the sections of `PackedKey.output_sections`."""

    key: PackedKey
    token_ids: Tensor
    invalid: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    counts: Tensor | None = None
    alternative_ids: Tensor | None = None
    alternative_logprobs: Tensor | None = None

    @classmethod
    def views(cls, buffer: Tensor, key: PackedKey) -> PackedOutputs:
        """`buffer`: uint8, at least `key.output_nbytes` long and 16-byte aligned."""
        return cls(key, **tensors(buffer, key.output_sections))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's result on the host, row by row of the step.

    `token_ids`: int32 [R]. `invalid`: rows whose logits were not numbers; their token 0 means nothing. `logprobs`:
    for rows that asked, (chosen, rank, alternative ids, their values), as many as the row asked for.
    """

    token_ids: npt.NDArray[np.int32]
    invalid: list[int]
    logprobs: dict[int, tuple[float, int, list[int], list[float]]]

    @classmethod
    def read(cls, host: npt.NDArray[np.uint8], key: PackedKey, rows: int) -> Drawn:
        """From the host's memory of a step's results; `rows` without the padding. Keeps no reference to `host`."""
        sections = arrays(host, key.output_sections)
        invalid = sections["invalid"][:rows]
        logprobs: dict[int, tuple[float, int, list[int], list[float]]] = {}
        if key.logprobs is not None:
            for row in np.flatnonzero(sections["ranks"][:rows]).tolist():
                count = int(sections["counts"][row])
                logprobs[row] = (
                    float(sections["logprobs"][row]),
                    int(sections["ranks"][row]),
                    sections["alternative_ids"][row, :count].tolist(),
                    sections["alternative_logprobs"][row, :count].tolist(),
                )
        bad = np.flatnonzero(invalid).tolist() if invalid.any() else []
        return cls(sections["token_ids"][:rows].copy(), bad, logprobs)


def arrays(buffer: npt.NDArray[np.uint8], sections: _Sections) -> dict[str, npt.NDArray[Any]]:
    """Views of a host buffer's sections."""
    views, start = {}, 0
    for name, (dtype, shape) in sections.items():
        views[name] = np.ndarray(shape, dtype, buffer, start)
        start += _rounded(views[name].nbytes)
    return views


def tensors(buffer: Tensor, sections: _Sections) -> dict[str, Tensor]:
    """Views of a card's buffer's sections."""
    views, start = {}, 0
    for name, (dtype, shape) in sections.items():
        nbytes = _section_nbytes(dtype, shape)
        views[name] = buffer[start : start + nbytes].view(_TORCH[dtype]).view(shape)
        start += _rounded(nbytes)
    return views


def _nbytes(sections: _Sections) -> int:
    return sum(_rounded(_section_nbytes(dtype, shape)) for dtype, shape in sections.values())


def _section_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * int(dtype[1])


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def padding(key: PackedKey, dummy_slot: int) -> npt.NDArray[np.uint8]:
    """The inputs of a step of `key` whose rows are all padding: greedy, into the slot past the last."""
    buffer = np.zeros(key.input_nbytes, np.uint8)
    sections = arrays(buffer, key.input_sections)
    sections["reals"][:] = PADDING_REALS[:, None]
    sections["whole"][:] = np.array([*PADDING_WHOLE, dummy_slot])[:, None]
    return buffer
