"""Awaiting device work from asyncio.

The device never calls into Python. Somewhere a daemon thread sleeps in an event's `synchronize()`, which
releases the GIL; when it wakes up it settles a `Completion`, and that tells whoever waits, on whichever
loop or thread, by public API only (`loop.call_soon_threadsafe`). An engine has one such thread per stream
(`Waiter`: its completions come in order). Public waits (`device_done`, `run_on_device`) have one thread per
pending wait, so that none of them stands behind another or behind an engine.

Every await in this file is a checkpoint: it gives the loop one turn even when there is nothing to wait for,
and a cancellation is raised there, at once, whatever the device does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils._pytree import tree_leaves

from interactive_infer.errors import DeviceError, EngineClosedError, InferError, InvalidRequestError, twin

T = TypeVar("T")

_IDLE_S = 10.0  # an idle thread of a public wait ends after this long
_EXIT_GRACE_S = 2.0  # how long the interpreter's exit waits for pending waits, see `_drain`


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in a device's work. `torch.cuda.Event` is one; make it with `blocking=True`.

    `query()` says whether the point is reached, without blocking. `synchronize()` blocks its thread until
    then, releasing the GIL. Both raise when the device has failed.
    """

    def query(self) -> bool: ...
    def synchronize(self) -> object: ...


class _Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None
    start_ns: int | None = None
    end_ns: int | None = None


class Completion(Generic[T]):
    """One piece of device work and how it ended: pending, then done or failed, exactly once.

    Settled from any thread; waited for from any number of threads (`wait`) and coroutines (`await`) on any
    number of event loops at once. Awaiting always gives the loop a turn, also when the work is done. An
    awaiter that is cancelled, or whose loop is closed, disturbs nobody and leaves nothing behind. Each
    reader of a failure gets a new exception of its own (same type, arguments, attributes, cause,
    traceback): tracebacks of several readers do not pile up on one object, and no frame that holds the
    completion can hold it in a reference cycle.

    There is no lock, so a finalizer or a signal handler may settle a completion that its own thread is
    about to await. Whoever settles publishes the outcome first and calls the wakers after; whoever waits
    enters its waker first and looks at the outcome after. In every interleaving at least one of the two
    sees the other, and waking twice is harmless.
    """

    __slots__ = ("__weakref__", "_outcome", "_wakers", "launched_ns")

    def __init__(self) -> None:
        self.launched_ns: tuple[int, int] | None = None
        """From when to when a thread launched it, for whom it had been left; None where the caller did."""
        self._outcome: dict[None, _Outcome] = {}  # one entry at most; setdefault() lets the first one win
        self._wakers: dict[Callable[[], None], None] = {}

    def _settle(self, outcome: _Outcome) -> bool:
        """Whether `outcome` was the first."""
        if self._outcome.setdefault(None, outcome) is not outcome:
            return False
        with contextlib.suppress(KeyError):  # popitem() of an empty dict: everyone is told
            while True:
                self._wakers.popitem()[0]()
        return True

    def set_result(self, value: T, *, start_ns: int | None = None, end_ns: int | None = None) -> None:
        """The work is done. asyncio.InvalidStateError if the completion was settled before."""
        if not self._settle(_Outcome(value, None, start_ns, end_ns)):
            raise asyncio.InvalidStateError("this completion is settled already")

    def set_exception(self, exc: BaseException, *, start_ns: int | None = None, end_ns: int | None = None) -> None:
        """The work has failed. asyncio.InvalidStateError if the completion was settled before."""
        if not self._settle(_Outcome(None, exc, start_ns, end_ns)):
            raise asyncio.InvalidStateError("this completion is settled already")

    @property
    def start_ns(self) -> int | None:
        """When the device began, in ns on `time.perf_counter_ns`; None while pending or if not measured."""
        return self._outcome.get(None, _Outcome()).start_ns

    @property
    def end_ns(self) -> int | None:
        """When the device ended, like `start_ns`."""
        return self._outcome.get(None, _Outcome()).end_ns

    def done(self) -> bool:
        """Whether the work has ended, well or badly."""
        return None in self._outcome

    def result(self) -> T:
        """The work's value, or its failure raised. asyncio.InvalidStateError while it is pending."""
        outcome = self._outcome.get(None)
        if outcome is None:
            raise asyncio.InvalidStateError("this completion is still pending")
        if outcome.error is not None:
            raise twin(outcome.error)
        return outcome.value

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until the work has ended, or for `timeout` seconds. True once it has."""
        if not self.done():
            gate = threading.Lock()
            gate.acquire()
            wake = gate.release
            self._wakers[wake] = None
            try:
                if not self.done():
                    seconds = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
                    gate.acquire(timeout=seconds)
            finally:
                self._wakers.pop(wake, None)
        return self.done()

    def __await__(self) -> Generator[Any, None, T]:
        future = asyncio.get_running_loop().create_future()
        wake = partial(_resume, future)
        self._wakers[wake] = None
        try:
            if self.done():
                wake()
            yield from future
        finally:
            self._wakers.pop(wake, None)
        return self.result()


def _resume(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left there to be told
        future.get_loop().call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # its awaiter may have been cancelled on the way
        future.set_result(None)


def device_error(error: BaseException) -> DeviceError:
    """A failure of the device as a DeviceError that says what to do."""
    failure = DeviceError(
        f"work on the device failed: {type(error).__name__}: {error}. "
        "After a CUDA error other than out-of-memory the device is lost to this process: restart the kernel"
    )
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def _as_device_error() -> Iterator[None]:
    """What the device raises inside becomes a DeviceError; our own errors pass."""
    try:
        yield
    except InferError:
        raise
    except Exception as error:
        raise device_error(error) from error


Interval = Callable[[], tuple[int | None, int | None]]
"""(start, end) of an event's work in ns on `time.perf_counter_ns`; called once the event is reached."""


def _end_of(event: DeviceEvent, interval: Interval | None = None) -> _Outcome:
    """Block until `event` is reached, and say how its work ended. Never raises: its thread must survive.

    A failure's traceback keeps this frame, so nothing that must be freed is given to it.
    """
    try:
        event.synchronize()
        start_ns, end_ns = interval() if interval is not None else (None, None)
    except BaseException as error:
        return _Outcome(error=device_error(error))
    return _Outcome(None, None, start_ns, end_ns)


# ---- the interpreter's exit ------------------------------------------------------------------

_unfinished: dict[object, None] = {}  # work that a thread of ours is in, or will go into


def _drain() -> None:
    """At exit, give pending waits a moment to end.

    Daemon threads do not keep a process alive. But up to Python 3.13 one that comes out of torch's C++
    while the interpreter is being torn down ends the process with "terminate called without an active
    exception" (SIGABRT).
    """
    deadline = time.monotonic() + _EXIT_GRACE_S
    while _unfinished and time.monotonic() < deadline:
        time.sleep(0.005)


atexit.register(_drain)


# ---- an engine's thread ----------------------------------------------------------------------


class _Watched(NamedTuple):
    event: DeviceEvent
    completion: Completion[Any]
    read: Callable[[], Any]
    interval: Interval | None


class Waiter:
    """One daemon thread that waits for the events of one stream, in the order in which they were recorded.

    Every completion given to `watch` ends: when its event is reached, when the device fails (each one then
    fails with a DeviceError), or when the waiter is closed. A thread that has nothing to watch sleeps. It
    refers neither to the waiter nor to the engine; a waiter that is dropped lets it finish what it was
    given, and end.
    """

    def __init__(self, name: str = "interactive_infer waiter") -> None:
        self._queue: SimpleQueue[_Watched | None] = SimpleQueue()
        self._pending: dict[Completion[Any], None] = {}
        self._closed = False
        threading.Thread(target=_watch, args=(self._queue, self._pending), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def watch(
        self,
        event: DeviceEvent,
        completion: Completion[T],
        read: Callable[[], T],
        *,
        interval: Interval | None = None,
    ) -> None:
        """Settle `completion` with what `read` returns once `event` is reached, and all events watched before it.

        `read` takes the result from where the device left it, on the waiter's thread, and must be quick; `interval`
        says when the work ran. If either raises, the completion fails. Any thread may call; never blocks. On a closed
        waiter the completion fails with an EngineClosedError.
        """
        self._pending[completion] = None
        _unfinished[completion] = None
        self._queue.put(_Watched(event, completion, read, interval))
        if self._closed:  # looked at last: close() has seen the completion, or we see that it is closed
            self.close()
            _unfinished.pop(completion, None)  # the thread may have ended before it came to this one

    def close(self) -> None:
        """End every pending completion with an EngineClosedError, now, even if the device never answers
        again.

        The device may still be writing what the completions stand for. The thread ends with the
        `synchronize()` that it is in. May be called twice, from any thread.
        """
        self._closed = True
        self._queue.put(None)
        error = EngineClosedError("the engine was closed while this work was on the device")
        with contextlib.suppress(KeyError):
            while True:
                self._pending.popitem()[0]._settle(_Outcome(error=error))


def _watch(queue: SimpleQueue[_Watched | None], pending: dict[Completion[Any], None]) -> None:
    while (watched := queue.get()) is not None:
        if not watched.completion.done():
            outcome = _end_of(watched.event, watched.interval)
            watched.completion._settle(outcome if outcome.error else _with_value(outcome, watched.read))
            del outcome
        pending.pop(watched.completion, None)
        _unfinished.pop(watched.completion, None)
        del watched  # nothing is held while the thread sleeps


def _with_value(outcome: _Outcome, read: Callable[[], Any]) -> _Outcome:
    try:
        return outcome._replace(value=read())
    except BaseException as error:
        return outcome._replace(error=device_error(error))


# ---- threads for public waits ----------------------------------------------------------------


class _Threads:
    """Daemon threads, one for each running job, so that no job waits for another. Idle ones are used again.

    A job blocks as long as it likes and returns how it ended; it must not raise. Its thread counts as idle
    before it settles the completion, so that a caller who is woken and waits again finds it (after trio's
    `_core/_thread_cache.py`).
    """

    def __init__(self) -> None:
        self._idle: dict[_Worker, None] = {}

    def start(self, job: Callable[[], _Outcome], completion: Completion[Any]) -> None:
        try:
            worker, _ = self._idle.popitem()  # the one that went idle last: the others get to end
        except KeyError:
            worker = _Worker(self._idle)
        _unfinished[completion] = None
        worker.task = (job, completion)
        worker.gate.release()


class _Worker:
    def __init__(self, idle: dict[_Worker, None]) -> None:
        self.task: tuple[Callable[[], _Outcome], Completion[Any]] | None = None
        self.gate = threading.Lock()
        self.gate.acquire()
        threading.Thread(target=self._run, args=(idle,), name="interactive_infer wait", daemon=True).start()

    def _run(self, idle: dict[_Worker, None]) -> None:
        while True:
            if self.gate.acquire(timeout=_IDLE_S):
                assert self.task is not None
                job, completion = self.task
                self.task = None
                outcome = job()
                _unfinished.pop(completion, None)
                idle[self] = None
                completion._settle(outcome)
                del job, completion, outcome  # nothing is held while the thread sleeps
            else:
                try:
                    del idle[self]
                except KeyError:  # chosen at this very moment: the job is about to come
                    continue
                return


_threads = _Threads()


# ---- public waits ----------------------------------------------------------------------------


async def device_done(work: Any) -> None:
    """Wait until the device has done `work`, while the event loop goes on.

    `work` is one of
    - a CUDA event, recorded: make it `torch.cuda.Event(blocking=True)`, or the thread that waits for it
      keeps a core busy all the while (`torch.Event` always does);
    - a CUDA stream: what has been launched on it so far;
    - a tensor: what has been launched so far on the calling thread's current stream of its device. On the
      CPU there is nothing to wait for;
    - any object with `query()` and `synchronize()` (`DeviceEvent`).

    Raises DeviceError if the device fails, InvalidRequestError for any other `work`. Cancelling ends the
    wait at once; the work goes on, and a thread sleeps until it is done. Waits do not delay one another.
    """
    with _as_device_error():
        event = _event_of(work)
        done = event is None or event.query()
    if event is None or done:
        await asyncio.sleep(0)
        return
    completion: Completion[None] = Completion()
    _threads.start(partial(_end_of, event), completion)
    await completion


def _event_of(work: Any) -> DeviceEvent | None:
    """The event to wait for; None if there is none."""
    if isinstance(work, torch.Tensor):
        if work.device.type == "cpu":
            return None
        if work.device.type == "cuda":
            return _recorded_on(torch.cuda.current_stream(work.device))
        raise InvalidRequestError("work", work.device, "only CPU and CUDA tensors can be waited for")
    if isinstance(work, torch.cuda.Stream):  # before events: a stream has query() and synchronize() too
        return _recorded_on(work)
    if isinstance(work, DeviceEvent) and not isinstance(work, type):
        return work
    wanted = "expected a CUDA event, a CUDA stream, a tensor, or an object with query() and synchronize()"
    raise InvalidRequestError("work", work, wanted)


def _recorded_on(stream: torch.cuda.Stream) -> DeviceEvent:
    event = torch.cuda.Event(blocking=True)  # synchronize() sleeps; torch.Event(blocking=True) would spin
    event.record(stream)
    return event


async def run_on_device(fn: Callable[..., T], *args: Any, device: torch.device | str | int | None = None) -> T:
    """`fn(*args)` on a thread of its own; returns its result when the device is done with it.

    `device`: "cpu", or one CUDA device; None stands for the current CUDA device, or the CPU where there is
    none. On a CUDA device `fn` launches on a side stream that starts after what the caller's current stream
    has been given so far. The result is safe to use on that stream (its tensors are found in lists, tuples,
    dicts and whatever else is registered as a pytree). The caller's context variables and grad mode hold in
    `fn`; torch's other per-thread settings (autocast, the default device) do not.

    What `fn` raises is raised here, as itself. DeviceError if the device fails at what `fn` launched,
    InvalidRequestError for a wrong argument. Cancelling ends the wait at once: `fn` runs on to its end, its
    arguments stay alive until the device is done with them, and its outcome is dropped.
    """
    if not callable(fn):
        raise InvalidRequestError("fn", fn, "expected a function")
    with _as_device_error():
        lane = _lane_of(device)
    return await _run_on(lane, fn, args)


class _Lane(Protocol):
    """Where one call of `run_on_device` runs. Made on the caller's thread, at the call."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Worker thread: around `fn`."""

    def launched(self) -> DeviceEvent:
        """Worker thread: the event after everything that `fn` has launched."""

    def hand_over(self, result: Any) -> None:
        """Caller's thread, once that event is reached: make `result` safe to use there."""


async def _run_on(lane: _Lane, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    completion: Completion[_Outcome] = Completion()
    call = partial(contextvars.copy_context().run, fn, *args)
    _threads.start(partial(_run_in, lane, torch.is_grad_enabled(), call), completion)
    outcome = await completion
    error = outcome.error
    if error is not None:
        try:
            raise error
        finally:
            del error, outcome, completion  # error -> its traceback -> this frame -> error: a reference cycle
    with _as_device_error():
        lane.hand_over(outcome.value)
    return outcome.value


def _run_in(lane: _Lane, grad: bool, call: Callable[[], Any]) -> _Outcome:
    called = _outcome_of(lane, grad, call)
    # Also after a failure: until the device is done, nothing that fn launched with may be freed and reused.
    ended = _end_of_launches(lane)
    try:
        return _Outcome(ended if called.error is None and ended.error is not None else called)
    finally:
        del called, ended  # error -> its traceback -> fn's frame -> its caller, this frame -> error: a cycle


def _outcome_of(lane: _Lane, grad: bool, call: Callable[[], Any]) -> _Outcome:
    try:
        with lane.entered(), torch.set_grad_enabled(grad):
            return _Outcome(call())
    except BaseException as error:
        return _Outcome(error=error)


def _end_of_launches(lane: _Lane) -> _Outcome:
    try:
        event = lane.launched()
    except BaseException as error:
        return _Outcome(error=device_error(error))
    return _end_of(event)


def _lane_of(device: torch.device | str | int | None) -> _Lane:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        wanted = 'expected "cpu" or a CUDA device such as "cuda:0"'
        raise InvalidRequestError("device", device, wanted) from error
    if place.type == "cpu":
        return _CpuLane()
    if place.type != "cuda":
        raise InvalidRequestError("device", device, "only the CPU and CUDA devices are supported")
    if not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InvalidRequestError("device", device, f"{count} CUDA devices are available here")
    return _CudaLane(place)


class _Reached:
    """An event that is always reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _CpuLane:
    """On the CPU work is done when its call returns."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def launched(self) -> DeviceEvent:
        return _Reached()

    def hand_over(self, result: Any) -> None:
        pass


class _CudaLane:
    """A side stream that starts after the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._caller = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(self._caller.device)
        self._side.wait_stream(self._caller)
        self._event = torch.cuda.Event(blocking=True)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self._side.device), torch.cuda.stream(self._side):
            yield

    def launched(self) -> DeviceEvent:
        self._event.record(self._side)
        return self._event

    def hand_over(self, result: Any) -> None:
        self._caller.wait_event(self._event)
        for leaf in tree_leaves(result):
            # Its memory is from the side stream's pool: once freed, it must not be used again there before
            # the caller's stream is done with it.
            if isinstance(leaf, torch.Tensor) and leaf.device == self._caller.device:
                leaf.record_stream(self._caller)
