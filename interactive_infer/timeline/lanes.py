"""Which lanes a timeline's figure has, and what lies in each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.analysis import (
    HOST_WORK,
    Window,
    awaiting_intervals,
    busy_intervals,
    held_intervals,
    host_intervals,
    kernels_known,
    runnable_intervals,
)
from interactive_infer.timeline.intervals import Intervals, clip, complement, intersect, intervals, union
from interactive_infer.timeline.recorder import CPU, Phase, Work
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.summary import Summary, device_name

HOST_LANES = {
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
    Phase.OTHER: "others' work",
}


_NAMED = 3  # of the user's span names that have a lane of their own
_MOST_NUMBERS = 30  # of cells
_INVISIBLE = 20_000  # of the window: a small part of a pixel


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
    label: str
    ink: str
    kernels: str
    foreign: str


# Hues of Okabe and Ito's palette, which people with any common colour blindness tell apart; lanes carry the rest.
# `label`: the bubbles' colour, as small text needs it. `ink`: text on coloured boxes.
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
        label="#a84300",
        ink="#1f2328",
        kernels="#1b3a57",
        foreign="#a7afb8",
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
        label="#ff9d66",
        ink="#14171c",
        kernels="#d7e6f4",
        foreign="#6b7683",
    ),
}


@dataclass(frozen=True)
class Lane:
    """`parts` are intervals in normal form, each with its colour; the later ones lie inside the first. `covered` is
    what the share at the right tells of. `is_device`: bubbles are drawn into it. `texts`: (start, end, text, colour),
    to be written between the two where there is room. `cuts`: where one step ends and the next may begin at once."""

    label: str
    parts: list[tuple[Intervals, str]]
    covered: Intervals
    is_device: bool = False
    texts: list[tuple[int, int, str, str]] = field(default_factory=list)
    cuts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def lanes_of(
    recording: Recording, window: Window, summary: Summary, colors: Theme, *, brief: bool = False
) -> list[Lane]:
    """Top down; empty ones are left out, the device's never. `brief`: host work as a whole, not by phase."""
    found = _device_lanes(recording, window, summary, colors)
    spans = recording.spans
    busy = busy_intervals(recording, window, kernels=kernels_known(recording, window))
    host = host_intervals(recording, window)
    lanes = [Lane("host work", [(host, colors.work), (intersect(busy, host), colors.overlap)], host)]
    shade = {Phase.AWAIT: colors.awaiting, Phase.OTHER: colors.foreign}
    shade |= dict.fromkeys((Phase.CELL, Phase.USER), colors.user)
    shade |= dict.fromkeys((Phase.LOAD, Phase.CAPTURE, Phase.GC, Phase.CALLBACK), colors.other)
    for phase, label in HOST_LANES.items():
        if phase is Phase.AWAIT:
            part = awaiting_intervals(recording, window)
        elif brief and phase in HOST_WORK:
            continue
        elif phase is Phase.USER and not brief:
            lanes += _named_lanes(recording, window, label, colors)
            continue
        else:
            part = union(clip(intervals(spans[spans["phase"] == phase]), *window))
        parts = [(part, shade.get(phase, colors.work))]
        if phase in HOST_WORK:
            parts.append((intersect(busy, part), colors.overlap))
        texts = _cell_numbers(spans, window, colors) if phase is Phase.CELL else []
        lanes.append(Lane(label, parts, part, texts=texts))
        if phase is Phase.AWAIT:
            late = clip(held_intervals(recording), *window)
            lanes.append(Lane("loop late", [(late, colors.lag)], late))
    return found + [lane for lane in lanes if len(lane.covered)]


def _named_lanes(recording: Recording, window: Window, label: str, colors: Theme) -> list[Lane]:
    """The user's spans: a lane for each of the names that took the most time, one for all the others."""
    spans = recording.spans
    found = np.flatnonzero((spans["phase"] == Phase.USER) & (spans["end"] > window[0]) & (spans["start"] < window[1]))
    if not len(found):
        return []
    mine = spans[found]
    names, which = np.unique(recording.names[found], return_inverse=True)
    took = np.bincount(which, np.minimum(mine["end"], window[1]) - np.maximum(mine["start"], window[0]))
    own = np.argsort(-took, kind="stable")
    if len(own) > _NAMED + 1:
        own = own[:_NAMED]
    parts = [(str(names[number]), _of(mine[which == number], window)) for number in own.tolist()]
    parts.append((label, _of(mine[~np.isin(which, own)], window)))
    return [Lane(name, [(part, colors.user)], part) for name, part in parts]


def _cell_numbers(spans: NDArray[np.void], window: Window, colors: Theme) -> list[tuple[int, int, str, str]]:
    cells = spans[(spans["phase"] == Phase.CELL) & (spans["end"] > window[0]) & (spans["start"] < window[1])]
    longest = cells[np.argsort(cells["start"] - cells["end"], kind="stable")[:_MOST_NUMBERS]]
    rows = longest[["start", "end", "ref"]].tolist()
    return [(max(start, window[0]), min(end, window[1]), f"[{ref}]", colors.ink) for start, end, ref in rows]


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
            lanes.append(Lane(label, parts, shown, True, cuts=_cuts(ran, window)))
        theirs = work[work["device"] == index]
        for kind, label, color in (
            (Work.USER, "device spans", colors.user),
            (Work.KERNEL, "operators" if index == CPU else "kernels", colors.kernels),
            (Work.OTHER, "other engines", colors.foreign),
        ):
            part = _of(theirs[theirs["kind"] == kind], window)
            if not len(part):
                continue
            # Bubbles lie in the first lane: where no engine's steps are, in what there is.
            behind = [] if lanes else [(union(part, bubbles), colors.bubble)]
            lanes.append(Lane(f"{name}{label}", [*behind, (part, color)], part, not lanes))
    nothing: NDArray[np.int64] = np.empty((0, 2), np.int64)
    lanes = lanes or [Lane("device", [(nothing, colors.decode)], nothing, True)]
    if len(recording.runnable):
        wanted = union(runnable_intervals(recording, window), busy_intervals(recording, window))
        idle = complement(wanted, *window)
        longest = idle[np.argsort(idle[:, 0] - idle[:, 1], kind="stable")[:_MOST_NUMBERS]].tolist()
        lanes[0].texts.extend((start, end, "nothing to run", colors.faint) for start, end in longest)
    return lanes


def _cuts(steps: NDArray[np.void], window: Window) -> NDArray[np.int64]:
    """Where one step follows another without a gap that anybody could see."""
    starts, before = steps["start"][1:], np.maximum.accumulate(steps["end"])[:-1]
    close = starts - before < (window[1] - window[0]) / _INVISIBLE
    cuts: NDArray[np.int64] = starts[close & (starts > window[0]) & (starts < window[1])]
    return cuts


def _of(records: NDArray[np.void], window: Window) -> Intervals:
    return union(clip(intervals(records), *window))
