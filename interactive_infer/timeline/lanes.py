"""Which lanes a timeline's figure has, and what lies in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.analysis import (
    HOST_WORK,
    Window,
    awaiting_intervals,
    busy_intervals,
    held_intervals,
    host_intervals,
)
from interactive_infer.timeline.intervals import Intervals, clip, intersect, intervals, union
from interactive_infer.timeline.recorder import Phase, Work
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.summary import Summary, device_name

_HOST_LANES = {
    Phase.PLAN: "plan",
    Phase.LAUNCH: "launch",
    Phase.COMMIT: "commit",
    Phase.DETOKENIZE: "detokenize",
    Phase.PUBLISH: "publish",
    Phase.LOAD: "load",
    Phase.CAPTURE: "capture",
    Phase.AWAIT: "awaiting",
    Phase.GC: "garbage coll.",
    Phase.CALLBACK: "callbacks",
    Phase.USER: "user spans",
    Phase.CELL: "user cells",
}


@dataclass(frozen=True)
class Theme:
    background: str
    text: str
    faint: str
    grid: str
    decode: str
    prefill: str
    work: str
    other: str
    awaiting: str
    user: str
    lag: str
    overlap: str
    bubble: str
    kernels: str
    foreign: str


# Hues of Okabe and Ito's palette, which people with any common colour blindness tell apart; lanes carry the
# rest.
THEMES = {
    "light": Theme(
        background="#ffffff",
        text="#1f2328",
        faint="#656d76",
        grid="#d8dde3",
        decode="#0072b2",
        prefill="#56b4e9",
        work="#e69f00",
        other="#8c6bb1",
        awaiting="#b8bfc7",
        user="#cc79a7",
        lag="#57606a",
        overlap="#009e73",
        bubble="#d55e00",
        kernels="#1b3a57",
        foreign="#c9ced4",
    ),
    "dark": Theme(
        background="#14171c",
        text="#e6e9ed",
        faint="#9aa4af",
        grid="#333a43",
        decode="#3b9fdd",
        prefill="#a5dcff",
        work="#f0b429",
        other="#b39ddb",
        awaiting="#566270",
        user="#e39bc4",
        lag="#aab4bf",
        overlap="#1fbf92",
        bubble="#ff8a4c",
        kernels="#d7e6f4",
        foreign="#4b545e",
    ),
}


@dataclass(frozen=True)
class Lane:
    """`parts` are intervals in normal form, each with its colour; the later ones lie inside the first. `covered` is
    what the share at the right tells of. `is_device`: bubbles are drawn into it."""

    label: str
    parts: list[tuple[Intervals, str]]
    covered: Intervals
    is_device: bool = False


def lanes_of(
    recording: Recording, window: Window, summary: Summary, colors: Theme, *, brief: bool = False
) -> list[Lane]:
    """Top down; empty ones are left out, the device's never. `brief`: host work as a whole, not by phase."""
    found = _device_lanes(recording, window, summary, colors)
    spans = recording.spans
    busy, host = busy_intervals(recording, window), host_intervals(recording, window)
    lanes = [Lane("host work", [(host, colors.work), (intersect(busy, host), colors.overlap)], host)]
    shade = {Phase.AWAIT: colors.awaiting, Phase.CELL: colors.user, Phase.USER: colors.user}
    shade |= dict.fromkeys((Phase.LOAD, Phase.CAPTURE, Phase.GC, Phase.CALLBACK), colors.other)
    for phase, label in _HOST_LANES.items():
        if phase is Phase.AWAIT:
            part = awaiting_intervals(recording, window)
        elif brief and phase in HOST_WORK:
            continue
        else:
            part = union(clip(intervals(spans[spans["phase"] == phase]), *window))
        parts = [(part, shade.get(phase, colors.work))]
        if phase in HOST_WORK:
            parts.append((intersect(busy, part), colors.overlap))
        lanes.append(Lane(label, parts, part))
        if phase is Phase.AWAIT:
            late = clip(held_intervals(recording), *window)
            lanes.append(Lane("loop late", [(late, colors.lag)], late))
    return found + [lane for lane in lanes if len(lane.covered)]


def _device_lanes(recording: Recording, window: Window, summary: Summary, colors: Theme) -> list[Lane]:
    """For each device: one lane a stream of steps, then the user's work, kernels, and other engines' steps."""
    steps, work = recording.steps, recording.work
    bubbles = np.array([(b.start_ns, b.end_ns) for b in summary.bubbles], np.int64).reshape(-1, 2)
    indices = np.unique(np.concatenate([steps["device"], work["device"]])).tolist()
    lanes = []
    for index in indices:
        name = f"{device_name(index)} " if len(indices) > 1 else ""
        mine = steps[steps["device"] == index]
        streams = np.unique(mine["stream"]).tolist()
        for stream in streams:
            ran = mine[mine["stream"] == stream]
            shown = _of(ran, window)
            decode = _of(ran[ran["prefill_tokens"] == 0], window)
            label = f"{name}stream {stream}" if len(streams) > 1 else name.strip() or "device"
            parts = [(union(shown, bubbles), colors.bubble), (shown, colors.prefill), (decode, colors.decode)]
            lanes.append(Lane(label, parts, shown, True))
        theirs = work[work["device"] == index]
        for kind, label, color in (
            (Work.USER, "device spans", colors.user),
            (Work.KERNEL, "kernels", colors.kernels),
            (Work.OTHER, "other engines", colors.foreign),
        ):
            part = _of(theirs[theirs["kind"] == kind], window)
            if not len(part):
                continue
            # Bubbles lie in the first lane: where no engine's steps are, in what there is.
            behind = [] if lanes else [(union(part, bubbles), colors.bubble)]
            lanes.append(Lane(f"{name}{label}", [*behind, (part, color)], part, not lanes))
    nothing: NDArray[np.int64] = np.empty((0, 2), np.int64)
    return lanes or [Lane("device", [(nothing, colors.decode)], nothing, True)]


def _of(records: NDArray[np.void], window: Window) -> Intervals:
    return union(clip(intervals(records), *window))
