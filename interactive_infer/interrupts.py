"""Interrupts that wait for a safe moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Deferred:
    """A SIGINT handler that only takes note."""

    def __init__(self) -> None:
        self.interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def read(self) -> bool:
        return self.interrupted


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Within the block SIGINT only sets a flag, which the yielded function reads; KeyboardInterrupt follows at its end.

    A KeyboardInterrupt between two lines of planning would leave pages with the wrong owner. Inside another such
    block it is the outer one that raises. Off the main thread, where Python delivers no signals, the flag stays unset.
    """
    if threading.current_thread() is not threading.main_thread():
        yield _Deferred().read
        return
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, _Deferred):
        yield before.read
        return
    deferred = _Deferred()
    signal.signal(signal.SIGINT, deferred)
    try:
        yield deferred.read
    finally:
        signal.signal(signal.SIGINT, before)
    if deferred.interrupted:
        raise KeyboardInterrupt
