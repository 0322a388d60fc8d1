"""What is new in a generation, handed on at a bounded rate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from interactive_infer.timeline.recorder import Phase

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

_log = logging.getLogger(__name__)

WIDGET_RATE = 30.0
"""Most updates a second that a widget gets."""
# Of all views together: a message takes the loop up to 0.25 ms, and Jupyter's server drops what a kernel publishes
# beyond 1,000 messages a second; other things publish too.
_MESSAGES_PER_SECOND = 160.0
# A timer that is later than this does not fire because nobody runs the loop: `generate_sync` drives.
_LATE_S = 0.01


@dataclass(frozen=True, slots=True)
class Update:
    """The texts of new tokens, of which `first` is the first's index. `final`: nothing comes after."""

    first: int
    pieces: list[str]
    final: bool


class Timer(Protocol):
    def cancel(self) -> None: ...


class Follower:
    """Hands what is new in a generation to `publish`, at most `rate` times a second, and the end at once.

    A listener of the generation's output: called on the driving thread after each commit, costs a few microseconds
    unless something is due. Invariants: the pieces of all updates, joined, are the generation's text from token `first`
    on; exactly one update is final, and it is the last; a view that fails is logged and dropped, and the engine goes
    on. Hidden, it publishes the end alone.

    Args:
        clock: seconds, rising.
        call_later: runs a callback after a delay in seconds on the running loop; gives None where none runs.
    """

    open_views = 0  # of this process, because what it publishes goes through one socket

    def __init__(
        self,
        generation: Generation,
        publish: Callable[[Update], None],
        *,
        rate: float,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer | None] | None = None,
    ) -> None:
        self._generation = generation
        self._publish = publish
        self._rate = rate
        self._clock = clock
        self._call_later = call_later or _call_later
        engine = generation._engine_ref()
        self._recorder = engine.timeline.recorder if engine is not None else None
        self._timer: Timer | None = None
        self._due = 0.0
        self._last = float("-inf")
        self._num_tokens = first
        self._following = False
        self._hidden = False

    def start(self) -> None:
        """Begin, on the driving thread. Also right for a generation that has ended by now."""
        self._following = True
        Follower.open_views += not self._hidden
        self._generation._output.listeners.append(self)
        self()

    def stop(self) -> None:
        if self._following:
            self._following = False
            Follower.open_views -= not self._hidden
            with contextlib.suppress(ValueError):  # the output drops a listener that failed
                self._generation._output.listeners.remove(self)
            self._cancel_timer()

    def hide(self) -> None:
        """Nobody looks at it."""
        if not self._hidden:
            self._hidden = True
            Follower.open_views -= self._following
            self._cancel_timer()

    def reveal(self) -> None:
        """Somebody looks at it again: what is new comes now."""
        if self._hidden:
            self._hidden = False
            Follower.open_views += self._following
            self()

    def __call__(self) -> None:
        if not self._following:
            return
        if self._generation.finish_reason is not None:
            self._update()
            return
        if self._hidden:
            return
        now = self._clock()
        due = self._last + max(1 / self._rate, Follower.open_views / _MESSAGES_PER_SECOND)
        if self._timer is None:
            # Even what is due already waits for the loop's next turn: the next step's launch goes first.
            self._due = max(now, due)
            self._timer = self._call_later(self._due - now, self._update)
            if self._timer is None and now >= due:
                self._update()
        elif now > self._due + _LATE_S:
            self._update()

    def _update(self) -> None:
        self._cancel_timer()
        self._last = self._clock()
        start_ns = time.perf_counter_ns()
        final = self._generation.finish_reason is not None
        update = self._take(final)
        decoded_ns = time.perf_counter_ns()
        if final:
            self.stop()
        try:
            self._publish(update)
        except Exception:
            # Called from inside the engine's commit: other generations must not fail for this view.
            self.stop()
            _log.exception("the view of generation %s failed and follows it no longer", self._generation.number)
        if self._recorder is not None:
            self._recorder.record(Phase.DETOKENIZE, start_ns, decoded_ns)
            self._recorder.record(Phase.PUBLISH, decoded_ns, time.perf_counter_ns())

    def _take(self, final: bool) -> Update:
        first, output = self._num_tokens, self._generation._output
        self._num_tokens = output.decode()
        return Update(first, [output.piece(index) for index in range(first, self._num_tokens)], final)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def on_driver(generation: Generation, do: Callable[[], None]) -> None:
    """Call `do` on the thread that drives the generation's engine: in a turn, now or soon. From any thread."""
    engine = generation._engine
    if engine is None:  # it has ended
        do()
    else:
        engine._steps.post(do)


def follow(generation: Generation, start: Callable[[], None]) -> None:
    """As `on_driver`; and the engine holds the generation until it ends."""

    def hold_and_start() -> None:
        if (engine := generation._engine) is not None:
            engine._steps.hold(generation)
        start()

    on_driver(generation, hold_and_start)


def loop_of(generation: Generation) -> asyncio.AbstractEventLoop | None:
    """The loop that the engine runs on: not the running one where this is a thread of the kernel's own."""
    engine = generation._engine_ref()
    if engine is not None and engine._steps.loop is not None:
        return engine._steps.loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _call_later(delay: float, callback: Callable[[], None]) -> Timer | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop.call_later(delay, callback)
