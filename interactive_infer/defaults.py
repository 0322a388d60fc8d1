"""An engine's own defaults of sampling: what holds for a call that says nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interactive_infer.sampling import SamplingParams


class Defaults:
    """`engine.defaults.update(temperature=0.7)` holds for every later `generate` and `chat` of that engine that is
    given no SamplingParams; single parameters of a call override it. What runs already is not touched.

    `listeners` are called after each change, on the thread that made it.
    """

    def __init__(self) -> None:
        self.params = SamplingParams()
        self.listeners: list[Callable[[], None]] = []

    def update(self, **changes: Any) -> None:
        """Raises InvalidRequestError for an unknown or impossible value; then nothing is changed."""
        self.params = self.params.replace(**changes)
        for listener in tuple(self.listeners):
            listener()

    def __repr__(self) -> str:
        return f"<Defaults {self.params}>"
