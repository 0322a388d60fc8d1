"""From records to busy time, overlap and bubbles with their causes: pure functions over interval arrays.

Times are ns on `time.perf_counter_ns`. No function loops over spans in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.intervals import (
    Intervals,
    clip,
    complement,
    intersect,
    intervals,
    topmost,
    total,
    union,
)
from interactive_infer.timeline.recorder import Phase, Work
from interactive_infer.timeline.recording import WORK, Recording, Records, batch_numbers

Window = tuple[int, int]

HOST_WORK = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.DETOKENIZE, Phase.PUBLISH)
# What goes on while nothing is to be done.
_NO_WORK = (Phase.CELL, Phase.GC, Phase.CALLBACK, Phase.LOAD, Phase.CAPTURE)
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
UNKNOWN, LATE_LOOP, LAUNCH_LATENCY, WAKE_UP = "unknown", "late loop", "launch latency", "waking the loop"


# -- what a recording says -----------------------------------------------------------------------------------


def window_of(recording: Recording, last: float | None = None) -> Window:
    """From the first record of work to the newest, or the `last` seconds of that; (t0, t1) in ns.

    Loading, capturing, cells, garbage collections, callbacks and loop lag go on while nothing is to be done, so they do
    not stretch the window (unless there is nothing else). It never reaches back beyond `recording.complete_from`.
    """
    is_number = isinstance(last, int | float) and not isinstance(last, bool)
    if last is not None and not (is_number and 0 < last < float("inf")):
        raise InvalidRequestError("last", last, "give a positive number of seconds, or None for all that is recorded")
    spans = recording.spans
    parts = (spans[~np.isin(spans["phase"], _NO_WORK)], recording.steps, recording.work)
    starts = np.concatenate([*(part["start"] for part in parts), recording.runnable["at"]])
    ends = np.concatenate([*(part["end"] for part in parts), recording.runnable["at"]])
    if not len(starts):
        starts, ends = spans["start"], spans["end"]
    if not len(starts):
        return 0, 0
    t0, t1 = max(int(starts.min()), recording.complete_from), int(ends.max())
    if last is not None:
        t0 = max(t0, t1 - round(last * 1e9))
    return min(t0, t1), t1


def busy_intervals(
    recording: Recording, window: Window, *, device: int | None = None, kernels: bool = False
) -> Intervals:
    """Device busy: the union over all streams; a gap in one under work in another is not idle.

    Of steps and other work between events; or of kernels (`kernels`, and where there is nothing else). `device`: of
    that one alone.
    """
    steps, work = recording.steps, recording.work
    is_kernel = work["kind"] == Work.KERNEL
    if not kernels and (len(steps) or not is_kernel.all()):
        work = work[~is_kernel]
    else:
        steps, work = steps[:0], work[is_kernel]
    if device is not None:
        steps, work = steps[steps["device"] == device], work[work["device"] == device]
    return union(clip(intervals(steps), *window), clip(intervals(work), *window))


def devices_of(recording: Recording) -> list[int]:
    """Indices of the devices that anything ran on; another engine's work does not count."""
    own = recording.work[recording.work["kind"] != Work.OTHER]
    return np.unique(np.concatenate([recording.steps["device"], own["device"]])).tolist()


def profiled_intervals(recording: Recording, window: Window) -> Intervals:
    """Where every kernel is known."""
    return union(clip(recording.profiled, *window))


def host_intervals(recording: Recording, window: Window) -> Intervals:
    """Host work: the union of PLAN, LAUNCH, COMMIT, DETOKENIZE and PUBLISH. Never AWAIT."""
    spans = recording.spans
    return union(clip(intervals(spans[np.isin(spans["phase"], HOST_WORK)]), *window))


def runnable_intervals(recording: Recording, window: Window) -> Intervals:
    """When at least one sequence could run.

    Without any record of that (a timeline without an engine): from the start of the first work on a device to the end
    of the last.
    """
    edges = recording.runnable
    if not len(edges):
        own = recording.work[recording.work["kind"] != Work.OTHER]
        ran = np.concatenate([intervals(recording.steps), intervals(own)])
        hull = [(ran[:, 0].min(), ran[:, 1].max())] if len(ran) else []
        return clip(np.array(hull, np.int64).reshape(-1, 2), *window)
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
      2. a span of the engine's (planning ... publishing, loading, capturing), a widget callback, or a span of the
         user's own inside one of those (a listener, a hook);
      3. a span of the user's own or a cell, while it held the loop. Awaiting cells stay open for long and
         hold it only now and then: a span during which the loop was heard from (a heartbeat, an await's end,
         a plan, a commit) claims only the moments at which the loop was late;
      4. launch latency: a step launched (its LAUNCH ended) but not begun on the device;
      5. a late loop (`held_intervals`);
      6. waking the loop: a step had ended, and its AWAIT had not;
      7. unknown.
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
    waiting, waking = _launch_latency(recording), _wakes(recording)
    opened = np.isin(phase, (Phase.CELL, Phase.USER))
    alive = opened & _loop_heard(recording, spans)
    pieces, piece_of = _pieces(intervals(spans), np.flatnonzero(alive), held)
    whole = np.flatnonzero(~alive & (phase != Phase.AWAIT))
    of = np.concatenate([piece_of, whole])  # which span a claim of one comes from
    inside = (phase == Phase.USER) & _within(intervals(spans), intervals(spans[~opened & (phase != Phase.AWAIT)]))
    rank = np.where(opened & ~inside, 3, np.where(phase == Phase.GC, 5, 4))[of]
    order = np.lexsort((-spans["end"][of], spans["start"][of], rank))
    claims = np.concatenate([waking, held, waiting, np.concatenate([pieces, intervals(spans)[whole]])[order]])
    few = [np.full(len(waking), 3), np.full(len(held), 1), np.full(len(waiting), 2)]
    label = np.concatenate([*few, kind.reshape(-1)[of][order] + 4])
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
    lags = recording.lags
    beats = np.stack([lags["at"] - lags["lag"], lags["at"]], axis=1)
    late = np.concatenate([beats, _wakes(recording)])
    return union(late[late[:, 1] - late[:, 0] >= LATE_NS])


def _wakes(recording: Recording) -> Intervals:
    """From the end of each step, or the beginning of its AWAIT if that was later, to the end of its AWAIT."""
    awaits = recording.spans[recording.spans["phase"] == Phase.AWAIT]
    found, step = _match(awaits["ref"], recording.steps["step_id"])
    awaits = awaits[found]
    wakes = np.stack([np.maximum(recording.steps["end"][step], awaits["start"]), awaits["end"]], axis=1)
    return wakes[wakes[:, 0] < wakes[:, 1]]


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


class CriticalPath(NamedTuple):
    """Shares of the time in which something could run, 0 to 1, that sum to 1: what the next token waited for.

    device: the device worked. host: it idled, and the engine worked on the host. other: it idled for anything else (a
    cell, a collection, latency): the bubbles say for what.
    """

    device: float
    host: float
    other: float


def critical_path(recording: Recording, window: Window) -> CriticalPath | None:
    """None where nothing could run.

    While the device works the path runs through it, whatever the host does meanwhile; while it idles, through the host.
    """
    runnable, busy = runnable_intervals(recording, window), busy_intervals(recording, window)
    if not len(runnable):
        return None
    idle = intersect(runnable, complement(busy, *window))
    host = total(intersect(idle, host_intervals(recording, window)))
    whole = total(runnable)
    return CriticalPath((whole - total(idle)) / whole, host / whole, (total(idle) - host) / whole)


# -- tokens --------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """Tokens that steps drew, int64 arrays of one length: generation, index in it, the step's number, and when the
    token was on the host (the end of the step's commit; of the step itself where no commit is recorded)."""

    generation: NDArray[np.int64]
    place: NDArray[np.int64]
    step_id: NDArray[np.int64]
    at: NDArray[np.int64]


def tokens_of(recording: Recording) -> Tokens:
    """Every token whose step is recorded, in no particular order; surplus ones after a stop too."""
    steps, spans = recording.steps, recording.spans
    generation, drawn, sizes = batch_numbers(recording.batches)
    at = steps["end"].copy()
    commits = spans[spans["phase"] == Phase.COMMIT]
    found, commit = _match(steps["step_id"], commits["ref"])
    at[found] = commits["end"][commit]
    step_id, at = np.repeat(steps["step_id"], sizes), np.repeat(at, sizes)
    index = drawn + step_id
    kept = index >= 0
    return Tokens(generation[kept], index[kept], step_id[kept], at[kept])


def first_token_ns(recording: Recording, window: Window) -> NDArray[np.int64]:
    """From being asked for to the first token, of the generations whose first token came in the window."""
    tokens, asked = tokens_of(recording), recording.asked
    found, which = _match(tokens.generation, asked["generation"])
    first = (tokens.place[found] == asked["first"][which]) & _inside(tokens.at[found], window)
    waited: NDArray[np.int64] = (tokens.at[found] - asked["at"][which])[first]
    return waited


def between_tokens_ns(recording: Recording, window: Window) -> NDArray[np.int64]:
    """From one token to the next of the same generation, where the latter came in the window."""
    tokens = tokens_of(recording)
    order = np.lexsort((tokens.place, tokens.generation))
    generation, index, at = tokens.generation[order], tokens.place[order], tokens.at[order]
    follows = (np.diff(generation) == 0) & (np.diff(index) == 1) & _inside(at[1:], window)
    gaps: NDArray[np.int64] = np.diff(at)[follows]
    return gaps


def _inside(at: NDArray[np.int64], window: Window) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = (at > window[0]) & (at <= window[1])
    return result


# -- several engines -----------------------------------------------------------------------------------------


def beside(recordings: Mapping[str, Recording]) -> dict[str, Recording]:
    """Each recording with the steps that the others ran on its devices, as work of the kind OTHER by their names.

    Then a device that works for one engine is not idle for another.
    """
    together = {}
    for name, recording in recordings.items():
        mine = devices_of(recording)
        work, names = [recording.work], [recording.work_names]
        for other, theirs in recordings.items():
            steps = theirs.steps[np.isin(theirs.steps["device"], mine)]
            if other != name and len(steps):
                rows = np.zeros(len(steps), WORK)
                for column in ("start", "end", "stream", "device"):
                    rows[column] = steps[column]
                rows["kind"] = Work.OTHER
                work.append(rows)
                names.append(np.full(len(rows), other, np.object_))
        together[name] = replace(recording, work=np.concatenate(work), work_names=np.concatenate(names))
    return together


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
