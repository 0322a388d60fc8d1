"""The bar of a load in a notebook's output, and the line that it leaves."""

from __future__ import annotations

import html
import uuid

from IPython.display import display, update_display


class NotebookBar:
    """One output of the current cell, in plain HTML. While it is drawn its text/plain is empty, so that a front end
    without HTML, which cannot replace an output either, keeps nothing stale.
    """

    def __init__(self) -> None:
        self._display_id = uuid.uuid4().hex
        display(_bundle("loading", 0.0), raw=True, display_id=self._display_id)

    def draw(self, stage: str, done: float) -> None:
        update_display(_bundle(stage, done), raw=True, display_id=self._display_id)

    def close(self, seconds: float | None) -> None:
        line = "" if seconds is None else f"loaded in {seconds:.1f} s"
        update_display({"text/plain": line}, raw=True, display_id=self._display_id)


def _bundle(stage: str, done: float) -> dict[str, str]:
    bar = f'<progress max="1" value="{done:.2f}" style="width: 20em" aria-label="loading"></progress>'
    return {"text/plain": "", "text/html": f"{bar} {html.escape(stage)}"}
