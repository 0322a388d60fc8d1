"""The device an engine runs on: work goes in in order, and each piece ends in a `Completion`."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from interactive_infer.errors import DeviceError
from interactive_infer.waiting import Completion

T = TypeVar("T")

_GRACE_S = 10.0  # a step takes well under this; one that takes longer is not waited for


class Device(Protocol):
    """What a step needs of a device. Pieces of work run in the order of `submit`."""

    torch_device: torch.device

    def submit(self, work: Callable[[], T]) -> Completion[T]: ...

    def close(self) -> None: ...


class CPUDevice:
    """The CPU as a device: one worker thread. PyTorch releases the GIL while it computes, so the loop stays free.

    The thread holds the queue alone, never the engine, so a dropped engine can be collected. It ends when the device
    is closed or collected, and at the interpreter's exit, which waits for it a moment: a thread that comes out of
    torch's C++ while the interpreter is torn down would abort the process. A step that hangs does not keep the
    interpreter from leaving.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Completion] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=_serve, args=(self._queue,), name="interactive_infer device cpu", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._queue, self._thread)

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        """Run `work` after all that was submitted before it; its exception becomes the completion's."""
        completion: Completion[T] = Completion()
        if self._closed:
            completion.set_exception(DeviceError("the device was closed"))
        else:
            self._queue.put((work, completion))
        return completion

    def close(self) -> None:
        """End the thread once it has done what was submitted."""
        self._closed = True
        self._end()


def _end(work_queue: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    work_queue.put(None)
    if threading.current_thread() is not thread:
        thread.join(timeout=_GRACE_S)


def _serve(work_queue: queue.SimpleQueue[tuple[Callable[[], object], Completion] | None]) -> None:
    while (item := work_queue.get()) is not None:
        work, completion = item
        start = time.perf_counter_ns()
        try:
            value = work()
        except BaseException as error:
            if not isinstance(error, Exception):  # a SystemExit in a user's hook ends its step, not this thread
                error = DeviceError(f"work on the device was ended by {type(error).__name__}: {error}")
            completion.set_exception(error, start_ns=start, end_ns=time.perf_counter_ns())
        else:
            completion.set_result(value, start_ns=start, end_ns=time.perf_counter_ns())
            del value
        del item, work, completion  # an idle thread keeps nothing alive
