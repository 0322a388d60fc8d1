"""Interval algebra, on arrays.

Intervals are int64 arrays of shape (n, 2): half-open [start, end), in ns. In normal form they are sorted, not empty,
and neither overlap nor touch. No function loops over them in Python.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.recording import Records

Intervals = NDArray[np.int64]


def intervals(records: Records) -> Intervals:
    """(n, 2) from records with the fields `start` and `end`; in their order, not in normal form."""
    return np.stack([records["start"], records["end"]], axis=1)


def union(*sets: Intervals) -> Intervals:
    """The points in any of the intervals, in normal form."""
    merged = np.concatenate([np.asarray(part, np.int64).reshape(-1, 2) for part in sets])
    merged = merged[merged[:, 0] < merged[:, 1]]
    if not len(merged):
        return merged
    merged = merged[np.argsort(merged[:, 0], kind="stable")]
    reached = np.maximum.accumulate(merged[:, 1])
    first = np.concatenate([[True], merged[1:, 0] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([merged[first, 0], reached[last]], axis=1)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The points in both; `a` and `b` in normal form, the result too."""
    times = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    deltas = np.repeat([1, -1], len(a) + len(b))
    order = np.argsort(times, kind="stable")
    times = times[order]
    both = np.flatnonzero((np.cumsum(deltas[order])[:-1] == 2) & (times[:-1] < times[1:]))
    return np.stack([times[both], times[both + 1]], axis=1)


def complement(a: Intervals, t0: int, t1: int) -> Intervals:
    """The points of [t0, t1) outside `a`; `a` in normal form, the result too."""
    a = clip(a, t0, t1)
    edges = np.concatenate([[t0], a.ravel(), [t1]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def clip(a: Intervals, t0: int, t1: int) -> Intervals:
    """What of each interval lies in [t0, t1); empty ones are left out."""
    a = np.clip(a, t0, t1)
    return a[a[:, 0] < a[:, 1]]


def total(a: Intervals) -> int:
    """The measure of intervals in normal form, ns."""
    return int((a[:, 1] - a[:, 0]).sum())


def coverage(a: Intervals, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of each bin between neighbouring `edges` that `a` (normal form) covers, 0 to 1."""
    if not len(a):
        return np.zeros(len(edges) - 1)
    before = np.cumsum(a[:, 1] - a[:, 0]) - (a[:, 1] - a[:, 0])
    reached = np.stack([before, before + a[:, 1] - a[:, 0]], axis=1).ravel()  # the measure up to each border
    covered = np.diff(np.interp(edges - edges[0], a.ravel() - edges[0], reached))
    shares: NDArray[np.float64] = covered / np.diff(edges)
    return shares


def topmost(spans: Intervals, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each stretch between neighbouring `cuts`, the last of `spans` that covers it, or -1.

    `spans`: (n, 2) in any order, which is the order "last" means. `cuts`: sorted, without repetition, and
    holding every start and end in `spans`. A range maximum for all stretches at once, as in a sparse table
    run backwards: each span marks the two power-of-two blocks that cover it, then blocks hand their mark down
    to their halves. O(n log n) in numpy.
    """
    first = np.searchsorted(cuts, spans[:, 0])
    size = np.searchsorted(cuts, spans[:, 1]) - first
    kept = np.flatnonzero(size > 0)
    first, size = first[kept], size[kept]
    level = np.frexp(size)[1] - 1  # floor(log2)
    # top[i] at level k is the mark of the block of 2**k stretches from i on.
    top = np.full(max(len(cuts) - 1, 0), -1, np.int64)
    for k in range(int(level.max(initial=0)), -1, -1):
        block, here = 1 << k, level == k
        np.maximum.at(top, first[here], kept[here])
        np.maximum.at(top, first[here] + size[here] - block, kept[here])
        if half := block >> 1:
            wider, top = top, top.copy()
            np.maximum(top[half:], wider[:-half], out=top[half:])
    return top
