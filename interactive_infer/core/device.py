"""The device an engine runs on: work goes in in order, and each piece ends in a `Completion`."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch

from interactive_infer.errors import DeviceError
from interactive_infer.waiting import Completion

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GRACE_S = 10.0  # a step takes well under this; one that takes longer is not waited for


class Device(Protocol):
    """What a step needs of a device. Pieces of work run in the order of `submit`.

    `submit(work)` has `work` called, which puts something on the device and returns what reads its result once the
    device is done; the completion ends with that, or with what went wrong.
    """

    torch_device: torch.device

    @property
    def lost(self) -> bool:
        """For good: nothing on it works any more, not even giving memory back."""
        ...

    def submit(self, work: Callable[[], Callable[[], T]]) -> Completion[T]: ...

    def follow_caller(self) -> None:
        """What is submitted from now on sees what the calling thread has put on the device so far."""
        ...

    def close(self) -> None: ...


class WorkThread:
    """A daemon thread that runs jobs in order. Jobs tell of their failures themselves; one that raises is logged.

    It holds the queue alone, never the engine, so a dropped engine can be collected. It ends when it is closed or
    collected, and at the interpreter's exit, which waits for it a moment: a thread that comes out of torch's C++ while
    the interpreter is torn down would abort the process. A job that hangs does not keep the interpreter from leaving.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._queue, self._thread)

    def put(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread once it has done what was put in."""
        self._end()


class CPUDevice:
    """The CPU as a device: one worker thread. PyTorch releases the GIL while it computes, so the loop stays free."""

    clock = None
    """When its work ran is read off the host's own clock."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.lost = False
        self._closed = False
        self._thread = WorkThread("interactive_infer device cpu")

    def submit(self, work: Callable[[], Callable[[], T]]) -> Completion[T]:
        """Call `work` after all that was submitted before it; its exception becomes the completion's."""
        completion: Completion[T] = Completion()
        if self._closed:
            completion.set_exception(DeviceError("the device was closed"))
        else:
            self._thread.put(partial(_run, work, completion))
        return completion

    def follow_caller(self) -> None:
        """On a CPU what was called is done."""

    def close(self) -> None:
        """End the thread once it has done what was submitted."""
        self._closed = True
        self._thread.close()


def _end(work_queue: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    work_queue.put(None)
    if threading.current_thread() is not thread:
        thread.join(timeout=_GRACE_S)


def _serve(work_queue: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := work_queue.get()) is not None:
        try:
            job()
        except BaseException:
            _log.exception("%s: a job failed; the thread goes on", threading.current_thread().name)
        del job  # an idle thread keeps nothing alive


def _run(work: Callable[[], Callable[[], T]], completion: Completion[T]) -> None:
    start = time.perf_counter_ns()
    try:
        value = work()()
    except BaseException as error:
        completion.set_exception(as_failure(error), start_ns=start, end_ns=time.perf_counter_ns())
    else:
        completion.set_result(value, start_ns=start, end_ns=time.perf_counter_ns())


def as_failure(error: BaseException) -> Exception:
    """What a step fails with: a SystemExit in a user's hook ends its step, not the device's thread."""
    if isinstance(error, Exception):
        return error
    return DeviceError(f"work on the device was ended by {type(error).__name__}: {error}")
