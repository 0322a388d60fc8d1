"""From records to busy time, overlap and bubbles with their causes: pure functions over interval arrays.

Intervals are int64 arrays of shape (n, 2): half-open [start, end), in ns on `time.perf_counter_ns`. In normal
form they are sorted, not empty, and neither overlap nor touch. No function loops over spans in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.recorder import Phase, Recording, Records

Intervals = NDArray[np.int64]
Window = tuple[int, int]

HOST_WORK = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.DETOKENIZE, Phase.PUBLISH)
# A loop that is this late does not merely wait for its timer: epoll rounds up to whole milliseconds.
LATE_NS = 1_000_000

_WORDS = {
    Phase.PLAN: "planning",
    Phase.LAUNCH: "launching",
    Phase.COMMIT: "committing",
    Phase.DETOKENIZE: "detokenizing",
    Phase.PUBLISH: "publishing",
    Phase.LOAD: "loading a model",
    Phase.CAPTURE: "capturing a graph",
    Phase.GC: "garbage collection",
    Phase.CALLBACK: "callback",
}
UNKNOWN, LATE_LOOP, LAUNCH_LATENCY = "unknown", "late loop", "launch latency"


# -- intervals -----------------------------------------------------------------------------------------------


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


# -- what a recording says -----------------------------------------------------------------------------------


def window_of(recording: Recording, last: float | None = None) -> Window:
    """From the first record of work to the newest, or the `last` seconds of that; (t0, t1) in ns.

    Cells, garbage collections, callbacks and loop lag go on while nothing is to be done, so they do not
    stretch the window (unless there is nothing else). It never reaches back beyond `recording.complete_from`.
    """
    is_number = isinstance(last, int | float) and not isinstance(last, bool)
    if last is not None and not (is_number and 0 < last < float("inf")):
        raise InvalidRequestError("last", last, "give a positive number of seconds, or None for all that is recorded")
    spans = recording.spans
    work = spans[~np.isin(spans["phase"], (Phase.CELL, Phase.GC, Phase.CALLBACK))]
    starts = np.concatenate([work["start"], recording.steps["start"], recording.runnable["at"]])
    ends = np.concatenate([work["end"], recording.steps["end"], recording.runnable["at"]])
    if not len(starts):
        starts, ends = spans["start"], spans["end"]
    if not len(starts):
        return 0, 0
    t0, t1 = max(int(starts.min()), recording.complete_from), int(ends.max())
    if last is not None:
        t0 = max(t0, t1 - round(last * 1e9))
    return min(t0, t1), t1


def busy_intervals(recording: Recording, window: Window) -> Intervals:
    """Device busy: the union of all steps of all streams; a gap in one under work in another is not idle."""
    return union(clip(intervals(recording.steps), *window))


def host_intervals(recording: Recording, window: Window) -> Intervals:
    """Host work: the union of PLAN, LAUNCH, COMMIT, DETOKENIZE and PUBLISH. Never AWAIT."""
    spans = recording.spans
    return union(clip(intervals(spans[np.isin(spans["phase"], HOST_WORK)]), *window))


def runnable_intervals(recording: Recording, window: Window) -> Intervals:
    """When at least one sequence could run.

    Without any record of that (a timeline without an engine): from the first step's start to the last one's
    end.
    """
    edges, steps = recording.runnable, recording.steps
    if not len(edges):
        hull = np.array([[steps["start"].min(), steps["end"].max()]]) if len(steps) else np.empty((0, 2), np.int64)
        return clip(hull, *window)
    order = np.argsort(edges["at"], kind="stable")
    at, count = edges["at"][order], edges["count"][order]
    stretches = np.stack([at, np.append(at[1:], max(window[1], at[-1]))], axis=1)
    return union(clip(stretches[count > 0], *window))


@dataclass(frozen=True, slots=True)
class Bubble:
    """Sequences were runnable and the device idle; `share` (0 to 1) of the time fell to `cause`."""

    start_ns: int
    end_ns: int
    cause: str
    share: float

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        return f"{duration(self.duration_ns)}: {self.cause}"


def find_bubbles(recording: Recording, window: Window) -> tuple[Bubble, ...]:
    """Bubbles = runnable minus busy, in order of time, each put down to what the host did meanwhile.

    Every moment of a bubble falls to one cause, the first of these that holds then; among spans of one kind
    it is the one begun last, the innermost:
      1. a garbage collection, which stops every thread;
      2. a span of the engine's (planning ... publishing, loading, capturing) or a widget callback;
      3. a span of the user's own or a cell, while it held the loop. Awaiting cells stay open for long and
         hold it only now and then: a span during which the loop was heard from (a heartbeat, an await's end,
         a plan, a commit) claims only the moments at which the loop was late;
      4. launch latency: a step launched (its LAUNCH ended) but not begun on the device;
      5. a late loop (`held_intervals`);
      6. unknown.
    A bubble's cause is the one with the largest part of its time.
    """
    idle = complement(busy_intervals(recording, window), *window)
    gaps = intersect(runnable_intervals(recording, window), idle)
    if not len(gaps):
        return ()
    claims, label, words = _claims(recording, window)
    cuts = np.unique(np.concatenate([claims.ravel(), gaps.ravel()]))
    owner = topmost(claims, cuts)
    gap = np.searchsorted(gaps[:, 0], cuts[:-1], side="right") - 1
    inside = np.flatnonzero((gap >= 0) & (cuts[:-1] < gaps[gap, 1]))
    labels = np.append(label, 0)[owner[inside]]  # owner -1: the appended 0, unknown
    pairs, inverse = np.unique(gap[inside] * len(words) + labels, return_inverse=True)
    parts = np.zeros(len(pairs), np.int64)
    np.add.at(parts, inverse, np.diff(cuts)[inside])
    order = np.lexsort((pairs, parts, pairs // len(words)))
    gap_of = pairs[order] // len(words)
    best = order[np.append(np.flatnonzero(np.diff(gap_of)), len(order) - 1)]  # the largest part of each gap
    shares = parts[best] / (gaps[:, 1] - gaps[:, 0])
    return tuple(
        Bubble(start, end, words[word], share)
        for (start, end), word, share in zip(
            gaps.tolist(), (pairs[best] % len(words)).tolist(), shares.tolist(), strict=True
        )
    )


def _claims(recording: Recording, window: Window) -> tuple[Intervals, NDArray[np.int64], list[str]]:
    """Claims on moments, weakest first; a label for each; the labels' words (0: unknown)."""
    near = (recording.spans["end"] > window[0]) & (recording.spans["start"] < window[1])
    spans, names = recording.spans[near], recording.names[near]
    phase = spans["phase"]
    texts, text = np.unique(names, return_inverse=True) if len(names) else (names, phase)
    kinds, kind = np.unique(
        np.stack([phase, text, np.where(phase == Phase.CELL, spans["ref"], 0)], axis=1),
        axis=0,
        return_inverse=True,
    )
    words = [UNKNOWN, LATE_LOOP, LAUNCH_LATENCY]
    words += [_word(Phase(p), str(texts[t]), ref) for p, t, ref in kinds.tolist()]

    held = held_intervals(recording)
    waiting = _launch_latency(recording)
    opened = np.isin(phase, (Phase.CELL, Phase.USER))
    alive = opened & _loop_heard(recording, spans)
    pieces, piece_of = _pieces(intervals(spans), np.flatnonzero(alive), held)
    whole = np.flatnonzero(~alive & (phase != Phase.AWAIT))
    of = np.concatenate([piece_of, whole])  # which span a claim of one comes from
    rank = np.where(opened, 3, np.where(phase == Phase.GC, 5, 4))[of]
    order = np.lexsort((-spans["end"][of], spans["start"][of], rank))
    claims = np.concatenate([held, waiting, np.concatenate([pieces, intervals(spans)[whole]])[order]])
    label = np.concatenate([np.full(len(held), 1), np.full(len(waiting), 2), kind.reshape(-1)[of][order] + 3])
    return claims, label, words


def lags_in(recording: Recording, window: Window) -> Records:
    """The heartbeats that were late, or due, inside the window: also one that ran only after its end."""
    lags = recording.lags
    inside: Records = lags[(lags["at"] > window[0]) & (lags["at"] - lags["lag"] < window[1])]
    return inside


def awaiting_intervals(recording: Recording, window: Window) -> Intervals:
    """When the engine's task awaited the device and the loop was free: AWAIT without `held_intervals`."""
    awaits = recording.spans[recording.spans["phase"] == Phase.AWAIT]
    free = complement(held_intervals(recording), *window)
    return intersect(union(clip(intervals(awaits), *window)), free)


def held_intervals(recording: Recording) -> Intervals:
    """When the loop was 1 ms late or more: a heartbeat's delay, or an AWAIT's time after its step's end.

    A lower bound: between two heartbeats (20 ms) nobody is waiting who would notice.
    """
    lags, spans, steps = recording.lags, recording.spans, recording.steps
    beats = np.stack([lags["at"] - lags["lag"], lags["at"]], axis=1)
    awaits = spans[spans["phase"] == Phase.AWAIT]
    found, step = _match(awaits["ref"], steps["step_id"])
    awaits = awaits[found]
    wakes = np.stack([np.maximum(steps["end"][step], awaits["start"]), awaits["end"]], axis=1)
    late = np.concatenate([beats, wakes])
    return union(late[late[:, 1] - late[:, 0] >= LATE_NS])


def _launch_latency(recording: Recording) -> Intervals:
    launches = recording.spans[recording.spans["phase"] == Phase.LAUNCH]
    found, step = _match(launches["ref"], recording.steps["step_id"])
    waits = np.stack([launches["end"][found], recording.steps["start"][step]], axis=1)
    return waits[waits[:, 0] < waits[:, 1]]


def _loop_heard(recording: Recording, spans: Records) -> NDArray[np.bool_]:
    """For each span: did the loop show a sign of life strictly inside it?"""
    every = recording.spans
    signs = np.sort(
        np.concatenate(
            [
                recording.lags["at"],
                every["end"][every["phase"] == Phase.AWAIT],
                every["start"][np.isin(every["phase"], (Phase.PLAN, Phase.COMMIT))],
            ]
        )
    )
    before = np.searchsorted(signs, spans["start"], side="right")
    result: NDArray[np.bool_] = before < np.searchsorted(signs, spans["end"], side="left")
    return result


def _pieces(spans: Intervals, which: NDArray[np.int64], held: Intervals) -> tuple[Intervals, NDArray[np.int64]]:
    """spans[which] cut down to `held` (normal form), one piece a pair that meets; and the pieces' spans."""
    first = np.searchsorted(held[:, 1], spans[which, 0], side="right")
    number = np.maximum(np.searchsorted(held[:, 0], spans[which, 1], side="left") - first, 0)
    piece_of = np.repeat(which, number)
    offset = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    part = held[np.repeat(first, number) + offset]
    starts = np.maximum(spans[piece_of, 0], part[:, 0])
    return np.stack([starts, np.minimum(spans[piece_of, 1], part[:, 1])], axis=1), piece_of


def _match(ids: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (i, j) with ids[i] == among[j], for every i that has one."""
    if not len(among):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(among, kind="stable")
    at = np.minimum(np.searchsorted(among[order], ids), len(among) - 1)
    found = np.flatnonzero(among[order][at] == ids)
    return found, order[at[found]]


def _word(phase: Phase, name: str, ref: int) -> str:
    if phase is Phase.CELL:
        return f"user cell [{ref}]"
    if phase is Phase.USER:
        return name
    word = _WORDS.get(phase, "awaiting")
    return f"{word}: {name}" if name else word


def duration(ns: int) -> str:
    """In the unit that suits it: µs, ms or s."""
    if ns < 100_000:
        return f"{ns / 1e3:.1f} µs"
    return f"{ns / 1e6:.1f} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.2f} s"
