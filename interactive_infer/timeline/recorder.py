"""Spans on one clock, in ring buffers: what the host did, what the device did, how late the loop was.

Every time is an integer of nanoseconds on `time.perf_counter_ns`.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType
from typing import Self

import numpy as np

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.recording import (
    ASKED,
    LAG,
    RUNNABLE,
    SPAN,
    STEP,
    WORK,
    Recording,
    Records,
    batch_bytes,
)
from interactive_infer.timeline.ring import Ring


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
    OTHER = 12
    """What another engine did on the host (`beside`)."""


class Work(IntEnum):
    """What ran on a device besides the engine's steps."""

    USER = 0
    """Between the two events of `timeline.span(name, device=True)`."""
    KERNEL = 1
    """A kernel or copy that torch.profiler saw; on a CPU an operator."""
    OTHER = 2
    """A step of another engine on the same device (`beside`)."""


CPU = -1
"""In place of a card's index."""


class Recorder:
    """Always on, of fixed size, cheap (under 2 µs a span), callable from any thread and from callbacks.

    What does not fit pushes the oldest out; `Recording.complete_from` tells from when on nothing is missing. Tokens are
    not recorded one by one: a step says which generations were in it and which token each drew, and consecutive steps
    of the same generations share that entry.

    Args:
        spans, steps, work, lags, edges, asked: how many host spans, device steps, other work on devices, lag samples,
            changes of the number of runnable sequences and requests are kept (24 to 96 bytes each).
        device: the index of the card that steps run on; CPU for the host itself.
    """

    def __init__(
        self,
        *,
        spans: int = 65_536,
        steps: int = 16_384,
        work: int = 32_768,
        lags: int = 16_384,
        edges: int = 16_384,
        asked: int = 4_096,
        device: int = 0,
    ) -> None:
        sizes = {"spans": spans, "steps": steps, "work": work, "lags": lags, "edges": edges, "asked": asked}
        for argument, value in sizes.items():
            if value < 1:
                raise InvalidRequestError(argument, value, "a ring buffer holds at least one record")
        self.device = device
        self._spans = Ring(SPAN, spans)
        self._steps = Ring(STEP, steps)
        self._work = Ring(WORK, work)
        self._lags = Ring(LAG, lags)
        self._edges = Ring(RUNNABLE, edges)
        self._asked = Ring(ASKED, asked)
        self._profiled: list[tuple[int, int, int]] = []  # its start, end, and the number of its first kernel
        self._begun: dict[tuple[Phase, int], int] = {}
        self._batch = b""
        self._count = 0
        self._complete_from = 0

    def record(self, phase: Phase, start_ns: int, end_ns: int, ref: int = 0, name: str | None = None) -> None:
        """Add a host span; `ref` and `name` say which step, cell or callback (see `Recording.spans`)."""
        if end_ns < start_ns:
            raise InvalidRequestError("end_ns", end_ns, f"a span ends at or after its start ({start_ns})")
        self._spans.write(start_ns, end_ns, phase, ref, label=name)

    def begin(self, phase: Phase, start_ns: int, ref: int = 0) -> None:
        """A long span has begun (a cell): until `end` it is in every snapshot as one that ends just then."""
        self._begun = {**self._begun, (phase, ref): start_ns}

    def end(self, phase: Phase, end_ns: int, ref: int = 0) -> None:
        """It has ended. One that was not begun, or has ended: nothing happens."""
        start_ns = self._begun.get((phase, ref))
        if start_ns is not None:
            self._begun = {key: value for key, value in self._begun.items() if key != (phase, ref)}
            self.record(phase, start_ns, end_ns, ref)

    def span(self, phase: Phase | str, ref: int = 0, name: str | None = None) -> Span:
        """`with recorder.span(Phase.PLAN, step):` records the block; a string names a span of the user's own.

        The block is recorded also when it raises.
        """
        if isinstance(phase, str):
            return Span(self, Phase.USER, ref, phase)
        return Span(self, phase, ref, name)

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
        device: int | None = None,
        generations: Sequence[int] = (),
        drawn: Sequence[int] = (),
    ) -> None:
        """Add one step of the device, as its own clock (placed on `perf_counter_ns`) saw it.

        `tokens` went through the forward pass, `prefill_tokens` of them from prompts; `sampled` token ids were drawn
        (default: one for every token that was not prefill). `graph`: replayed from a CUDA graph. `generations` were in
        it, and each drew its token of the index in `drawn`, which is as long (-1: none). `device`: as in `Recorder`.
        """
        if end_ns < start_ns:
            raise InvalidRequestError("end_ns", end_ns, f"a step ends at or after its start ({start_ns})")
        if sampled is None:
            sampled = tokens - prefill_tokens
        batch = None
        if generations:
            # Less the step's number: while the same generations decode, one step's entry equals the one before.
            batch = batch_bytes(generations, drawn, step_id)
            if batch == self._batch:
                batch = self._batch
            else:
                self._batch = batch
        self._steps.write(
            start_ns,
            end_ns,
            step_id,
            batch_size,
            tokens,
            prefill_tokens,
            sampled,
            graph,
            stream,
            self.device if device is None else device,
            label=batch,
        )

    def work(
        self, start_ns: int, end_ns: int, name: str, *, kind: Work = Work.USER, stream: int = 0, device: int = 0
    ) -> None:
        """Add what ran on a device and is no step: it makes the device busy too."""
        if end_ns < start_ns:
            raise InvalidRequestError("end_ns", end_ns, f"work ends at or after its start ({start_ns})")
        self._work.write(start_ns, end_ns, kind, stream, device, label=name)

    def profiled(self, start_ns: int, end_ns: int) -> None:
        """Say that every kernel of this stretch has been added (`work`, of the kind KERNEL)."""
        work = self._work.read()
        inside = (work["kind"] == Work.KERNEL) & (work["end"] > start_ns) & (work["start"] < end_ns)
        first = int(work["number"][inside].min(initial=2**62))  # without any: none can be pushed out
        if first > self._work.first and len(work) and first == work["number"][0]:
            first = 0  # some may have been by now
        self._profiled = [*self._profiled, (start_ns, end_ns, first)][-64:]

    def make_room(self, work: int) -> None:
        """Let so many records of work in at a time, which a profiled window may have; older ones may go, but for one,
        which shows that none of these has.

        What another thread adds at this very moment may be lost.
        """
        if work >= self._work.capacity:
            self._work = self._work.grown(work + 1)

    def asked(self, at_ns: int, generation: int, first: int = 0) -> None:
        """A generation was asked for at `at_ns`; the first token that it draws has the index `first`."""
        self._asked.write(at_ns, generation, first)

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
        """Record garbage collections of at least `threshold_ns` until the handle is closed or the recorder is gone.

        Shorter ones (the youngest generation's, hundreds a second) would only push other spans out.
        """
        return GCWatch(self, threshold_ns)

    def snapshot(self) -> Recording:
        """What is recorded now; a copy, which later records do not change."""
        rings = (self._spans, self._steps, self._work, self._lags, self._edges, self._asked)
        spans, steps, work, lags, edges, asked = (ring.read() for ring in rings)
        full = [
            int(rows[time_field][0])
            for ring, rows, time_field in (
                (self._spans, spans, "end"),
                (self._steps, steps, "end"),
                (self._edges, edges, "at"),
            )
            if len(rows) and rows["number"][0] > ring.first
        ]
        oldest, whole = self._work.first, 0
        if len(work) and work["number"][0] > oldest:
            oldest, whole = int(work["number"][0]), int(work["end"][0])
        if (work["kind"] != Work.KERNEL).any():  # it makes the device busy outside of profiled windows too
            full.append(whole)
        names = self._spans.labels(spans, "")
        if begun := self._begun:
            now = time.perf_counter_ns()
            rows = [(0, start, max(now, start), phase, ref) for (phase, ref), start in begun.items()]
            spans, names = np.concatenate([spans, np.array(rows, SPAN)]), np.append(names, [""] * len(rows))
        # Where kernels have been overwritten the profile is not whole.
        begins = [(whole if oldest > first else start, start, end) for start, end, first in self._profiled]
        profiled = [(max(begin, start), end) for begin, start, end in begins if begin < end]
        return Recording(
            spans,
            names,
            steps,
            self._steps.labels(steps, b""),
            work,
            self._work.labels(work, ""),
            lags,
            edges,
            asked,
            np.array(profiled, np.int64).reshape(-1, 2),
            max([self._complete_from, *full]),
        )

    def tail(self, after: Sequence[int] = (0, 0, 0, 0, 0)) -> tuple[Records, Records, Records, Records, Records]:
        """Spans, steps, work, lags and runnable with numbers above those in `after`: what is new to who has read so
        far. Numbers go on after `clear`."""
        spans, steps, work, lags, edges = after
        return (
            self._spans.read_after(spans),
            self._steps.read_after(steps),
            self._work.read_after(work),
            self._lags.read_after(lags),
            self._edges.read_after(edges),
        )

    def num_steps_after(self, at_ns: int) -> int:
        """How many of the recorded steps ended after `at_ns`."""
        return int((self._steps.read()["end"] > at_ns).sum())

    def clear(self) -> None:
        """Forget everything but how many sequences are runnable."""
        running, self._count = self._count, 0
        self._complete_from, self._profiled = 0, []
        # New rings, not emptied ones: a writer in the middle of a record finishes it in the old one.
        self._spans, self._steps, self._work = self._spans.emptied(), self._steps.emptied(), self._work.emptied()
        self._lags, self._edges, self._asked = self._lags.emptied(), self._edges.emptied(), self._asked.emptied()
        self.runnable(time.perf_counter_ns(), running)

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """A recorder that holds `recording` (with room for at least the usual number of records)."""
        usual = cls()
        names = ("spans", "steps", "work", "lags", "edges", "asked")
        held = [getattr(recording, "runnable" if name == "edges" else name) for name in names]
        sizes = {
            name: max(getattr(usual, f"_{name}").capacity, len(rows)) for name, rows in zip(names, held, strict=True)
        }
        recorder = cls(**sizes)
        labels = {"spans": recording.names, "steps": recording.batches, "work": recording.work_names}
        for name, rows in zip(names, held, strict=True):
            ring: Ring = getattr(recorder, f"_{name}")
            for row, label in zip(rows.tolist(), labels.get(name, [None] * len(rows)), strict=True):
                ring.write(*row[1:], label=label or None)
        for start, end in recording.profiled.tolist():
            recorder.profiled(start, end)
        recorder._complete_from = recording.complete_from
        if len(recording.runnable):
            recorder._count = int(recording.runnable["count"][-1])
        return recorder


class Span:
    """The context manager of `Recorder.span`; good for one `with` at a time.

    Raises InvalidRequestError when it is begun twice, or ended without having begun.
    """

    __slots__ = ("_name", "_phase", "_recorder", "_ref", "_start")

    def __init__(self, recorder: Recorder, phase: Phase, ref: int, name: str | None) -> None:
        self._recorder = recorder
        self._phase = phase
        self._ref = ref
        self._name = name
        self._start: int | None = None

    def __enter__(self) -> Self:
        if self._start is not None:
            raise InvalidRequestError("span", self._title, "it has begun already; give every block a span of its own")
        self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = time.perf_counter_ns()
        start, self._start = self._start, None
        if start is None:
            raise InvalidRequestError("span", self._title, "it has not begun, or has ended; use it as `with span:`")
        self._recorder.record(self._phase, start, end, self._ref, self._name)

    @property
    def _title(self) -> str:
        return self._name or self._phase.name.lower()


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
