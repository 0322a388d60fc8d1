"""The live text of one generation in the browser."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from interactive_infer.core.output import Output

if TYPE_CHECKING:
    from interactive_infer.notebook.display import Update

_HERE = Path(__file__).parent


class TokenView(anywidget.AnyWidget):
    """Shows text that grows.

    Only what is new crosses the wire, as messages `{"start": n, "text": "…", "status": "…"}`; `start` counts
    characters (code points) and so numbers the messages: a front end that has fewer than `start` has lost some, and
    sends `{"resend": n}` with the number that it has. Each time the text has doubled it goes out whole instead, as the
    synced trait `text`: that costs twice the text in all, shows a view that comes late what was before it, and heals a
    loss where the kernel cannot answer (ipykernel 6 while a cell runs).

    `publish` belongs to the thread that drives the engine; front-end messages may arrive on any and are handed to
    `loop` (None: answered where they arrive).
    """

    _esm = _HERE / "token_view.js"
    _css = _HERE / "token_view.css"

    text = traitlets.Unicode("").tag(sync=True)
    status = traitlets.Unicode("").tag(sync=True)

    def __init__(self, output: Output, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self._output = output
        self._loop = loop
        self._num_sent = 0
        self._last_status = ""
        self.on_msg(self._heard)

    @property
    def view_bundle(self) -> dict[str, Any]:
        """What makes a front end show this widget, as a mime bundle."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        }

    def publish(self, update: Update) -> None:
        """Send one update; its text follows on the text of all updates before."""
        self._num_sent += len(update.text)
        self._last_status = update.status
        if update.final or self._num_sent >= 2 * len(self.text):
            with self.hold_sync():
                self.text = self._output.text[: self._num_sent]
                self.status = update.status
        else:
            self._send_text(update.start, update.text)

    def _send_text(self, start: int, text: str) -> None:
        self.send({"start": start, "text": text, "status": self._last_status})

    def _heard(self, _: TokenView, content: Any, __: list[memoryview]) -> None:
        start = content.get("resend") if isinstance(content, dict) else None
        if not isinstance(start, int) or start < 0:
            return  # not a message of this widget's front end
        if self._loop is None or self._loop.is_closed():
            self._resend(start)
        else:
            self._loop.call_soon_threadsafe(self._resend, start)

    def _resend(self, start: int) -> None:
        self._send_text(start, self._output.text[start : self._num_sent])
