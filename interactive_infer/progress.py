"""How far a load is, where somebody looks at it: a notebook, a terminal, or a log."""

from __future__ import annotations

import sys
import time
from typing import Protocol

_REDRAW_S = 0.1


class Bar(Protocol):
    """Draws one load."""

    def draw(self, stage: str, done: float) -> None:
        """`stage` is under way, the share `done` (0 to 1) of it behind us."""

    def close(self, seconds: float | None) -> None:
        """The load has taken `seconds`, or failed (None)."""


class ProgressBar:
    """A load's progress. `update` belongs to the loop; it redraws at most ten times a second.

    - In a notebook: a bar, whose place one line takes at the end, so that a saved notebook holds no stale bar.
    - In a terminal: tqdm's bar, gone at the end.
    - Elsewhere (a file, a pipe): one line on stderr for each stage, never redrawn.
    """

    def __init__(self, shown: bool) -> None:
        self._bar = _bar() if shown else None
        self._start = time.monotonic()
        self._stage, self._drawn_at = "", 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def update(self, stage: str, done: float) -> None:
        """Show `stage`, of which the share `done` (0 to 1) is behind us."""
        now = time.monotonic()
        if self._bar is None or (stage == self._stage and now - self._drawn_at < _REDRAW_S):
            return
        self._stage, self._drawn_at = stage, now
        self._bar.draw(stage, done)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close(time.monotonic() - self._start if kind is None else None)
            self._bar = None  # what the loading thread said last may come to the loop after this


def _bar() -> Bar:
    ipython = sys.modules.get("IPython")  # whoever runs under IPython has it imported
    if hasattr(ipython.get_ipython() if ipython is not None else None, "kernel"):
        from interactive_infer.notebook.loading import NotebookBar

        return NotebookBar()
    return _TerminalBar() if sys.stderr is not None and sys.stderr.isatty() else _Lines()


class _TerminalBar:
    def __init__(self) -> None:
        from tqdm import tqdm

        self._tqdm = tqdm(total=100, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}", leave=False)

    def draw(self, stage: str, done: float) -> None:
        self._tqdm.set_description_str(stage, refresh=False)
        self._tqdm.n = round(100 * done)
        self._tqdm.refresh()

    def close(self, seconds: float | None) -> None:
        self._tqdm.close()


class _Lines:
    def __init__(self) -> None:
        self._stage = ""

    def draw(self, stage: str, done: float) -> None:
        if stage != self._stage and sys.stderr is not None:
            self._stage = stage
            print(f"interactive_infer: {stage}", file=sys.stderr, flush=True)

    def close(self, seconds: float | None) -> None:
        pass
