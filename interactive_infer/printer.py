"""What a running notebook shows, printed in a terminal as it comes."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interactive_infer.notebook.hostile import printable

if TYPE_CHECKING:
    from nbformat import NotebookNode


class StreamPrinter:
    """Prints what a running notebook shows, streamed texts as they come, from the kernel's published messages.

    One stream has the line at a time. While it goes on, others wait until they have `CHUNK` characters; when it has
    been silent for `PAUSE_S`, the next takes over at once.

    Attributes:
        last: the newest mime bundle of each display that was updated.
    """

    CHUNK = 60
    PAUSE_S = 0.5

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last: dict[str, dict[str, Any]] = {}
        self._clock = clock
        self._shown: dict[str, str] = {}  # per stream (a widget's comm, or a display), its text so far
        self._tokens: dict[str, list[str]] = {}  # per widget, those of its text
        self._waiting: dict[str, str] = {}  # per stream, what of it is not printed yet
        self._stream_of: dict[str, str] = {}  # display id -> the widget's comm that it shows
        self._speaker, self._spoke_at = "", -math.inf

    def cell(self, cell: NotebookNode) -> None:
        """Head the output of a cell that starts."""
        if cell.cell_type == "code":
            self.flush()
            lines = cell.source.strip().splitlines()
            head = f">>> {lines[0]}{' ...' * (len(lines) > 1)}"
            print(f"\n\n\x1b[2m{head}\x1b[0m" if _colour() else f"\n\n{head}")
            self._spoke_at = -math.inf

    def flush(self) -> None:
        """Print what still waits."""
        for stream in list(self._waiting):
            self._say(stream)

    def hear(self, message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            self._add("", content["text"])
            self._say("")
        elif kind == "comm_msg":
            self._hear_widget(content["comm_id"], content["data"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._hear_display(kind, content)

    def _hear_widget(self, comm: str, data: dict[str, Any]) -> None:
        """A message of `notebook.widgets.stream`, or a snapshot of one."""
        new = data.get("content") if data.get("method") == "custom" else data.get("state", {}).get("snapshot")
        if isinstance(new, dict) and "tokens" in new:
            tokens, first = self._tokens.setdefault(comm, []), new["from"]
            if first <= len(tokens) < first + len(new["tokens"]):
                tokens[first:] = new["tokens"]
                self._grow(comm, "".join(tokens))

    def _hear_display(self, kind: str, content: dict[str, Any]) -> None:
        data, display_id = content["data"], content.get("transient", {}).get("display_id", "")
        widget = data.get("application/vnd.jupyter.widget-view+json")
        if widget is not None:
            self._stream_of[display_id] = widget["model_id"]
            return
        text = data.get("text/plain", "")
        if kind == "update_display_data":
            self.last[display_id] = data
            self._grow(self._stream_of.get(display_id, display_id), text)
        elif not any(kind.startswith("image/") for kind in data):
            self._grow(display_id or repr(content), text)

    def _grow(self, stream: str, text: str) -> None:
        """Take what `text`, all of a stream, adds to what has been shown of it."""
        before = self._shown.get(stream, "")
        if len(text) > len(before) and text.startswith(before):
            self._shown[stream] = text
            self._add(stream, text[len(before) :])

    def _add(self, stream: str, text: str) -> None:
        self._waiting[stream] = self._waiting.get(stream, "") + text
        silent = self._clock() - self._spoke_at > self.PAUSE_S
        if stream == self._speaker or silent or len(self._waiting[stream]) >= self.CHUNK:
            self._say(stream)

    def _say(self, stream: str) -> None:
        text = self._waiting.pop(stream, "")
        if not text:
            return
        if stream != self._speaker and self._spoke_at > -math.inf:
            print()
        self._speaker, self._spoke_at = stream, self._clock()
        print(printable(text), end="", flush=True)


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
