"""What a recorder held at one moment, as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]
"""A one-dimensional structured array of one of the dtypes below."""


# Field by field the rows of the six rings, all int64. `number` counts a ring's records from 1 (0: never written).
def _row(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in ("number", *names)])


SPAN = _row("start", "end", "phase", "ref")
STEP = _row("start", "end", "step_id", "batch_size", "tokens", "prefill_tokens", "sampled", "graph", "stream", "device")
WORK = _row("start", "end", "kind", "stream", "device")
LAG = _row("at", "lag")
RUNNABLE = _row("at", "count")
ASKED = _row("at", "generation", "first")

_NOTHING = -(2**62)  # in a batch: this row drew no token


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorder's content at one moment: structured arrays in the order of recording, fields as in their dtypes.

    spans: SPAN; `ref` is the step's number for PLAN, LAUNCH, COMMIT and AWAIT, the cell's number for CELL, the
        generation (0 to 2) for GC.
    names: object array of str, one a span, "" where it has none.
    steps: STEP; see `Recorder.step`.
    batches: object array of bytes, one a step, b"" where its generations were not told; `batch_numbers`
        reads them.
    work: WORK; what else ran on a device. work_names: as `names`.
    lags: LAG; a callback that ran at `at` had been due `lag` ns earlier.
    runnable: RUNNABLE; from `at` on, `count` sequences could run.
    asked: ASKED; the generation that was asked for at `at`, and the index of the first token that it draws.
    profiled: int64 `(n, 2)`, ns: stretches in which every kernel is in `work`.
    complete_from: ns; records that ended before may have been overwritten by newer ones (0: nothing was).
    clock_error_ns: how far off the device's times may be (0: measured on the host's own clock).
    """

    spans: Records = field(default_factory=lambda: np.empty(0, SPAN))
    names: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, np.object_))
    steps: Records = field(default_factory=lambda: np.empty(0, STEP))
    batches: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, np.object_))
    work: Records = field(default_factory=lambda: np.empty(0, WORK))
    work_names: NDArray[np.object_] = field(default_factory=lambda: np.empty(0, np.object_))
    lags: Records = field(default_factory=lambda: np.empty(0, LAG))
    runnable: Records = field(default_factory=lambda: np.empty(0, RUNNABLE))
    asked: Records = field(default_factory=lambda: np.empty(0, ASKED))
    profiled: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    complete_from: int = 0
    clock_error_ns: int = 0

    def __eq__(self, other: object) -> bool:
        """Equal when every record is, in the same order; numbers, which only tell the order, are left out."""
        if not isinstance(other, Recording):
            return NotImplemented
        return all(
            _without_number(mine) == _without_number(theirs)
            for mine, theirs in ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )


def _without_number(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if value.dtype.names is None else [row[1:] for row in value.tolist()]


def batch_bytes(generations: Sequence[int], drawn: Sequence[int], step_id: int) -> bytes:
    """An entry of `Recording.batches`; arguments as of `Recorder.step`."""
    numbers = array("q", generations)
    numbers.extend([index - step_id if index >= 0 else _NOTHING for index in drawn])
    return numbers.tobytes()


def batch_numbers(
    batches: NDArray[np.object_],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """From entries of `Recording.batches`: every row's generation, and the index of the token that it drew less the
    number of its step (far below 0: none), one entry after another; and how many rows each entry has."""
    sizes = np.fromiter(map(len, batches), np.int64, len(batches)) // 16
    numbers = np.frombuffer(b"".join(batches.tolist()), np.int64)
    begins = np.cumsum(2 * sizes) - 2 * sizes
    is_generation = np.arange(len(numbers)) - np.repeat(begins, 2 * sizes) < np.repeat(sizes, 2 * sizes)
    return numbers[is_generation], numbers[~is_generation], sizes
