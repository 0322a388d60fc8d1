"""`timeline.span("my work", device=True)`: what a block put on the device, between two events on its stream."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from interactive_infer.timeline.clock import DeviceClock, TimedEvent
from interactive_infer.timeline.recorder import CPU, Recorder

if TYPE_CHECKING:
    import torch

_MOST_OPEN = 4_096


class Mark(NamedTuple):
    """An event on a stream, by its number, of a device, by its index."""

    event: TimedEvent
    stream: int
    device: int


class DeviceEvents(Protocol):
    """Where events come from: CUDA, or a simulation of it."""

    def mark(self) -> Mark:
        """Record an event on the current stream of the current device."""
        ...

    def ns(self, mark: Mark) -> int:
        """When a mark that was reached happened, on `time.perf_counter_ns`."""
        ...

    @property
    def error_ns(self) -> int:
        """How far off `ns` may be."""
        ...


class CUDAEvents:
    """Events of CUDA's, with a clock for each card that is used. Stream numbers count from 1 in order of first use (0
    is the engine's)."""

    def __init__(self) -> None:
        self._clocks: dict[int, DeviceClock] = {}
        self._streams: dict[tuple[int, int], int] = {}

    def mark(self) -> Mark:
        import torch

        stream = torch.cuda.current_stream()
        device = stream.device.index
        if device not in self._clocks:
            self._clocks[device] = cuda_clock(stream.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        number = self._streams.setdefault((device, stream.cuda_stream), len(self._streams) + 1)
        return Mark(event, number, device)

    def ns(self, mark: Mark) -> int:
        return self._clocks[mark.device].ns(mark.event)

    @property
    def error_ns(self) -> int:
        return max((clock.error_ns for clock in self._clocks.values()), default=0)


class _Reached:
    """A moment of the host's clock as an event."""

    def __init__(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _Reached) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


class HostEvents:
    """Without a card: the block itself is the work, on the thread that runs it."""

    error_ns = 0

    def mark(self) -> Mark:
        return Mark(_Reached(), 1, CPU)

    def ns(self, mark: Mark) -> int:
        assert isinstance(mark.event, _Reached)
        return mark.event.at_ns


def cuda_clock(device: torch.device) -> DeviceClock:
    """A clock for a card, with a stream of its own."""
    import torch

    stream = torch.cuda.Stream(device)

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return DeviceClock(record)


def usual_events() -> DeviceEvents:
    """CUDA's where torch is there and sees a card."""
    torch = sys.modules.get("torch")
    return CUDAEvents() if torch is not None and torch.cuda.is_available() else HostEvents()


class DeviceSpans:
    """Device spans that have been begun, and wait to be reached by their streams.

    `settle` records those that were, without waiting. It is called before the records are read, and by each new span,
    so that not many are open; of more than 4,096 the oldest are given up.
    """

    def __init__(self, recorder: Recorder, events: DeviceEvents | None) -> None:
        self._recorder = recorder
        self._events = events
        self._open: deque[tuple[str, Mark, Mark]] = deque(maxlen=_MOST_OPEN)
        self._lock = threading.Lock()

    @property
    def events(self) -> DeviceEvents:
        if self._events is None:
            self._events = usual_events()
        return self._events

    @property
    def error_ns(self) -> int:
        """How far off a device span's times may be; 0 while there was none."""
        return 0 if self._events is None else self._events.error_ns

    def add(self, name: str, start: Mark, end: Mark) -> None:
        self._open.append((name, start, end))
        self.settle(8)

    def settle(self, most: int = _MOST_OPEN) -> None:
        """Record what the device has done, looking at the `most` oldest. Streams end their spans in any order."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            for _ in range(min(len(self._open), most)):
                name, start, end = self._open.popleft()
                if end.event.query():
                    start_ns, end_ns = self.events.ns(start), self.events.ns(end)
                    self._recorder.work(start_ns, max(start_ns, end_ns), name, stream=start.stream, device=start.device)
                else:
                    self._open.append((name, start, end))
        finally:
            self._lock.release()


class DeviceSpan:
    """The context manager of `timeline.span(name, device=True)`; good for one `with`.

    The host's part of the block is recorded too, under the same name: launching takes time.
    """

    def __init__(self, recorder: Recorder, spans: DeviceSpans, name: str) -> None:
        self._spans = spans
        self._name = name
        self._host = recorder.span(name)

    def __enter__(self) -> Self:
        self._host.__enter__()
        self._start = self._spans.events.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = self._spans.events.mark()
        self._host.__exit__(kind, error, traceback)
        self._spans.add(self._name, self._start, end)
