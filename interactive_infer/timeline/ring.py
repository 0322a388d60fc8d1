"""The newest records, in a buffer of fixed size."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.recording import Records


class Ring:
    """The newest `capacity` rows of int64, each with a label or without.

    Lock-free, any number of writers: a write is two C calls, taking a number and packing a row, each atomic under the
    GIL, and no two writers hold the same number. So a garbage collection or a signal that records in the middle of
    another record neither deadlocks nor overwrites it, which a lock could not promise. Readers copy the whole buffer in
    one C call.
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int, first: int = 1) -> None:
        self.dtype = dtype
        self.capacity = capacity
        self.first = first
        self._row = struct.Struct(f"={dtype.itemsize // 8}q")
        self._buffer = bytearray(dtype.itemsize * capacity)
        self._labels: dict[int, tuple[int, Any]] = {}  # by slot: the row's number, its label
        self._numbers = itertools.count(first)

    def write(self, *values: int, label: Any = None) -> None:
        number = next(self._numbers)
        slot = number % self.capacity
        self._row.pack_into(self._buffer, slot * self._row.size, number, *values)
        if label is not None:
            self._labels[slot] = (number, label)

    def read(self) -> Records:
        """All rows, in the order of their numbers."""
        rows = np.frombuffer(bytes(self._buffer), self.dtype)
        rows = rows[rows["number"] > 0]
        return rows[np.argsort(rows["number"])]

    def read_after(self, number: int) -> Records:
        """The rows with higher numbers; costs what is new. One that is just being written may be left out for good."""
        number = max(number, self.first - 1)
        count, stride = 0, 1
        while self._is_written(number + count + stride) and count < self.capacity:
            count, stride = count + stride, 2 * stride
        while stride := stride // 2:
            count += stride * self._is_written(number + count + stride)
        if count >= self.capacity:
            return self.read()
        size, first = self._row.size, (number + 1) % self.capacity
        parts = self._buffer[first * size : (first + count) * size]
        parts += self._buffer[: max(first + count - self.capacity, 0) * size]
        rows = np.frombuffer(bytes(parts), self.dtype)
        return rows[rows["number"] > number]

    def _is_written(self, number: int) -> bool:
        """Whether the row with this number is there, or a later one in its place."""
        slot = number % self.capacity
        return bool(self._row.unpack_from(self._buffer, slot * self._row.size)[0] >= number)

    def labels(self, rows: Records, missing: Any) -> NDArray[np.object_]:
        """The label of each of `rows`, or `missing`."""
        labelled = dict(self._labels.copy().values())
        labels = np.empty(len(rows), np.object_)
        labels[:] = [missing] * len(rows)
        # A slot keeps its last label when a row without one takes it, and may be a newer row's by now.
        kept = np.flatnonzero(np.isin(rows["number"], np.fromiter(labelled, np.int64, len(labelled))))
        for at, number in zip(kept.tolist(), rows["number"][kept].tolist(), strict=True):
            labels[at] = labelled[number]
        return labels

    def grown(self, capacity: int) -> Ring:
        """A ring with more room that holds the same rows and goes on counting."""
        rows = self.read()
        ring = Ring(self.dtype, capacity, int(rows["number"][0]) if len(rows) else self.first)
        ring.first = self.first
        for row, label in zip(rows.tolist(), self.labels(rows, None).tolist(), strict=True):
            ring.write(*row[1:], label=label)
        return ring

    def emptied(self) -> Ring:
        """A ring that goes on counting, so that who has read up to a number finds only what is new."""
        return Ring(self.dtype, self.capacity, next(self._numbers))
