"""Chrome trace-event JSON, which ui.perfetto.dev opens: out, and back in.

Format: "Trace Event Format" (Google, 2016): complete events ("X") on named tracks, counters ("C"), instants ("i"),
flows ("s", "f") from a launch to its step on the device, metadata ("M"). Times in the file are microseconds since
`otherData.origin_ns`, with three decimals, so no nanosecond is lost.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.analysis import FURTHEST_NS
from interactive_infer.timeline.intervals import intervals
from interactive_infer.timeline.profiler import from_profile, is_profile
from interactive_infer.timeline.recorder import Phase, Work
from interactive_infer.timeline.recording import (
    ASKED,
    LAG,
    RUNNABLE,
    SPAN,
    STEP,
    WORK,
    Recording,
    batch_bytes,
    batch_numbers,
)
from interactive_infer.timeline.summary import device_name, profiled_source

FORMAT = "interactive_infer timeline 2"
_HOST = 1
_STEP_FIELDS = STEP.names[3:] if STEP.names else ()
_LAG_TRACK, _RUNNABLE_TRACK = "loop lag (ms)", "runnable sequences"


def save(recording: Recording, path: str | PathLike[str], *, device: str, source: str) -> None:
    """Write `recording`; the file at `path`, or where a link there leads, is replaced only once the new one is whole.

    What is no file (a device, a pipe) is written to. Errors are the file system's, of `path`.
    """
    target = Path(os.path.realpath(_checked(path)))
    text = json.dumps(to_dict(recording, device=device, source=source), separators=(",", ":"))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(target: Path, text: str) -> None:
    part = target.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _checked(path: str | PathLike[str]) -> str:
    name = os.fspath(path) if isinstance(path, str | PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidRequestError("path", path, "give the path of a file, a string or a Path")
    return name


def to_dict(recording: Recording, *, device: str = "device", source: str = "") -> dict[str, Any]:
    """The trace as a JSON object: a process for the host and for each device, a track for each host phase and each
    stream, more where spans of one overlap."""
    origin = _origin(recording)
    tracks = _Tracks()
    events: list[dict[str, Any]] = []

    def event(phase: str, name: str, category: str, at: int, place: tuple[int, int], **more: Any) -> None:
        pid, tid = place
        events.append(
            {"name": name, "cat": category, "ph": phase, "pid": pid, "tid": tid, "ts": _us(at - origin), **more}
        )

    launches: dict[int, tuple[int, tuple[int, int]]] = {}
    for (_, start, end, number, ref), name in zip(recording.spans.tolist(), recording.names.tolist(), strict=True):
        phase = Phase(number)
        shown = phase.name.lower()
        place = tracks.place(_HOST, number, f"host: {shown}", start, end)
        event(
            "X",
            name or shown,
            "host",
            start,
            place,
            dur=_us(end - start),
            args={"phase": shown, "ref": ref, "name": name},
        )
        if phase is Phase.LAUNCH:
            launches[ref] = start, place
    generations, drawn, sizes = batch_numbers(recording.batches)
    borders = np.cumsum(sizes)
    for (_, start, end, *rest), to, size in zip(
        recording.steps.tolist(), borders.tolist(), sizes.tolist(), strict=True
    ):
        args = dict(zip(_STEP_FIELDS, rest, strict=True))
        step_id, index, stream = args["step_id"], args["device"], args["stream"]
        title = f"{device}, stream {stream}" if stream else device
        place = tracks.place(_device(index), stream, title, start, end)
        kind = "prefill" if args["prefill_tokens"] else "decode"
        args["generations"] = generations[to - size : to].tolist()
        args["drawn"] = np.maximum(drawn[to - size : to] + step_id, -1).tolist()
        event("X", f"{kind} step {step_id}", "device", start, place, dur=_us(end - start), args=args)
        if step_id in launches:
            at, launch = launches[step_id]
            event("s", "launch", "launch", at, launch, id=step_id)
            event("f", "launch", "launch", start, place, id=step_id, bp="e")
    for (_, start, end, number, stream, index), name in zip(
        recording.work.tolist(), recording.work_names.tolist(), strict=True
    ):
        work = Work(number)
        title = {Work.USER: "user spans", Work.KERNEL: "kernels", Work.OTHER: "other engines"}[work]
        place = tracks.place(_device(index), 1_000 * (number + 1) + stream, f"{title}, stream {stream}", start, end)
        args = {"kind": work.name.lower(), "stream": stream, "device": index}
        event("X", name, "work", start, place, dur=_us(end - start), args=args)
    for _, at, generation, first in recording.asked.tolist():
        args = {"generation": generation, "first": first}
        event("i", f"generation {generation} asked for", "asked", at, (_HOST, 0), s="p", args=args)
    for track, rows in ((_LAG_TRACK, recording.lags), (_RUNNABLE_TRACK, recording.runnable)):
        for _, at, value in rows.tolist():
            shown = value / 1e6 if track == _LAG_TRACK else value
            event("C", track, "counter", at, (_HOST, 0), args={"value": shown})
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "origin_ns": origin,
            "complete_from_ns": recording.complete_from,
            "clock_error_ns": recording.clock_error_ns,
            "profiled_ns": recording.profiled.tolist(),
            "device": device,
            "source": source,
        },
        "traceEvents": tracks.metadata() + events,
    }


def load(path: str | PathLike[str]) -> tuple[Recording, str, str]:
    """(recording, device, source) from a file that `save` wrote, or torch.profiler (also gzipped)."""
    raw = Path(_checked(path)).read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:  # not JSON, not UTF-8, not gzip
        raise InvalidRequestError("path", os.fspath(path), f"not a JSON file: {error}") from error
    try:
        if is_profile(data):
            recording = from_profile(data)
            if len(recording.work):
                _check(recording)
                return recording, "GPU" if (recording.work["device"] >= 0).any() else "CPU", profiled_source(recording)
            raise InvalidRequestError("path", os.fspath(path), "a trace without kernels or operators")
        other = data.get("otherData") if isinstance(data, dict) else None
        if not isinstance(other, dict) or other.get("format") != FORMAT:
            raise InvalidRequestError("path", os.fspath(path), "not a trace of Timeline.save or torch.profiler")
        recording = from_dict(data)
        _check(recording)
        return recording, str(other["device"]), str(other["source"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        problem = f"a damaged trace ({type(error).__name__}: {error}); save it again"
        raise InvalidRequestError("path", os.fspath(path), problem) from error


def _check(recording: Recording) -> None:
    """Raises ValueError for what no recorder holds."""
    spans = [intervals(rows) for rows in (recording.spans, recording.steps, recording.work)]
    if any((span[:, 1] < span[:, 0]).any() for span in (*spans, recording.profiled)):
        raise ValueError("a span ends before its start")
    moments = [rows["at"] for rows in (recording.lags, recording.runnable, recording.asked)]
    times = np.concatenate([*(span.ravel() for span in (*spans, recording.profiled)), *moments])
    if ((times <= -FURTHEST_NS) | (times >= FURTHEST_NS)).any():
        raise ValueError("a time beyond 2**62 ns")


def from_dict(data: dict[str, Any]) -> Recording:
    """The inverse of `to_dict`."""
    origin = data["otherData"]["origin_ns"]
    rows: dict[str, list[tuple[int, ...]]] = {
        kind: [] for kind in ("host", "device", "work", "asked", _LAG_TRACK, _RUNNABLE_TRACK)
    }
    names: list[str] = []
    work_names: list[str] = []
    batches: list[bytes] = []
    for event in data["traceEvents"]:
        if event["ph"] not in ("X", "C", "i"):
            continue
        start, args, kind = origin + _ns(event["ts"]), event["args"], event["cat"]
        end = start + _ns(event.get("dur", 0))
        if event["ph"] == "C":
            kind = event["name"]
            held: tuple[int, ...] = start, round(args["value"] * (1e6 if kind == _LAG_TRACK else 1))
        elif kind == "asked":
            held = start, args["generation"], args["first"]
        elif kind == "device":
            held = start, end, *(args[name] for name in _STEP_FIELDS)
            if len(args["generations"]) != len(args["drawn"]):
                raise ValueError("a step with as many generations as drawn tokens was expected")
            batches.append(batch_bytes(args["generations"], args["drawn"], args["step_id"]))
        elif kind == "work":
            held = start, end, Work[args["kind"].upper()], args["stream"], args["device"]
            work_names.append(str(event["name"]))
        else:
            held = start, end, Phase[args["phase"].upper()], args["ref"]
            names.append(str(args["name"]))
        rows[kind].append((len(rows[kind]) + 1, *held))
    return Recording(
        np.array(rows["host"], SPAN),
        _objects(names),
        np.array(rows["device"], STEP),
        _objects(batches),
        np.array(rows["work"], WORK),
        _objects(work_names),
        np.array(rows[_LAG_TRACK], LAG),
        np.array(rows[_RUNNABLE_TRACK], RUNNABLE),
        np.array(rows["asked"], ASKED),
        np.array(data["otherData"]["profiled_ns"], np.int64).reshape(-1, 2),
        int(data["otherData"]["complete_from_ns"]),
        int(data["otherData"]["clock_error_ns"]),
    )


def _objects(values: list[Any]) -> np.ndarray[Any, Any]:
    objects = np.empty(len(values), np.object_)
    objects[:] = values
    return objects


class _Tracks:
    """Gives spans tracks so that no two on one overlap: viewers drop or misdraw those that do."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], list[int]] = {}  # of each kind's tracks: where the last span on it ends
        self._titles: dict[tuple[int, int], str] = {}

    def place(self, pid: int, kind: int, title: str, start: int, end: int) -> tuple[int, int]:
        """(pid, tid)"""
        ends = self._ends.setdefault((pid, kind), [])
        lane = next((lane for lane, reached in enumerate(ends) if reached <= start), len(ends))
        place = pid, 1 + (100_000 * pid + kind) * 1_000 + lane
        if lane == len(ends):
            ends.append(end)
            self._titles[place] = title if lane == 0 else f"{title} ({lane + 1})"
        ends[lane] = end
        return place

    def metadata(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for pid in sorted({_HOST, *(pid for pid, _ in self._titles)}):
            title = "host" if pid == _HOST else device_name(pid - _device(0))
            for name, args in (("process_name", {"name": title}), ("process_sort_index", {"sort_index": -pid})):
                events.append({"name": name, "ph": "M", "pid": pid, "args": args})
        for (pid, tid), title in sorted(self._titles.items()):
            for name, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": tid})):
                events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})
        return events


def _device(index: int) -> int:
    """A device's process."""
    return _HOST + 2 + index


def _origin(recording: Recording) -> int:
    starts = [recording.spans["start"], recording.steps["start"], recording.work["start"]]
    starts += [recording.lags["at"], recording.runnable["at"], recording.asked["at"]]
    return min((int(at.min()) for at in starts if len(at)), default=0)


def _us(ns: int) -> float:
    return ns / 1_000


def _ns(us: float) -> int:
    return round(us * 1_000)
