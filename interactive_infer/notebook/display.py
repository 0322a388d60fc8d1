"""A live stream for a displayed generation, and what the saved notebook keeps of it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interactive_infer.notebook.cells import num_cells
from interactive_infer.notebook.follower import Follower, Update, follow
from interactive_infer.notebook.hostile import markup, printable, sound

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

PLAIN_RATE = 5.0
"""Most updates a second where there are no widgets, and each carries the whole text."""
# As the live view: lines break between words (JupyterLab breaks a `pre` anywhere), letters as large as code.
_PRE = (
    "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; margin: 0;"
    " line-height: 1.4; font-size: var(--jp-code-font-size, inherit)"
)


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
    _shown_in[generation] = _cell(shell)
    _show(generation, shell)


def show_as_value(generation: Generation) -> None:
    """As `show`, for IPython, which displays the value of a cell's last line.

    Where that line is `gen.show()` it has been displayed: each `show` spares one such display in its own cell.
    """
    shell = _shell()
    if shell is None:
        return
    shown_in = _shown_in.pop(generation, None)
    if shown_in is None or shown_in != _cell(shell):
        _show(generation, shell)


_shown_in: weakref.WeakKeyDictionary[Generation, int | None] = weakref.WeakKeyDictionary()


def _cell(shell: Any) -> int | None:
    """The number of the cell that runs, or of the last one; None for a shell that counts none."""
    try:
        return num_cells(shell)
    except AttributeError:
        return None


def _show(generation: Generation, shell: Any) -> None:
    if not hasattr(shell, "kernel"):
        _when_ended(generation, lambda: print(printable(sound(_plain(generation)))))
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

        follow(generation, Follower(generation, publish, rate=PLAIN_RATE).start)


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


def _plain(generation: Generation) -> str:
    error = generation.error
    return generation.text if error is None else f"{generation.text}\n[{type(error).__name__}: {error}]"


def _shell() -> Any:
    """IPython's shell, or None outside IPython (which is not imported just to ask)."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _when_ended(generation: Generation, then: Callable[[], None]) -> None:
    output = generation._output

    def heard() -> None:
        if output.finish_reason is not None and heard in output.listeners:
            output.listeners.remove(heard)
            then()

    def start() -> None:
        output.listeners.append(heard)
        heard()

    follow(generation, start)
