"""Which shapes of a step are captured. A step is padded to the next one of a short list, so few graphs serve all."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import count, takewhile

_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_DECODES_BESIDE = (0, 8, 32, 256)  # chunks, beside which padding is cheap: so there are few
_CHUNK_TOKENS = (64, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a packed step: `decodes` rows of one token, then `chunks` rows that share `chunk_tokens` tokens; `samples`
    rows draw a token."""

    decodes: int
    chunks: int
    chunk_tokens: int
    samples: int

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens


class Shapes:
    """The shapes that are captured, for steps of up to `max_batch_size` rows and `max_step_tokens` tokens."""

    def __init__(self, max_batch_size: int, max_step_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._decodes = _up_to(_DECODES, max_batch_size)
        self._decodes_beside = _up_to(_DECODES_BESIDE, max_batch_size)
        self._chunk_tokens = _up_to(_CHUNK_TOKENS, max_step_tokens)

    def choose(self, exact: Shape) -> Shape:
        """The smallest shape that holds a step of shape `exact`."""
        if not exact.chunks:
            decodes = _at_least(self._decodes, exact.decodes)
            return Shape(decodes, 0, 0, decodes)
        most, tokens = self._max_batch_size, _at_least(self._chunk_tokens, exact.chunk_tokens)
        return Shape(_at_least(self._decodes_beside, exact.decodes), most, tokens, most)

    def rows(self, samples: int) -> int:
        """Rows to which `samples` rows are padded for sampling."""
        return _at_least(self._decodes, samples)

    def all(self) -> list[Shape]:
        """Every shape, the most tokens first: later captures then fit into memory that earlier ones took."""
        most = self._max_batch_size
        shapes = [Shape(decodes, 0, 0, decodes) for decodes in self._decodes]
        shapes += [
            Shape(decodes, most, tokens, most) for tokens in self._chunk_tokens for decodes in self._decodes_beside
        ]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.samples), reverse=True)


def _up_to(sizes: tuple[int, ...], largest: int) -> list[int]:
    """Those of `sizes` that are below `largest`, after their last one its doubles, then `largest`."""
    doubles = takewhile(lambda size: size < largest, (sizes[-1] << n for n in count(1)))
    return [*(size for size in sizes if size < largest), *doubles, largest]


def _at_least(sizes: list[int], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
