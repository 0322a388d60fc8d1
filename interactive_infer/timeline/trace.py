"""Chrome trace-event JSON, which ui.perfetto.dev opens: out, and back in.

Format: "Trace Event Format" (Google, 2016): complete events ("X") on named tracks, counters ("C"), metadata
("M"). Times in the file are microseconds since `otherData.origin_ns`, with three decimals, so no nanosecond
is lost.
"""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.recorder import LAG, RUNNABLE, SPAN, STEP, Phase, Recording, Records

FORMAT = "interactive_infer timeline 1"
_PID = 1
_STEP_FIELDS = STEP.names[3:] if STEP.names else ()
_LAG_TRACK, _RUNNABLE_TRACK = "loop lag (ms)", "runnable sequences"


def save(recording: Recording, path: str | PathLike[str], *, device: str, source: str) -> None:
    """Write `recording`; the file at `path` is replaced only once the new one is whole."""
    target = Path(path)
    text = json.dumps(to_dict(recording, device=device, source=source), separators=(",", ":"))
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def to_dict(recording: Recording, *, device: str = "device", source: str = "") -> dict[str, Any]:
    """The trace as a JSON object: a track for each stream and host phase, more where spans of one overlap."""
    firsts = [int(rows[rows.dtype.names[1]].min()) for rows in _arrays(recording) if len(rows) and rows.dtype.names]
    origin = min(firsts, default=0)
    tracks = _Tracks()
    events: list[dict[str, Any]] = []

    def complete(name: str, category: str, start: int, end: int, tid: int, args: dict[str, Any]) -> None:
        times = {"ts": _us(start - origin), "dur": _us(end - start)}
        events.append({"name": name, "cat": category, "ph": "X", "pid": _PID, "tid": tid, **times, "args": args})

    for _, start, end, *rest in recording.steps.tolist():
        args = dict(zip(_STEP_FIELDS, rest, strict=True))
        kind = "prefill" if args["prefill_tokens"] else "decode"
        stream = args["stream"]
        tid = tracks.place(stream, f"{device}, stream {stream}" if stream else device, start, end)
        complete(f"{kind} step {args['step_id']}", "device", start, end, tid, args)
    for (_, start, end, number, ref), name in zip(recording.spans.tolist(), recording.names.tolist(), strict=True):
        phase = Phase(number).name.lower()
        tid = tracks.place(1_000 + number, f"host: {phase}", start, end)
        complete(name or phase, "host", start, end, tid, {"phase": phase, "ref": ref, "name": name})
    for track, rows in ((_LAG_TRACK, recording.lags), (_RUNNABLE_TRACK, recording.runnable)):
        for _, at, value in rows.tolist():
            shown = value / 1e6 if track == _LAG_TRACK else value
            events.append({"name": track, "ph": "C", "pid": _PID, "ts": _us(at - origin), "args": {"value": shown}})
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "origin_ns": origin,
            "complete_from_ns": recording.complete_from,
            "device": device,
            "source": source,
        },
        "traceEvents": tracks.metadata() + events,
    }


def load(path: str | PathLike[str]) -> tuple[Recording, str, str]:
    """(recording, device, source) from a file that `save` wrote."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise InvalidRequestError("path", os.fspath(path), f"not a JSON file: {error}") from error
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise InvalidRequestError("path", os.fspath(path), "not a trace that Timeline.save wrote")
    try:
        return from_dict(data), str(other["device"]), str(other["source"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"a damaged trace ({type(error).__name__}: {error}); save it again"
        raise InvalidRequestError("path", os.fspath(path), problem) from error


def from_dict(data: dict[str, Any]) -> Recording:
    """The inverse of `to_dict`."""
    origin = data["otherData"]["origin_ns"]
    spans: list[tuple[int, ...]] = []
    names: list[str] = []
    steps: list[tuple[int, ...]] = []
    lags: list[tuple[int, ...]] = []
    runnable: list[tuple[int, ...]] = []
    for event in data["traceEvents"]:
        if event["ph"] == "M":
            continue
        start, args = origin + _ns(event["ts"]), event["args"]
        if event["ph"] == "C":
            rows, scale = (lags, 1e6) if event["name"] == _LAG_TRACK else (runnable, 1)
            rows.append((len(rows) + 1, start, round(args["value"] * scale)))
            continue
        end = start + _ns(event["dur"])
        if event["cat"] == "device":
            steps.append((len(steps) + 1, start, end, *(args[name] for name in _STEP_FIELDS)))
        else:
            spans.append((len(spans) + 1, start, end, Phase[args["phase"].upper()], args["ref"]))
            names.append(str(args["name"]))
    shown = np.full(len(names), "", np.object_)
    shown[:] = names
    return Recording(
        np.array(spans, SPAN),
        shown,
        np.array(steps, STEP),
        np.array(lags, LAG),
        np.array(runnable, RUNNABLE),
        int(data["otherData"]["complete_from_ns"]),
    )


class _Tracks:
    """Gives spans tracks so that no two on one overlap: viewers drop or misdraw those that do."""

    def __init__(self) -> None:
        self._ends: dict[int, list[int]] = {}  # of each kind's tracks: where the last span on it ends
        self._titles: dict[int, str] = {}

    def place(self, kind: int, title: str, start: int, end: int) -> int:
        ends = self._ends.setdefault(kind, [])
        lane = next((lane for lane, reached in enumerate(ends) if reached <= start), len(ends))
        if lane == len(ends):
            ends.append(end)
            self._titles[self._tid(kind, lane)] = title if lane == 0 else f"{title} ({lane + 1})"
        ends[lane] = end
        return self._tid(kind, lane)

    def metadata(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": "interactive_infer"}}
        ]
        for tid, title in sorted(self._titles.items()):
            for name, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": tid})):
                events.append({"name": name, "ph": "M", "pid": _PID, "tid": tid, "args": args})
        return events

    @staticmethod
    def _tid(kind: int, lane: int) -> int:
        return 1 + kind * 1_000 + lane


def _arrays(recording: Recording) -> tuple[Records, ...]:
    return recording.spans, recording.steps, recording.lags, recording.runnable


def _us(ns: int) -> float:
    return ns / 1_000


def _ns(us: float) -> int:
    return round(us * 1_000)
