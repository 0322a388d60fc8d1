"""Interrupts that wait for a safe moment."""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # `signal` converts to enums, 5 µs a call
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_SIGINT: int = signals.SIGINT


class Interrupts:
    """A SIGINT handler that takes note, and calls the handler it stands for when told to."""

    def __init__(self, handler: Handler | None) -> None:
        self._handler = handler
        self._noted: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)

    def deliver(self) -> None:
        """Call the handler if a signal has come; raises what it raises (KeyboardInterrupt, unless it is another's)."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            if self._handler is not None:
                self._handler(*noted)


class deferred_interrupts:
    """Within the block SIGINT is only noted. Its handler runs at the end, or where `interrupts.deliver()` is called.

    A KeyboardInterrupt between two lines of planning would leave pages with the wrong owner. Inside another such block
    it is the outer one that delivers. Nothing is deferred off the main thread, where Python runs no handlers, nor where
    SIGINT has no handler of Python's (it is ignored, or left to the system or to C). About 2 µs.
    """

    def __enter__(self) -> Interrupts:
        self._mine: Interrupts | None = None
        if threading.current_thread() is not threading.main_thread():
            return Interrupts(None)
        before = signals.getsignal(_SIGINT)
        if isinstance(before, Interrupts):
            return before
        if not callable(before):
            return Interrupts(None)
        self._before = before
        mine = Interrupts(before)
        signals.signal(_SIGINT, mine)
        self._mine = mine
        return mine

    def __exit__(self, *_: object) -> None:
        mine = self._mine
        if mine is None:
            return
        if signals.getsignal(_SIGINT) is mine:  # unless the handler has put another in place
            signals.signal(_SIGINT, self._before)
        mine.deliver()
