"""Who waits for a generation, and how they are woken: a few in each turn of their loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable

from interactive_infer.core.output import Output
from interactive_infer.interrupts import deferred_interrupts

_WAKES_A_TURN = 16

Futures = dict[asyncio.Future[None], None]


class Readers:
    """Futures of readers: those that wait for something new, and those that wait for the end alone. A listener of the
    output; it does not refer to the generation.

    Called by whichever thread drives. The futures' loops may be others, or closed by now. No lock: a reader enters its
    future first and looks at the output after, the driver changes the output first and empties the dictionary after.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.of_news: Futures = {}
        self.of_end: Futures = {}

    def __call__(self) -> None:
        if self.of_news:
            _tell(self.of_news)
        if self.of_end and self._output.finish_reason is not None:
            _tell(self.of_end)


_Batch = deque[asyncio.Future[None]]


def _no_batch() -> None:
    return None


class _Wakes:
    """Wakes the readers on one loop, on its thread, in the order in which they were told; at most `_WAKES_A_TURN` in
    each of its turns.

    A step wakes as many readers as it has texts. All in one turn, they would keep timers, widgets' messages and the
    next step waiting for as long as they take together. While any have been woken in this turn, another `_turn` is due:
    the loop has it, and with it those that wait for theirs; they refer to the loop, which only its own parts may.
    """

    def __init__(self) -> None:
        self._left = _WAKES_A_TURN
        self._batch: Callable[[], _Batch | None] = _no_batch

    def wake(self, future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        batch = self._batch()
        if batch is None:
            batch = _Batch()
            self._batch = weakref.ref(batch)
            loop.call_soon(self._turn, loop, batch)
        if self._left:
            self._left -= 1
            _set(future)
        else:
            batch.append(future)

    def _turn(self, loop: asyncio.AbstractEventLoop, batch: _Batch) -> None:
        with deferred_interrupts():  # an interrupt in here would leave the rest asleep for ever
            self._left = _WAKES_A_TURN
            while self._left and batch:
                self._left -= 1
                _set(batch.popleft())
            if self._left < _WAKES_A_TURN:
                loop.call_soon(self._turn, loop, batch)
            else:
                self._batch = _no_batch


_wakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = weakref.WeakKeyDictionary()


def _tell(futures: Futures) -> None:
    """In a driver's turn, so no interrupt comes in between."""
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    while futures:
        try:
            future, _ = futures.popitem()
        except KeyError:  # its reader has just left, on another thread
            break
        loop = future.get_loop()
        if loop is here:
            _wake(future, loop)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left there to be told
                loop.call_soon_threadsafe(_wake_told_elsewhere, future, loop)


def _wake(future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    if (wakes := _wakes.get(loop)) is None:
        wakes = _wakes[loop] = _Wakes()
    wakes.wake(future, loop)


def _wake_told_elsewhere(future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    with deferred_interrupts():
        _wake(future, loop)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # its reader may have been cancelled on the way
        future.set_result(None)
