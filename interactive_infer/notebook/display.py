"""A live stream for a displayed generation, and what the saved notebook keeps of it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from interactive_infer.notebook.hostile import markup, sound
from interactive_infer.timeline.recorder import Phase

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

_log = logging.getLogger(__name__)

WIDGET_RATE = 30.0
"""Most updates a second that a widget gets."""
PLAIN_RATE = 5.0
"""Most updates a second where there are no widgets, and each carries the whole text."""
# As the live view: lines break between words (JupyterLab breaks a `pre` anywhere), letters as large as code.
_PRE = (
    "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; margin: 0;"
    " line-height: 1.4; font-size: var(--jp-code-font-size, inherit)"
)
# Of all views together: a message takes the loop up to 0.25 ms, and Jupyter's server drops what a kernel publishes
# beyond 1,000 messages a second; other things publish too.
_MESSAGES_PER_SECOND = 160.0
# A timer that is later than this does not fire because nobody runs the loop: `generate_sync` drives.
_LATE_S = 0.01


def show(generation: Generation) -> None:
    """Display `generation` in the current cell and follow it until it ends.

    - In a notebook: a live view (without anywidget plain HTML, at most 5 updates a second). The saved notebook has the
      text as text/plain and text/html, which need no widget; the view stays usable while the kernel lives.
    - In a terminal IPython: prints the text once it is complete.
    - Elsewhere: does nothing.

    The engine holds the generation until it ends. May be called from any thread.
    """
    shell = _shell()
    if shell is None:
        return
    if not hasattr(shell, "kernel"):
        _when_ended(generation, lambda: print(_plain(generation)))
        return
    if importlib.util.find_spec("anywidget") is not None:
        from interactive_infer.notebook.widgets.token_view import TokenView

        TokenView(generation).show()
        return
    from IPython.display import display, update_display

    display_id = uuid.uuid4().hex
    display(bundle(generation), raw=True, display_id=display_id)
    if generation.finish_reason is None:

        def publish(update: Update) -> None:
            update_display(bundle(generation), display_id=display_id, raw=True)

        on_driver(generation, Follower(generation, publish, rate=PLAIN_RATE).start)


def continued(generation: Generation) -> Generation:
    """What the live view of `generation` shows now: what its Continue button made last, else `generation` itself."""
    while (after := _continued.get(generation)) is not None:
        generation = after
    return generation


def goes_on(before: Generation, after: Generation) -> None:
    """A view of `before` shows `after` from now on."""
    _continued[before] = after


_continued: weakref.WeakKeyDictionary[Generation, Generation] = weakref.WeakKeyDictionary()


def bundle(generation: Generation) -> dict[str, str]:
    """The text so far as text/plain and text/html, safe to insert: everything is escaped."""
    return {
        "text/plain": sound(_plain(generation)),
        "text/html": (
            f'<pre style="{_PRE}">{markup(generation.text)}</pre>'
            f'<div style="opacity: 0.7; font-size: smaller">{markup(status(generation))}</div>'
        ),
    }


def status(generation: Generation) -> str:
    """One line: the state, how many tokens there are and how fast they come.

    Tokens/s are over the time after the first token; the time between tokens is the median of the last 100.
    """
    output = generation._output
    count, times, timing = len(output.token_ids), output.times_ns[-101:], generation.timing
    words = [generation.finish_reason or generation.state, f"{count:,} token{'' if count == 1 else 's'}"]
    if timing.tokens_per_second is not None:
        words.append(f"{timing.tokens_per_second:,.1f} tokens/s after the first")
    if timing.time_to_first_token is not None:
        words.append(f"first token after {timing.time_to_first_token:.2f} s")
    if len(times) > 1:
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
        words.append(f"{gaps[len(gaps) // 2] / 1e6:.1f} ms between tokens")
    if generation.error is not None:
        words.append(str(generation.error))
    return " · ".join(words)


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


def _plain(generation: Generation) -> str:
    error = generation.error
    return generation.text if error is None else f"{generation.text}\n[{type(error).__name__}: {error}]"


def _shell() -> Any:
    """IPython's shell, or None outside IPython (which is not imported just to ask)."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _call_later(delay: float, callback: Callable[[], None]) -> Timer | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop.call_later(delay, callback)


def loop_of(generation: Generation) -> asyncio.AbstractEventLoop | None:
    """The loop that the engine runs on: not the running one where this is a thread of the kernel's own."""
    engine = generation._engine_ref()
    if engine is not None and engine._steps.loop is not None:
        return engine._steps.loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def on_driver(generation: Generation, start: Callable[[], None]) -> None:
    """Hold the generation until it ends and call `start`, both on the thread that drives its engine."""
    engine = generation._engine
    if engine is None:  # it ended this moment
        start()
        return

    def hold_and_start() -> None:
        engine._steps.hold(generation)
        start()

    engine._steps.post(hold_and_start)


def _when_ended(generation: Generation, then: Callable[[], None]) -> None:
    output = generation._output

    def heard() -> None:
        if output.finish_reason is not None and heard in output.listeners:
            output.listeners.remove(heard)
            then()

    def start() -> None:
        output.listeners.append(heard)
        heard()

    on_driver(generation, start)
