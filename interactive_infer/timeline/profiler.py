"""torch.profiler's kernels on the timeline's clock: of a window that is profiled now, or of a trace made elsewhere."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.analysis import Window
from interactive_infer.timeline.intervals import Intervals, intervals
from interactive_infer.timeline.recorder import CPU, Phase, Recorder, Work
from interactive_infer.timeline.recording import SPAN, WORK, Recording

# Not among them: synchronisation records and annotations, which are no work, and the runtime's calls, the host's.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_CLOCK = "interactive_infer clock"
_MARKS = 8
_POLL_S = 0.01
_session = threading.Lock()
"""Held while a profile runs, until its trace is written: torch has one profiler a process, and a second crashes it."""


class Profile:
    """A window in which torch.profiler sees every kernel, those of replayed CUDA graphs too.

    `async with timeline.profile(steps=50):` ends with the 50th step that is recorded in it, or with the block if that
    comes first; `with timeline.profile():`, which takes no `steps`, with the block. Then the kernels are on the
    timeline (on a CPU: the outermost operators), and `window` is the stretch in which none is missing: a RuntimeWarning
    says where kernels of replayed steps are, and busy shares stay those of steps.

    Starting and stopping the profiler holds the loop, the first start on a card for seconds. So does reading what it
    saw, though in a thread: parsing JSON keeps the GIL, about a second for 150,000 kernels. While it runs, launches are
    slower.

    torch has one profiler a process. Raises InvalidRequestError where one is running (another profile, or a
    `torch.profiler.profile` of the user's), and at the end of the block where one was run inside of it, which ends this
    one. One whose schedule still waits or warms up cannot be seen: torch crashes when it begins.

    The profiler's clock is placed on `time.perf_counter_ns` by marks, each made between two readings, at the beginning
    and at the end.
    """

    def __init__(self, recorder: Recorder, steps: int | None) -> None:
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise InvalidRequestError(
                "steps", steps, "give the number of steps to profile, or None for the whole block"
            )
        self.window: Window | None = None
        """ns on `time.perf_counter_ns`; None until the block has ended."""
        self.num_kernels = 0
        self._recorder = recorder
        self._steps = steps
        self._profiler: Any = None
        self._trace = b""
        self._readings: list[tuple[int, int]] = []
        self._ended_ns = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether the window has ended: with the steps that were asked for, or the block."""
        return self._ended_ns > 0

    def __repr__(self) -> str:
        steps = "its block" if self._steps is None else f"{self._steps} steps"
        return f"<Profile of {steps}>"

    def __enter__(self) -> Self:
        if self._steps is not None:
            problem = "only `async with` can end it with a step; leave `steps` out to profile the whole block"
            raise InvalidRequestError("steps", self._steps, problem)
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._take()

    async def __aenter__(self) -> Self:
        self._start()
        if self._steps is not None:
            self._watch = asyncio.create_task(self._until(self._steps))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None and not self._watch.cancel() and not self._watch.cancelled():
            self._watch.result()  # raises what ending it there failed with
        self._stop()
        await asyncio.to_thread(self._take)

    async def _until(self, steps: int) -> None:
        while self._recorder.num_steps_after(self._begun_ns) < steps:
            await asyncio.sleep(_POLL_S)
        self._stop()

    def _start(self) -> None:
        if self._readings:
            raise InvalidRequestError("profile", self, "it has begun already; each block takes a profile of its own")
        is_free = _session.acquire(blocking=False)
        if not is_free or _is_profiling():
            if is_free:
                _session.release()
            problem = "a profile is already running in this process, and torch has one at a time; end that first"
            raise InvalidRequestError("profile", self, problem)
        try:
            self._begin()
        except BaseException:  # an interrupt too, for which a card's first start has seconds
            try:
                self._end()
            finally:
                _session.release()
            raise

    def _begin(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import profiler

        # Which spans of torch a card's profile keeps is no matter here, and each costs time; the CPU has nothing else.
        self._on_card = self._recorder.device != CPU and torch.cuda.is_available()
        # Not torch.profiler's wrapper: in 2.11 it warns that it forgets earlier cycles, of which there are none, and
        # when told to keep them it makes an object of every event, seconds in which the loop is held.
        self._profiler = profiler.profile(
            use_device="cuda" if self._on_card else None,
            use_kineto=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=not self._on_card),
        )
        self._profiler.__enter__()
        self._mark()
        self._begun_ns = time.perf_counter_ns()

    def _stop(self) -> None:
        """End the profiler, and have it write what it saw: that keeps the GIL too."""
        if self.done:
            return
        self._ended_ns = time.perf_counter_ns()
        try:
            try:
                self._mark()
            finally:
                is_ours = self._end()
            if not is_ours:  # it holds nothing, and torch crashes when nothing is written
                problem = "another profiler, run inside of the block, has ended this one: run one after the other"
                raise InvalidRequestError("profile", self, problem)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                self._profiler.export_chrome_trace(str(path))
                self._trace = path.read_bytes()
        finally:
            self._profiler = None
            _session.release()

    def _end(self) -> bool:
        """False where another profiler has ended this one."""
        if not _is_profiling():
            return False
        self._profiler.__exit__(None, None, None)
        return True

    def _mark(self) -> None:
        from torch.profiler import record_function

        for _ in range(_MARKS):
            before = time.perf_counter_ns()
            with record_function(_CLOCK):
                self._readings.append((before, time.perf_counter_ns()))

    def _take(self) -> None:
        """Put the kernels on the timeline."""
        data, self._trace = json.loads(self._trace), b""
        rows, names = _rows(_on_device(data) if self._on_card else _operators(data))
        starts = np.array([start for start, _, _ in _events(data, ("user_annotation",), _CLOCK)], np.int64)
        rows = _placed(rows, np.sort(starts), np.array(self._readings, np.int64))
        self.window = self._begun_ns, self._ended_ns
        inside = (rows["end"] > self._begun_ns) & (rows["start"] < self._ended_ns)
        self.num_kernels = int(inside.sum())
        others = int((self._recorder.snapshot().work["end"] > self._begun_ns).sum())  # the user's device spans
        self._recorder.make_room(self.num_kernels + others)
        for (_, start, end, _, stream, device), name in zip(rows[inside].tolist(), names[inside].tolist(), strict=True):
            self._recorder.work(start, end, name, kind=Work.KERNEL, stream=stream, device=device)
        steps = self._recorder.snapshot().steps
        replayed = steps[(steps["graph"] > 0) & (steps["start"] > self._begun_ns) & (steps["end"] < self._ended_ns)]
        if missing := _without_kernels(intervals(replayed), rows["start"], names):
            warnings.warn(
                f"torch.profiler has seen no kernel in {missing} of {len(replayed)} replayed steps, so busy shares "
                "stay those of steps. Graphs that were captured before the profiler's first use may be left out: run "
                "`with Timeline().profile(): pass` once before Engine.load",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._recorder.profiled(*self.window)


def _is_profiling() -> bool:
    """Whether torch has a profiler running, begun by any thread (the one flag) or by this one (the other)."""
    import torch

    return torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


def _without_kernels(steps: Intervals, starts: NDArray[np.int64], names: NDArray[np.object_]) -> int:
    """How many steps no kernel started in; copies are none. `starts` sorted."""
    is_kernel = np.array([not name.lower().startswith(("memcpy", "memset")) for name in names], bool)
    first, last = np.searchsorted(starts[is_kernel], steps).T
    return int((first == last).sum())


def is_profile(data: Any) -> bool:
    """Whether a JSON file is a trace of torch.profiler's."""
    return isinstance(data, dict) and isinstance(data.get("traceEvents"), list) and "otherData" not in data


def from_profile(data: Mapping[str, Any]) -> Recording:
    """A trace of torch.profiler's as a recording: kernels (without any, the outermost CPU operators) as work of
    devices, `record_function` and step annotations as spans of the user's. Its clock is the profiler's own."""
    rows, names = kernels_of(data)
    annotations = [*_events(data, ("user_annotation",))]
    spans = np.zeros(len(annotations), SPAN)
    labels = np.empty(len(annotations), np.object_)
    for at, (start, end, event) in enumerate(annotations):
        spans[at] = (at + 1, start, end, Phase.USER, 0)
        labels[at] = str(event["name"])
    whole = [(start, end) for start, end, _ in _events(data, ("Trace",))]
    if not whole and len(rows):
        whole = [(int(rows["start"].min()), int(rows["end"].max()))]
    return Recording(
        spans=spans,
        names=labels,
        work=rows,
        work_names=names,
        profiled=np.array(whole, np.int64).reshape(-1, 2),
    )


_Found = set[tuple[int, int, int, int, str]]
"""(start, end, stream, device, name): what is there twice counts once."""


def kernels_of(data: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[np.object_]]:
    """(WORK, names) of what ran on cards, by start; without any, of CPU operators."""
    return _rows(_on_device(data) or _operators(data))


def _rows(found: _Found) -> tuple[NDArray[Any], NDArray[np.object_]]:
    ordered = sorted(found)
    rows, names = np.zeros(len(ordered), WORK), np.empty(len(ordered), np.object_)
    for at, (start, end, stream, device, name) in enumerate(ordered):
        rows[at], names[at] = (at + 1, start, end, Work.KERNEL, stream, device), name
    return rows, names


def _on_device(data: Mapping[str, Any]) -> _Found:
    return {
        (start, end, int(event["args"].get("stream", 0)), int(event["args"].get("device", 0)), str(event["name"]))
        for start, end, event in _events(data, _ON_DEVICE)
    }


def _operators(data: Mapping[str, Any]) -> _Found:
    """The outermost operators of each thread."""
    found: _Found = set()
    threads: dict[Any, tuple[int, int]] = {}  # by thread: its number, and the end of its last outermost operator
    for start, end, event in sorted(_events(data, ("cpu_op",)), key=lambda each: (each[0], -each[1])):
        number, reached = threads.get(event.get("tid"), (len(threads), start))
        if start >= reached:
            found.add((start, end, number, CPU, str(event["name"])))
            threads[event.get("tid")] = number, end
    return found


def _events(
    data: Mapping[str, Any], categories: tuple[str, ...], name: str | None = None
) -> list[tuple[int, int, Any]]:
    """(start, end, event) of complete events, in ns of the profiler's clock."""
    base = int(data.get("baseTimeNanoseconds", 0))
    found = []
    for event in data["traceEvents"]:
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            continue
        if (category in categories or category.lower() in categories) and name in (None, event["name"]):
            start = base + round(float(event["ts"]) * 1_000)
            found.append((start, start + round(float(event.get("dur", 0)) * 1_000), event))
    return found


def _placed(rows: NDArray[Any], starts: NDArray[np.int64], readings: Intervals) -> NDArray[Any]:
    """`rows` on the host's clock: mark i began at `starts[i]` there and between `readings[i]` here."""
    if len(starts) != len(readings):
        raise RuntimeError(f"torch.profiler has {len(starts)} of {len(readings)} marks: its trace cannot be placed")
    width = readings[:, 1] - readings[:, 0]
    half = len(starts) // 2
    first, last = int(np.argmin(width[:half])), half + int(np.argmin(width[half:]))
    middle, begun = (readings[:, 0] + width // 2)[[first, last]], starts[[first, last]]
    offset, later = (middle - begun).tolist()
    placed = rows.copy()
    for column in ("start", "end"):
        # In whole numbers as far as it goes: a float of so many ns since 1970 is off by hundreds.
        drifted = np.interp(placed[column] - begun[0], begun - begun[0], [0.0, later - offset])
        placed[column] += offset + np.rint(drifted).astype(np.int64)
    return placed
