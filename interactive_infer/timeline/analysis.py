"""From records to busy time, overlap and waiting: pure functions over interval arrays.

Times are ns on `time.perf_counter_ns`. No function loops over spans in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.intervals import Intervals, clip, complement, intersect, intervals, total, union
from interactive_infer.timeline.recorder import Phase, Work
from interactive_infer.timeline.recording import Recording, Records

Window = tuple[int, int]
FURTHEST_NS = 2**62
"""Times lie between this and its negative, so that no difference of two leaves int64."""

HOST_WORK = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.DETOKENIZE, Phase.PUBLISH)
# What goes on while nothing is to be done.
_NO_WORK = (Phase.CELL, Phase.GC, Phase.CALLBACK, Phase.LOAD, Phase.CAPTURE, Phase.OTHER)
# A loop that is this late does not merely wait for its timer: epoll rounds up to whole milliseconds.
LATE_NS = 1_000_000


def window_of(recording: Recording, last: float | None = None) -> Window:
    """From the first record of work to the newest, or the `last` seconds of that; (t0, t1) in ns.

    Loading, capturing, cells, garbage collections, callbacks and loop lag go on while nothing is to be done, so they do
    not stretch the window (unless there is nothing else). It never reaches back beyond `recording.complete_from`. While
    a step is in flight nobody knows since when the device works on it: then the window ends with the last known step.
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
    launched, steps = spans["ref"][spans["phase"] == Phase.LAUNCH], recording.steps
    if len(launched) and len(steps) and launched.max() > steps["step_id"].max():
        t1 = max(t0, int(steps["end"].max()))
    return min(last_of(t0, t1, last), t1), t1


def last_of(t0: int, t1: int, last: float | None) -> int:
    """Where the `last` seconds of [t0, t1) begin; t0 where it has no more."""
    return t0 if last is None or last * 1e9 >= t1 - t0 else t1 - round(last * 1e9)


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


def kernels_known(recording: Recording, window: Window) -> bool:
    """Whether every kernel of the window is known: then they say when the device was busy."""
    return window[1] > window[0] and total(profiled_intervals(recording, window)) == window[1] - window[0]


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
    """When the loop was 1 ms late or more: a heartbeat's delay, an AWAIT's time after its step's end, the time in which
    the first work waited to be planned, or the iteration that the loop has between a step's COMMIT and what comes next.

    A lower bound: between two heartbeats (20 ms) nobody else is waiting who would notice.
    """
    lags = recording.lags
    beats = np.stack([lags["at"] - lags["lag"], lags["at"]], axis=1)
    late = np.concatenate([beats, wakes(recording), _starts(recording), _iterations(recording)])
    return union(late[late[:, 1] - late[:, 0] >= LATE_NS])


def _starts(recording: Recording) -> Intervals:
    """From when something could run again, with nothing in flight, to its PLAN: the loop was to do that at once."""
    spans = recording.spans
    plans = np.sort(spans["start"][spans["phase"] == Phase.PLAN])
    if not len(plans) or not len(recording.runnable):
        return np.empty((0, 2), np.int64)
    launches, commits = (spans[spans["phase"] == phase] for phase in (Phase.LAUNCH, Phase.COMMIT))
    found, commit = match(launches["ref"], commits["ref"])
    flying = union(np.stack([launches["start"][found], commits["end"][commit]], axis=1))
    stretches = runnable_intervals(recording, (int(recording.runnable["at"].min()), int(plans[-1]) + 1))
    begun = stretches[:, 0]
    planned = plans[np.minimum(np.searchsorted(plans, begun), len(plans) - 1)]
    flight = np.searchsorted(flying[:, 0], begun, side="right") - 1
    in_flight = (flight >= 0) & (begun < np.append(flying[:, 1], 0)[flight])
    waited = np.stack([begun, planned], axis=1)
    return waited[~in_flight & (begun < planned) & (planned < stretches[:, 1])]


def _iterations(recording: Recording) -> Intervals:
    """From the COMMIT of each step to the AWAIT of the next one, or a PLAN before: the loop has an iteration of its own
    in between."""
    spans = recording.spans
    commits, awaits, plans = (spans[spans["phase"] == phase] for phase in (Phase.COMMIT, Phase.AWAIT, Phase.PLAN))
    found, following = match(commits["ref"] + 1, awaits["ref"])
    committed, awaited = commits["end"][found], awaits["start"][following]
    starts = np.append(np.sort(plans["start"]), np.iinfo(np.int64).max)
    between = np.stack([committed, np.minimum(awaited, starts[np.searchsorted(starts, committed)])], axis=1)
    return between[between[:, 0] < between[:, 1]]


def wakes(recording: Recording) -> Intervals:
    """From the end of each step, or the beginning of its AWAIT if that was later, to the end of its AWAIT."""
    awaits = recording.spans[recording.spans["phase"] == Phase.AWAIT]
    found, step = match(awaits["ref"], recording.steps["step_id"])
    awaits = awaits[found]
    wakes = np.stack([np.maximum(recording.steps["end"][step], awaits["start"]), awaits["end"]], axis=1)
    return wakes[wakes[:, 0] < wakes[:, 1]]


def launch_waits(recording: Recording) -> tuple[Intervals, NDArray[np.bool_]]:
    """From the end of each step's last LAUNCH to its begin, and which of these steps were a graph's replay.

    A step that was left to a thread has two: until it was left, and the thread's own. A replay is on the card when the
    last one ends: what comes then is the card's.
    """
    steps, launches = recording.steps, recording.spans[recording.spans["phase"] == Phase.LAUNCH]
    found, step = match(launches["ref"], steps["step_id"])
    launched = np.full(len(steps), np.iinfo(np.int64).max)
    launched[step] = 0
    np.maximum.at(launched, step, launches["end"][found])
    waits = np.stack([launched, steps["start"]], axis=1)
    some = waits[:, 0] < waits[:, 1]
    return waits[some], steps["graph"][some] > 0


def handovers(recording: Recording) -> Intervals:
    """From the end of each step's first LAUNCH to the begin of its last, where it was left to a thread."""
    launches = recording.spans[recording.spans["phase"] == Phase.LAUNCH]
    ids, step = np.unique(launches["ref"], return_inverse=True)
    left, taken = np.full(len(ids), np.iinfo(np.int64).max), np.zeros(len(ids), np.int64)
    np.minimum.at(left, step, launches["end"])
    np.maximum.at(taken, step, launches["start"])
    return np.stack([left, taken], axis=1)[left < taken]


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

    While the device works the path runs through it, whatever the host does meanwhile; while it idles, through the host,
    unless the next step is a replay that has been launched.
    """
    runnable, busy = runnable_intervals(recording, window), busy_intervals(recording, window)
    if not len(runnable):
        return None
    idle = intersect(runnable, complement(busy, *window))
    waits, replayed = launch_waits(recording)
    to_launch = complement(union(clip(waits[replayed], *window)), *window)
    host = total(intersect(intersect(idle, to_launch), host_intervals(recording, window)))
    whole = total(runnable)
    return CriticalPath((whole - total(idle)) / whole, host / whole, (total(idle) - host) / whole)


def match(ids: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (i, j) with ids[i] == among[j], for every i that has one."""
    if not len(among):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(among, kind="stable")
    at = np.minimum(np.searchsorted(among[order], ids), len(among) - 1)
    found = np.flatnonzero(among[order][at] == ids)
    return found, order[at[found]]


def duration(ns: int) -> str:
    """In the unit that suits it: µs, ms or s."""
    if ns < 99_950:
        return f"{ns / 1e3:.1f} µs"
    return f"{ns / 1e6:.1f} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.2f} s"
