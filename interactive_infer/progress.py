"""A progress bar for loading, in a notebook or a terminal."""

from __future__ import annotations

from typing import Any


class ProgressBar:
    """tqdm's bar for a load, in a notebook or a terminal. `update` belongs to the loop."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def update(self, stage: str, done: float) -> None:
        """Show `stage`, of which the share `done` (0 to 1) is behind us."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=100, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}", leave=False)
        self._bar.set_description_str(stage, refresh=False)
        self._bar.n = round(100 * done)
        self._bar.refresh()

    def __exit__(self, *_: object) -> None:
        self._shown = False
        if self._bar is not None:
            self._bar.close()
