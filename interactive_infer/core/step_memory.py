"""A step's memory on the card, and that of its flight on the host: one copy takes a step there, none brings it back.

Both sides have the same layout, in bytes:

    | inputs, up to their end | reply to, 16 | sampling, from its start |

Where inputs end and sampling begins is fixed, so the addresses that a graph has captured are, too; and whatever a step
has of both is one piece. A result begins with two readings of the card's clock, then comes what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from interactive_infer.core.sampling_packed import PackedBuffer, PackedKey
from interactive_infer.core.shapes import Shape
from interactive_infer.core.staging import Ints, Layout

_REPLY_TO_BYTES = 16
_BEGUN, ENDED, _TIMES_WORDS = 0, 1, 2
_MOST_VIEWS = 512


class CardMemory:
    """What one step after the other reads and writes on the card.

    `bytes`: all of what is sent; `reply_to`: int64 [2] of it, first the host's address for the result, 0 for nowhere;
    `sampling`: uint8, the rest of it from there on, at least `sampling_nbytes`.
    `result`: int64, of which `begun` is the word with the clock at the step's begin, number ENDED that at its end;
    `drawn`: the rest of it, uint8 [drawn_nbytes], which is a multiple of 8.
    """

    def __init__(
        self, layouts: Iterable[Layout], sampling_nbytes: int, drawn_nbytes: int, device: torch.device
    ) -> None:
        self.inputs_nbytes = max(_nbytes(layout) for layout in layouts)
        nbytes = self.inputs_nbytes + _REPLY_TO_BYTES + sampling_nbytes
        nbytes = 1 << (nbytes - 1).bit_length()  # torch takes so much pinned memory for it anyway
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        inputs, self.reply_to, self.sampling = _parts(self.bytes, self.inputs_nbytes)
        self._inputs = inputs
        self.result = torch.zeros(_TIMES_WORDS + drawn_nbytes // 8, dtype=torch.int64, device=device)
        self.begun = self.result[_BEGUN:ENDED]
        self.drawn = self.result[_TIMES_WORDS:].view(torch.uint8)

    def inputs(self, layout: Layout) -> Tensor:
        """Where a step of `layout` has its inputs, int64 [layout.size]."""
        start = len(self._inputs) - _nbytes(layout) // 8
        return self._inputs[start : start + layout.size]


class FlightMemory:
    """Pinned memory of one step in flight: what is sent, laid out as on the card, and its result.

    Views are kept, so that a step makes none.
    """

    def __init__(self, card: CardMemory) -> None:
        self._card = card
        self._bytes = torch.zeros(len(card.bytes), dtype=torch.uint8, pin_memory=True)
        self._result = torch.zeros(len(card.result), dtype=torch.int64, pin_memory=True)
        inputs, reply_to, sampling = _parts(self._bytes, card.inputs_nbytes)
        reply_to[0] = self._result.data_ptr()
        self._inputs: Ints = inputs.numpy()
        self.sampling = PackedBuffer(sampling.numpy())
        self.drawn: np.ndarray = self._result[_TIMES_WORDS:].numpy().view(np.uint8)
        self._times: Ints = self._result[:_TIMES_WORDS].numpy()
        self._arrays: dict[Shape, dict[str, Ints]] = {}
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def arrays(self, layout: Layout) -> dict[str, Ints]:
        """A step's inputs on the host."""
        arrays = self._arrays.get(layout.shape)
        if arrays is None:
            arrays = layout.arrays(self._inputs[len(self._inputs) - _nbytes(layout) // 8 :])
            if len(self._arrays) < _MOST_VIEWS:  # hooked steps are not padded: their shapes have no end
                self._arrays[layout.shape] = arrays
        return arrays

    def send(self, layout: Layout, key: PackedKey | None) -> None:
        """Copy a step to the card: its inputs, where its result shall go, and the sampling of `key`. None: it has
        none, or one too large for this memory."""
        start = self._card.inputs_nbytes - _nbytes(layout)
        stop = self._card.inputs_nbytes + _REPLY_TO_BYTES + (key.input_nbytes if key is not None else 0)
        pair = self._copies.get((start, stop))
        if pair is None:
            pair = self._card.bytes[start:stop], self._bytes[start:stop]
            if len(self._copies) < _MOST_VIEWS:
                self._copies[start, stop] = pair
        pair[0].copy_(pair[1], non_blocking=True)

    def took(self) -> int:
        """ns from the first kernel of the step's graphs to their last one, by the card's clock."""
        return int(self._times[ENDED] - self._times[_BEGUN])


def result_words(key: PackedKey) -> int:
    """How many words of `CardMemory.result` a step's host wants."""
    return _TIMES_WORDS + key.output_nbytes // 8


def _nbytes(layout: Layout) -> int:
    """Of its inputs, rounded up so that they begin at a multiple of 16 bytes, as kernels were compiled for."""
    return -(-layout.size // 2) * 16


def _parts(memory: Tensor, inputs_nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    sampling = inputs_nbytes + _REPLY_TO_BYTES
    return (
        memory[:inputs_nbytes].view(torch.int64),
        memory[inputs_nbytes:sampling].view(torch.int64),
        memory[sampling:],
    )
