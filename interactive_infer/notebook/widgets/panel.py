"""What our widgets have in common: how they come into a notebook, and how their front ends are heard."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from interactive_infer.notebook import kernel
from interactive_infer.notebook.cells import recorded_callback
from interactive_infer.notebook.hostile import markup, sound
from interactive_infer.notebook.widgets.prints import KEPT, prints_caught, step_by_step

_log = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_ERROR_KEPT = 2_000
UNSEEN_AFTER_S = 30.0
"""A page that is in sight says so every 10 s. One that has not for so long is probably gone."""

Message = dict[str, Any]


def source(*names: str) -> str:
    """One JavaScript module, or one style sheet, of several files."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


class Panel(anywidget.AnyWidget):
    """A widget whose output in the notebook is plain HTML, brought to life by the widget's front end.

    JupyterLab shows an error in the place of a widget whose model is gone, whatever else the output holds. So the
    output holds `static`, the text and figures as HTML, inside an element with the class `mark`. The front end
    (panel.js) looks for that element and takes its place; saved, exported or reopened, the HTML is what there is.

    - Messages from the front end arrive on any thread. Each is handed to `loop`, where `hear` is called with it (None
      or a closed loop: where it arrives).
    - Each page has a name of its own, and sends `{"visible": bool, "page": name}` at first and whenever it comes into
      sight or goes out of it; while it is in sight, every 10 s again. `seen` is called with what holds for all pages
      together. Out of sight counts only where coming back would be heard while a cell awaits.
    - Whoever has timers, listeners or streams ends them in `close`, which is called for half-made widgets too.
    - What `hear`, a callback of `on_loop` or a task of `spawn` raises or prints is shown in the widget, as text (it
      belongs to no cell, so a front end would put it into its log). How long it held the loop is on the timeline.
    """

    _css: str = source("panel.css")

    mark = traitlets.Unicode("").tag(sync=True)
    printed = traitlets.Unicode("").tag(sync=True)
    """The last of what callbacks printed, until somebody dismisses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, **traits: Any) -> None:
        super().__init__(mark=f"interactive-infer-live-{uuid.uuid4().hex}", **traits)
        self.loop = loop
        self.display_id = uuid.uuid4().hex
        kernel.keep_live(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_sight: dict[str, float] = {}  # of each page that is: when it last said so, on time.monotonic
        self._displayed = False
        self._pages = 0  # that have made themselves known; more than one: a page was reloaded, or there are two
        self.on_msg(self._arrived)

    @property
    def answers_at_once(self) -> bool:
        """Whether messages are heard while a cell awaits."""
        return kernel.answers_at_once()

    def hear(self, message: Message) -> None:
        """A message from the front end, on the loop. What is not of the widget's protocol is ignored."""

    def seen(self, visible: bool) -> None:
        """On the loop: a page is in sight, which is told again and again, or none is any more."""

    @property
    def in_sight(self) -> bool:
        """Whether a page is, and is still there."""
        if self._in_sight and not self.answers_at_once:  # what it says now and then may wait for the end of a cell
            return True
        since = time.monotonic() - UNSEEN_AFTER_S
        return any(at >= since for at in self._in_sight.values())

    @property
    def settled(self) -> bool:
        """Whether the output is plain HTML, and `static` is what of all there is should be saved."""
        return True

    def static(self) -> tuple[str, str]:
        """What there is to read now: as HTML, safe to insert, and as plain text."""
        raise NotImplementedError

    def tell(self, message: Message) -> None:
        """Send a message to the front end."""
        self.send(message)

    def fail(self, error: BaseException) -> None:
        """Show an error in the widget."""
        _log.debug("shown in a widget", exc_info=error)
        self.tell({"error": sound(f"{type(error).__name__}: {error}"[:_ERROR_KEPT])})

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task that belongs to no cell and no message."""
        assert self.loop is not None
        task = self.loop.create_task(self._shielded(work), context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await step_by_step(work, self._attended)
        except Exception as error:
            self.fail(error)

    def attend(self, callback: Callable[[], None]) -> None:
        """Call it now; what it prints and raises is shown in the widget."""
        with self._attended():
            try:
                callback()
            except Exception as error:
                self.fail(error)

    @contextmanager
    def _attended(self) -> Iterator[None]:
        with recorded_callback(type(self).__name__), prints_caught(self._show_printed):
            yield

    def _show_printed(self, text: str) -> None:
        if self.comm is None:  # it is closed, and shows nothing any more
            sys.stdout.write(text)
            return
        printed = self.printed + sound(text)
        self.printed = printed if len(printed) <= KEPT else f"…{printed[-KEPT:]}"

    # -- output ------------------------------------------------------------------------------------------------

    @property
    def view_bundle(self) -> Message:
        """What makes a front end show this widget itself, as a mime bundle."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }

    def bundle(self) -> Message:
        """The output: `static`, for the front end to take the place of."""
        body, plain = self.static()
        bundle: Message = {
            "text/plain": sound(plain),
            "text/html": f'<div class="interactive-infer mathjax_ignore {self.mark}">{body}</div>',
        }
        # Colab shows each output in a frame of its own, out of the front end's reach.
        return bundle | self.view_bundle if "google.colab" in sys.modules else bundle

    def show(self) -> None:
        """Display it in the current cell."""
        from IPython.display import display

        self._displayed = True
        display(self.bundle(), raw=True, display_id=self.display_id)

    def renew(self) -> None:
        """Bring the output up to date, if there is one: what is saved from now on."""
        if not self._displayed:
            return
        from IPython.display import update_display

        update_display(self.bundle(), raw=True, display_id=self.display_id)
        if self._pages > 1:  # which has never heard of the display, and sets its output itself
            self.tell({"output": self.bundle()})

    def _ipython_display_(self) -> None:
        self.show()

    # -- hearing -----------------------------------------------------------------------------------------------

    def _arrived(self, _: Panel, content: object, __: object) -> None:
        if isinstance(content, dict):
            self.on_loop(partial(self._answer, content))

    def on_loop(self, callback: Callable[[], None]) -> None:
        """`attend` to it on the loop, soon."""
        if self.loop is None or self.loop.is_closed():
            self.attend(callback)
        else:
            self.loop.call_soon_threadsafe(self.attend, callback, context=contextvars.Context())

    def _answer(self, content: Message) -> None:
        if content.get("renew") is True:
            self.renew()
        elif content.get("here") is True:
            self._pages += 1
            if self._pages > 1 and self.settled:  # the notebook's file may be from before that
                self.tell({"output": self.bundle()})
        elif content.get("dismiss") is True:
            self.printed = ""
        elif "visible" in content:
            self._look(content["visible"], content.get("page"))
        else:
            self.hear(content)

    def _look(self, visible: object, page: object) -> None:
        if not isinstance(visible, bool) or not isinstance(page, str):
            return
        if visible:
            self._in_sight[page] = time.monotonic()
            self.seen(True)
        elif self.answers_at_once:
            since = time.monotonic() - UNSEEN_AFTER_S
            self._in_sight = {name: at for name, at in self._in_sight.items() if name != page and at >= since}
            if not self._in_sight:
                self.seen(False)


def table(rows: list[tuple[str, str]], caption: str) -> str:
    """Names and values as an HTML table."""
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{markup(name)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap">{markup(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption>{markup(caption)}</caption><tbody>{body}</tbody></table>"
