"""The live text of one generation, with its buttons, in the browser."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import traitlets

from interactive_infer.notebook.display import bundle, status
from interactive_infer.notebook.follower import loop_of
from interactive_infer.notebook.hostile import sound
from interactive_infer.notebook.widgets.panel import Message, Panel, source
from interactive_infer.notebook.widgets.stream import Stream

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

_SNAPSHOTS_UP_TO = 256
_FINISHED_KEPT = 100


class TokenView(Panel):
    """Shows a text that grows, and steers its generation. The messages are `Stream`'s.

    Each time the number of tokens has doubled, up to 256, all of them go out as the synced trait `snapshot` too: that
    costs twice the text in all, shows a view that comes late what was before it, and heals an early loss where the
    kernel cannot answer (ipykernel 6 while a cell runs).

    While it lasts the output holds the widget. With the end, or when the notebook is saved, or the kernel goes, it
    becomes the text as HTML, which the front end takes the place of (see `Panel`). An `ipywidgets.Output` is the
    exception: no update of a display reaches what is inside, so there the widget stays.

    Of the views whose text has ended 100 stay usable. Then one is retired: of a generation that is displayed more than
    once the oldest, else the one that ended first. Its text stays, its buttons go, and it lets go of its generation.
    The widget is kept, with the text as its trait `retired`: in an Output, and after a reload of the page, that is all
    there is of it. `close` retires too, and then gives up the widget.
    """

    _esm = source("panel.js", "stream.js", "token_view.js")

    snapshot = traitlets.Dict({}).tag(sync=True)
    retired = traitlets.Dict({}).tag(sync=True)
    """Empty while it is usable; then its last `text` and `status`."""

    _finished: ClassVar[list[TokenView]] = []

    def __init__(self, generation: Generation) -> None:
        self._in_snapshot = 0
        self._live = generation.finish_reason is None
        self._shown_whole = not self._live
        self.stream: Stream | None = Stream(generation, self.tell, self.spawn, self._ended)
        self._left: tuple[str, str] | None = None  # of a retired one, what `static` is for good
        super().__init__(loop_of(generation))

    def show(self) -> None:
        """Display it in the current cell, and follow the generation."""
        super().show()
        if self.stream is not None:
            self.stream.start()

    def bundle(self) -> Message:
        return super().bundle() | (self.view_bundle if self._live else {})

    def static(self) -> tuple[str, str]:
        if self.stream is None:
            assert self._left is not None
            return self._left
        text = bundle(self.stream.generation)
        return text["text/html"], text["text/plain"]

    @property
    def settled(self) -> bool:
        return not self._live

    def hear(self, message: Message) -> None:
        if self.stream is None:
            return  # it was sent before the front end knew
        self.stream.hear(message)
        if self.stream.generation.finish_reason is None:  # it was continued
            self._no_longer_finished()

    def seen(self, visible: bool) -> None:
        if self.stream is not None:
            self.stream.seen(visible)

    def close(self) -> None:
        if self.comm is not None:
            self._retire()
            if self._live:  # else the output would be a widget that is gone
                self._live = False
                self.renew()
        super().close()

    def _retire(self) -> None:
        if self.stream is None:
            return
        self._no_longer_finished()
        stream, self._left = self.stream, self.static()
        stream.stop()
        self.stream = None
        self.snapshot = {}
        self.retired = {"text": sound(stream.generation.text), "status": sound(status(stream.generation))}

    def _no_longer_finished(self) -> None:
        with contextlib.suppress(ValueError):
            self._finished.remove(self)

    def tell(self, message: Message) -> None:
        count = message.get("count", 0)
        if self.stream is None:
            self.send(message)
        elif 2 * self._in_snapshot <= count <= _SNAPSHOTS_UP_TO and "tokens" in message and count:
            self._in_snapshot = count
            self.snapshot = message if message["from"] == 0 else self.stream.batch(0)
        else:
            self.send(message)

    def _ended(self) -> None:
        if self._shown_whole:
            self._shown_whole = False
        else:
            self._live = False
            self.renew()
        self._no_longer_finished()
        self._finished.append(self)
        while len(self._finished) > _FINISHED_KEPT:
            shows = [view.stream and view.stream.generation for view in self._finished]
            times = Counter(map(id, shows))
            again = (index for index, generation in enumerate(shows) if times[id(generation)] > 1)
            self._finished[next(again, 0)]._retire()
