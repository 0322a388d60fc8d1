"""Spans on one clock, in ring buffers: what the host did, what the device did, how late the loop was.

Every time is an integer of nanoseconds on `time.perf_counter_ns`.
"""

from __future__ import annotations

import gc
import itertools
import struct
import time
import weakref
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from interactive_infer.errors import InvalidRequestError

Records = NDArray[Any]  # a one-dimensional structured array of one of the dtypes below


class Phase(IntEnum):
    """What a host span is. PLAN to PUBLISH are the engine's work on the host; AWAIT is the lack of it."""

    PLAN = 0
    LAUNCH = 1
    COMMIT = 2
    DETOKENIZE = 3
    PUBLISH = 4
    LOAD = 5
    CAPTURE = 6
    AWAIT = 7
    CELL = 8
    GC = 9
    CALLBACK = 10
    USER = 11


# Field by field the rows of the four rings, all int64. `number` counts a ring's records from 1 (0: never
# written).
SPAN = np.dtype([(name, np.int64) for name in ("number", "start", "end", "phase", "ref")])
STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "number", "start", "end", "step_id", "batch_size", "tokens", "prefill_tokens", "sampled", "graph",
            "stream"
        )
    ]
)  # fmt: skip
LAG = np.dtype([(name, np.int64) for name in ("number", "at", "lag")])
RUNNABLE = np.dtype([(name, np.int64) for name in ("number", "at", "count")])


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorder's content at one moment: structured arrays in the order of recording, fields as in their
    dtypes.

    spans: SPAN; `ref` is the step's number for PLAN, LAUNCH, COMMIT and AWAIT, the execution count for CELL,
        the generation (0 to 2) for GC.
    names: object array of str, one a span, "" where it has none.
    steps: STEP; see `Recorder.step`.
    lags: LAG; a callback that ran at `at` had been due `lag` ns earlier.
    runnable: RUNNABLE; from `at` on, `count` sequences could run.
    complete_from: ns; records that ended before may have been overwritten by newer ones (0: nothing was).
    """

    spans: Records
    names: NDArray[np.object_]
    steps: Records
    lags: Records
    runnable: Records
    complete_from: int = 0

    def __eq__(self, other: object) -> bool:
        """Equal when every record is, in the same order; numbers, which only tell the order, are left out."""
        if not isinstance(other, Recording):
            return NotImplemented
        pairs = (
            (self.spans, other.spans),
            (self.steps, other.steps),
            (self.lags, other.lags),
            (self.runnable, other.runnable),
        )
        return (
            self.complete_from == other.complete_from
            and np.array_equal(self.names, other.names)
            and all(
                len(mine) == len(theirs) and all((mine[name] == theirs[name]).all() for name in mine.dtype.fields or ())
                for mine, theirs in ((_without_number(mine), _without_number(theirs)) for mine, theirs in pairs)
            )
        )


def _without_number(records: Records) -> Records:
    return records[[name for name in records.dtype.fields or () if name != "number"]]


class _Ring:
    """The newest `capacity` rows of int64.

    Lock-free, any number of writers: a write is two C calls, taking a number and packing a row, each atomic
    under the GIL, and no two writers hold the same number. So a garbage collection or a signal that records
    in the middle of another record neither deadlocks nor overwrites it, which a lock could not promise.
    Readers copy the whole buffer in one C call.
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self.dtype = dtype
        self.capacity = capacity
        self._row = struct.Struct(f"={dtype.itemsize // 8}q")
        self._buffer = bytearray(dtype.itemsize * capacity)
        self._numbers = itertools.count(1)

    def write(self, *values: int) -> int:
        number = next(self._numbers)
        self._row.pack_into(self._buffer, number % self.capacity * self._row.size, number, *values)
        return number

    def read(self) -> Records:
        rows = np.frombuffer(bytes(self._buffer), self.dtype)
        rows = rows[rows["number"] > 0]
        return rows[np.argsort(rows["number"])]


class Recorder:
    """Always on, of fixed size, cheap (under 2 µs a span), callable from any thread and from callbacks.

    What does not fit pushes the oldest out; `Recording.complete_from` tells from when on nothing is missing.
    Tokens are not recorded one by one: steps say how many there were.

    Args:
        spans, steps, lags, edges: how many host spans, device steps, lag samples and changes of the number of
            runnable sequences are kept (40, 80, 24 and 24 bytes each).
    """

    def __init__(self, *, spans: int = 65_536, steps: int = 16_384, lags: int = 16_384, edges: int = 16_384) -> None:
        for argument, value in {"spans": spans, "steps": steps, "lags": lags, "edges": edges}.items():
            if value < 1:
                raise InvalidRequestError(argument, value, "a ring buffer holds at least one record")
        self._sizes = {"spans": spans, "steps": steps, "lags": lags, "edges": edges}
        self._count = 0
        self._complete_from = 0
        self._reset()

    def record(self, phase: Phase, start_ns: int, end_ns: int, ref: int = 0, name: str | None = None) -> None:
        """Add a host span; `ref` and `name` say which step, cell or callback (see `Recording.spans`)."""
        if end_ns < start_ns:
            raise InvalidRequestError("end_ns", end_ns, f"a span ends at or after its start ({start_ns})")
        spans = self._spans
        number = spans.write(start_ns, end_ns, phase, ref)
        if name is not None:
            self._names[number % spans.capacity] = (number, name)

    def span(self, phase: Phase | str, ref: int = 0) -> Span:
        """`with recorder.span(Phase.PLAN, step):` records the block; a string names a span of the user's own.

        The block is recorded also when it raises.
        """
        if isinstance(phase, str):
            return Span(self, Phase.USER, ref, phase)
        return Span(self, phase, ref, None)

    def step(
        self,
        start_ns: int,
        end_ns: int,
        *,
        step_id: int,
        batch_size: int,
        tokens: int,
        prefill_tokens: int,
        sampled: int | None = None,
        graph: bool = False,
        stream: int = 0,
    ) -> None:
        """Add one step of the device, as its own clock (placed on `perf_counter_ns`) saw it.

        `tokens` went through the forward pass, `prefill_tokens` of them from prompts; `sampled` token ids
        were drawn (default: one for every token that was not prefill). `graph`: replayed from a CUDA graph.
        """
        if end_ns < start_ns:
            raise InvalidRequestError("end_ns", end_ns, f"a step ends at or after its start ({start_ns})")
        if sampled is None:
            sampled = tokens - prefill_tokens
        self._steps.write(start_ns, end_ns, step_id, batch_size, tokens, prefill_tokens, sampled, graph, stream)

    def lag(self, at_ns: int, lag_ns: int) -> None:
        """A heartbeat that ran at `at_ns` had been due `lag_ns` earlier."""
        self._lags.write(at_ns, lag_ns)

    def runnable(self, at_ns: int, count: int) -> None:
        """From `at_ns` on `count` sequences can run. Calls that change nothing are not recorded.

        Belongs to one thread at a time (the engine's driver), in order of time.
        """
        if count != self._count:
            self._count = count
            self._edges.write(at_ns, count)

    def watch_gc(self, threshold_ns: int = 100_000) -> GCWatch:
        """Record garbage collections of at least `threshold_ns` until the handle is closed or the recorder is
        gone.

        Shorter ones (the youngest generation's, hundreds a second) would only push other spans out.
        """
        return GCWatch(self, threshold_ns)

    def snapshot(self) -> Recording:
        """What is recorded now; a copy, which later records do not change."""
        spans, steps, lags, edges = (ring.read() for ring in (self._spans, self._steps, self._lags, self._edges))
        named = dict(label for label in self._names.copy() if label is not None)
        names = np.full(len(spans), "", np.object_)
        # A slot keeps its last name when a nameless span takes it, and may be a newer one's by now.
        numbers = np.fromiter(named, np.int64, len(named))
        kept = np.isin(spans["number"], numbers)
        names[kept] = [named[number] for number in spans["number"][kept].tolist()]
        oldest = [
            int(records[time_field][0])
            for records, time_field in ((spans, "end"), (steps, "end"), (edges, "at"))
            if len(records) and records["number"][0] > 1
        ]
        return Recording(spans, names, steps, lags, edges, max([self._complete_from, *oldest]))

    def clear(self) -> None:
        """Forget everything but how many sequences are runnable."""
        running, self._count = self._count, 0
        self._complete_from = 0
        self._reset()
        self.runnable(time.perf_counter_ns(), running)

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """A recorder that holds `recording` (with room for at least the usual number of records)."""
        usual = cls()._sizes
        held = (recording.spans, recording.steps, recording.lags, recording.runnable)
        recorder = cls(**{key: max(usual[key], len(rows)) for key, rows in zip(usual, held, strict=True)})
        rings = (recorder._spans, recorder._steps, recorder._lags, recorder._edges)
        for ring, rows in zip(rings, held, strict=True):
            for row in rows.tolist():
                ring.write(*row[1:])
        for number, name in enumerate(recording.names.tolist(), start=1):
            if name:
                recorder._names[number % recorder._spans.capacity] = (number, name)
        recorder._complete_from = recording.complete_from
        if len(recording.runnable):
            recorder._count = int(recording.runnable["count"][-1])
        return recorder

    def _reset(self) -> None:
        # New rings, not emptied ones: a writer in the middle of a record finishes it in the old one.
        self._names: list[tuple[int, str] | None] = [None] * self._sizes["spans"]
        self._spans = _Ring(SPAN, self._sizes["spans"])
        self._steps = _Ring(STEP, self._sizes["steps"])
        self._lags = _Ring(LAG, self._sizes["lags"])
        self._edges = _Ring(RUNNABLE, self._sizes["edges"])


class Span:
    """The context manager of `Recorder.span`; good for one `with`."""

    __slots__ = ("_name", "_phase", "_recorder", "_ref", "_start")

    def __init__(self, recorder: Recorder, phase: Phase, ref: int, name: str | None) -> None:
        self._recorder = recorder
        self._phase = phase
        self._ref = ref
        self._name = name

    def __enter__(self) -> Self:
        self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.record(self._phase, self._start, time.perf_counter_ns(), self._ref, self._name)


class GCWatch:
    """Hears garbage collections for a recorder it does not keep alive; `close()` it, or use a `with`."""

    def __init__(self, recorder: Recorder, threshold_ns: int) -> None:
        hear = self._hear
        self._recorder = weakref.ref(recorder)
        self._threshold_ns = threshold_ns
        self._start = 0
        gc.callbacks.append(hear)
        self._stop = weakref.finalize(recorder, gc.callbacks.remove, hear)
        self._stop.atexit = False

    def close(self) -> None:
        """Stop hearing. Again: nothing happens."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, moment: str, info: dict[str, int]) -> None:
        now = time.perf_counter_ns()
        if moment == "start":
            self._start = now
        elif self._start and now - self._start >= self._threshold_ns:
            recorder = self._recorder()
            if recorder is not None:
                recorder.record(Phase.GC, self._start, now, info["generation"])
