"""The device an engine runs on: work goes in in order, and each piece ends in a `Completion`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from interactive_infer.errors import DeviceError
from interactive_infer.waiting import Completion

T = TypeVar("T")


class Device(Protocol):
    """What a step needs of a device. Pieces of work run in the order of `submit`."""

    torch_device: torch.device

    def submit(self, work: Callable[[], T]) -> Completion[T]: ...

    def close(self) -> None: ...


class CPUDevice:
    """The CPU as a device: one worker thread. PyTorch releases the GIL while it computes, so the loop stays free.

    The thread holds the queue alone, never the engine, so a dropped engine can be collected; it is a daemon, so a
    step that hangs does not keep the interpreter from leaving.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Completion] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=_serve, args=(self._queue,), name="interactive_infer device cpu", daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        """Run `work` after all that was submitted before it; its exception becomes the completion's."""
        completion: Completion[T] = Completion()
        if self._closed:
            completion.set_exception(DeviceError("the device was closed"))
        else:
            self._queue.put((work, completion))
        return completion

    def close(self) -> None:
        """End the thread once it has done what was submitted. Waits for it, unless called on it."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()


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
