"""Bubbles, in which there was work to do and the device idled, and what each is put down to.

Pure functions over interval arrays, in ns; none loops over spans in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.analysis import (
    Window,
    busy_intervals,
    duration,
    handovers,
    held_intervals,
    launch_waits,
    match,
    runnable_intervals,
    wakes,
)
from interactive_infer.timeline.intervals import Intervals, complement, intersect, intervals, topmost, union
from interactive_infer.timeline.recorder import Phase
from interactive_infer.timeline.recording import Recording, Records

WORDS = {
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
UNKNOWN, LATE_LOOP, LAUNCH_LATENCY, WAKE_UP = "unknown", "late loop", "launch latency", "waking the loop"


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
      1. launch latency of a graph's replay: it was launched, and the card had not begun it;
      2. a garbage collection, which stops every thread;
      3. a span of the engine's (planning ... publishing, loading, capturing), a widget callback, or a span of the
         user's own inside one of those (a listener, a hook);
      4. what another engine did on the host (`beside`);
      5. a span of the user's own or a cell, while it held the loop. Awaiting cells stay open for long and
         hold it only now and then: a span during which the loop was heard from (a heartbeat, an await's end,
         a plan, a commit) claims only the moments at which the loop was late;
      6. launch latency of any other step, whose launch a thread may still be at; or a launch left to a thread, which
         had not begun it;
      7. a late loop (`held_intervals`);
      8. waking the loop: a step had ended, and its AWAIT had not, nor its COMMIT begun;
      9. unknown.
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
    words = [UNKNOWN, LATE_LOOP, LAUNCH_LATENCY, WAKE_UP]
    words += [_word(Phase(p), str(texts[t]), ref) for p, t, ref in kinds.tolist()]

    held = held_intervals(recording)
    waits, replayed = launch_waits(recording)
    sure, unsure = waits[replayed], np.concatenate([waits[~replayed], handovers(recording)])
    waking = np.concatenate([wakes(recording), _until_committed(recording)])
    opened = np.isin(phase, (Phase.CELL, Phase.USER))
    alive = opened & _loop_heard(recording, spans)
    pieces, piece_of = _pieces(intervals(spans), np.flatnonzero(alive), held)
    whole = np.flatnonzero(~alive & (phase != Phase.AWAIT))
    of = np.concatenate([piece_of, whole])  # which span a claim of one comes from
    inside = (phase == Phase.USER) & _within(intervals(spans), intervals(spans[~opened & (phase != Phase.AWAIT)]))
    strong = np.select([phase == Phase.GC, phase == Phase.OTHER], [6, 4], 5)
    rank = np.where(opened & ~inside, 3, strong)[of]
    order = np.lexsort((-spans["end"][of], spans["start"][of], rank))
    of_spans = np.concatenate([pieces, intervals(spans)[whole]])[order]
    claims = np.concatenate([waking, held, unsure, of_spans, sure])
    few = [np.full(len(claimed), word) for claimed, word in ((waking, 3), (held, 1), (unsure, 2))]
    label = np.concatenate([*few, kind.reshape(-1)[of][order] + 4, np.full(len(sure), 2)])
    return claims, label, words


def _until_committed(recording: Recording) -> Intervals:
    """From the end of each step to the beginning of its COMMIT: also where nobody awaits (`generate_sync`)."""
    commits = recording.spans[recording.spans["phase"] == Phase.COMMIT]
    found, step = match(commits["ref"], recording.steps["step_id"])
    waits = np.stack([recording.steps["end"][step], commits["start"][found]], axis=1)
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


def _within(spans: Intervals, others: Intervals) -> NDArray[np.bool_]:
    """For each span: does one stretch of `others`' union hold all of it?"""
    around = union(others)
    at = np.searchsorted(around[:, 0], spans[:, 0], side="right") - 1
    reached = np.append(around[:, 1], np.iinfo(np.int64).min)
    result: NDArray[np.bool_] = spans[:, 1] <= reached[at]
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


def _word(phase: Phase, name: str, ref: int) -> str:
    if phase is Phase.CELL:
        return f"user cell [{ref}]"
    if phase in (Phase.USER, Phase.OTHER):
        return name
    word = WORDS.get(phase, "awaiting")
    return f"{word}: {name}" if name else word
