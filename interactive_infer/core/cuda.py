"""A CUDA card as an engine's device: a stream, a thread that launches, a thread that waits, a clock."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from interactive_infer.core.device import WorkThread, as_failure
from interactive_infer.errors import DeviceError
from interactive_infer.options import Waiting
from interactive_infer.timeline.clock import DeviceClock
from interactive_infer.waiting import Completion, Waiter, device_error

T = TypeVar("T")
Took = Callable[[], int]

_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_lending = threading.Lock()


def borrow_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of one's own until `return_stream`.

    cuBLAS keeps 32 MB for each stream that it ever ran on, for good: engines that come and go take turns on few.
    torch hands out 32 streams of each priority by turns (c10/cuda/CUDAStream.cpp), again and again: of the usual one
    some would soon be side streams of somebody else's, so ours are of the high one.
    """
    with _lending:
        idle = _idle_streams.get(device)
        return idle.pop() if idle else torch.cuda.Stream(device, priority=-1)


def return_stream(stream: torch.cuda.Stream) -> None:
    """Nothing of the borrower's is on it any more."""
    with _lending:
        _idle_streams.setdefault(stream.device, []).append(stream)


class CUDADevice:
    """One stream of a card, into which one party at a time launches.

    `submit` puts work on the stream and returns at once; the completion ends when the card is done with it. Long
    launches (eager kernels, thousands of Python calls) are made by the launch thread. Short ones (a graph's replay) may
    be made by the caller, `here`, while the launch thread has nothing: what was submitted first is launched first.
    After a device-side fault every CUDA call of the process fails: the device is `lost`.
    """

    def __init__(self, torch_device: torch.device, waiting: Waiting = "thread") -> None:
        self.torch_device = torch_device
        self.stream = borrow_stream(torch_device)
        self._clock_stream = borrow_stream(torch_device)
        self.clock = DeviceClock(_recorder(self._clock_stream))
        self._closed = False
        self._lock = threading.Lock()
        self._num_queued = 0
        self._events: list[_Events] = []  # of work that is done, for the next
        self._thread = WorkThread(f"interactive_infer launch {torch_device}")
        self._waiter = Waiter(f"interactive_infer waiter {torch_device}") if waiting == "thread" else None

    def submit(
        self, work: Callable[[], Callable[[], T]], *, here: bool = False, took: Took | None = None
    ) -> Completion[T]:
        """Call `work` with this device and stream current. It launches without waiting, and returns what reads its
        result.

        The completion ends with what that function returns once everything launched is done, or with what `work`
        raised, or with a DeviceError if the card failed. `took` says then how many ns it took by the card's own clock;
        without it an event before `work` does, which an idle card reaches at once, and long before a graph.
        """
        completion: Completion[T] = Completion() if self._waiter is not None else _Polled()
        if self._closed:
            completion.set_exception(DeviceError("the device was closed"))
            return completion
        with self._lock:
            here = here and self._num_queued == 0
            if not here:
                self._num_queued += 1
        if here:
            self._launch(work, completion, took, here=True)
        else:
            self._thread.put(partial(self._launch_queued, work, completion, took))
        return completion

    @property
    def lost(self) -> bool:
        try:
            torch.cuda.current_stream(self.torch_device).query()
        except torch.AcceleratorError:
            return True
        return False

    def follow_caller(self) -> None:
        """What is submitted from now on runs after what the calling thread has launched on its current stream."""
        try:
            self.stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        except torch.AcceleratorError as error:
            raise device_error(error) from error

    def close(self) -> None:
        """End its threads, once what was submitted has been launched."""
        self._closed = True
        self._thread.close()
        if self._waiter is not None:
            self._waiter.close()

    def give_back(self) -> None:
        """Its streams, once nothing is on them."""
        return_stream(self.stream)
        return_stream(self._clock_stream)

    def _launch_queued(self, work: Callable[[], Callable[[], T]], completion: Completion[T], took: Took | None) -> None:
        try:
            self._launch(work, completion, took, here=False)
        finally:
            with self._lock:
                self._num_queued -= 1

    def _launch(
        self, work: Callable[[], Callable[[], T]], completion: Completion[T], took: Took | None, *, here: bool
    ) -> None:
        begun_ns = time.perf_counter_ns()
        try:
            events = self._events.pop() if self._events else _events()
            with torch.cuda.stream(self.stream):  # makes its device current too
                if took is None:
                    events[0].record(self.stream)
                read = work()
                events[1].record(self.stream)
        except BaseException as error:
            with contextlib.suppress(torch.AcceleratorError):
                self.stream.synchronize()  # what it did launch uses memory that the next one may get
            completion.set_exception(self._failure(error))
        else:
            if not here:
                completion.launched_ns = begun_ns, time.perf_counter_ns()
            interval = partial(_interval, self.clock, self._events, events, took)
            if self._waiter is not None:
                self._waiter.watch(events[1], completion, read, interval=interval)
            elif isinstance(completion, _Polled):
                completion.launched(events[1], read, interval)

    def _failure(self, error: BaseException) -> Exception:
        if isinstance(error, torch.OutOfMemoryError):
            return _out_of_memory(self.torch_device, error)
        return device_error(error) if isinstance(error, torch.AcceleratorError) else as_failure(error)


class _Polled(Completion[T]):
    """Whoever looks asks the card, one at a time: for `waiting="spin"` and `"block"`, where no thread waits. Cannot be
    awaited."""

    __slots__ = ("_asking", "_event", "_interval", "_launched", "_read")

    def __init__(self) -> None:
        super().__init__()
        self._asking = threading.Lock()
        self._launched = False

    def launched(self, event: torch.cuda.Event, read: Callable[[], T], interval: Callable[[], tuple[int, int]]) -> None:
        """Done when `event` is reached."""
        self._event, self._read, self._interval = event, read, interval
        self._launched = True

    def done(self) -> bool:
        # Found locked: another is asking, and whoever settles it may look again on the way.
        if not super().done() and self._launched and self._asking.acquire(blocking=False):
            try:
                if not super().done() and self._event.query():
                    value, (start_ns, end_ns) = self._read(), self._interval()
                    self.set_result(value, start_ns=start_ns, end_ns=end_ns)
            except Exception as error:  # an interrupt is its caller's
                self.set_exception(device_error(error))
            finally:
                self._asking.release()
        return super().done()

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done() and (end is None or time.monotonic() < end):
            if timeout is None and self._launched:
                with contextlib.suppress(torch.AcceleratorError):  # `done` asks again and tells
                    self._event.synchronize()
            else:
                time.sleep(0.0001)
        return self.done()


_Events = tuple[torch.cuda.Event, torch.cuda.Event]


def _events() -> _Events:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)


def _interval(clock: DeviceClock, free: list[_Events], events: _Events, took: Took | None) -> tuple[int, int]:
    begin_ns = clock.ns(events[0]) if took is None else 0
    end_ns = clock.ns(events[1])
    free.append(events)
    start_ns = begin_ns if took is None else end_ns - took()
    return min(start_ns, end_ns), end_ns


def _out_of_memory(device: torch.device, error: torch.OutOfMemoryError) -> DeviceError:
    traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep the step's activations
    try:
        torch.cuda.empty_cache()  # what others need may be there, in pieces of another size
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as lost:
        return device_error(lost)
    failure = DeviceError(
        f"out of memory on {device} at a step's launch ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free): "
        "free what your own work holds there, or load the engine with a smaller kv_cache_tokens or max_step_tokens"
    )
    failure.__cause__ = error
    return failure


def _recorder(stream: torch.cuda.Stream) -> Callable[[], torch.cuda.Event]:
    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return record


def missing_for_kernels(device: torch.device) -> str | None:
    """Why our kernels cannot run on this card; None when they can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the paged kernels need a card of compute capability 8.0, {device} has {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        return "the paged kernels need Triton, which is not installed (pip install triton)"
    return None
