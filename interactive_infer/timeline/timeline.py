"""`Timeline`: what a person holds to see a recorder's numbers, figure and trace."""

from __future__ import annotations

import sys
from os import PathLike
from typing import TYPE_CHECKING, Self

from interactive_infer.errors import InvalidRequestError, MissingPackageError
from interactive_infer.timeline import trace
from interactive_infer.timeline.analysis import window_of
from interactive_infer.timeline.recorder import Recorder, Span
from interactive_infer.timeline.summary import STEP_EVENTS, Summary, summarize

if TYPE_CHECKING:
    from interactive_infer.timeline.figure import TimelineFigure


class Timeline:
    """Was the device busy, and if not, why.

    Every engine has one (`engine.timeline`); `Timeline()` stands alone for a training loop or other device
    work: call `timeline.recorder.step(...)` for what ran on the device, `with timeline.span("my work"):` for
    what the host did meanwhile.

    Args:
        recorder: where the records are; a new one by default.
        device: the device's name in titles ("CPU device", "GPU").
        source: what the device's intervals were measured from, and what that leaves out.
    """

    def __init__(self, recorder: Recorder | None = None, *, device: str = "device", source: str = STEP_EVENTS) -> None:
        self.recorder = Recorder() if recorder is None else recorder
        self.device = device
        self.source = source

    def span(self, name: str) -> Span:
        """`with timeline.span("my work"):` puts the block on the timeline, as a cause a bubble can have."""
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("name", name, "give the span a name, a string")
        return self.recorder.span(name)

    def summary(self, last: float | None = None) -> Summary:
        """The numbers of all that is recorded, or of its `last` seconds (back from the newest work)."""
        recording = self.recorder.snapshot()
        return summarize(recording, window_of(recording, last), device=self.device, source=self.source)

    def figure(self, last: float | None = None, theme: str = "light") -> TimelineFigure:
        """Draw the window as a matplotlib figure, which a notebook displays as a cell's last line.

        Args:
            last: as in `summary`.
            theme: "light" or "dark".

        Raises MissingPackageError where matplotlib is not installed.
        """
        try:
            from interactive_infer.timeline.figure import draw
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            raise MissingPackageError(
                "the figure is drawn with matplotlib, which is not installed: pip install matplotlib, or install this "
                "package with its [notebook] extra. summary() and save() do without"
            ) from error

        recording = self.recorder.snapshot()
        window = window_of(recording, last)
        return draw(recording, window, device=self.device, source=self.source, theme=theme)

    def show(self, last: float | None = None, theme: str = "light") -> None:
        """Display the figure now; outside of IPython print the summary."""
        # Whoever runs under IPython has it imported; nobody else needs it.
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            print(self.summary(last))
            return
        from IPython.display import display

        display(self.figure(last, theme))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the records as Chrome trace-event JSON: opens in ui.perfetto.dev, and in `Timeline.load`."""
        trace.save(self.recorder.snapshot(), path, device=self.device, source=self.source)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """A timeline from a file that `save` wrote, with equal records.

        Raises FileNotFoundError when there is none, InvalidRequestError when it is something else.
        """
        recording, device, source = trace.load(path)
        return cls(Recorder.of(recording), device=device, source=source)

    def clear(self) -> None:
        """Forget all that was recorded."""
        self.recorder.clear()

    def __repr__(self) -> str:
        recording = self.recorder.snapshot()
        held = f"{len(recording.steps):,} steps, {len(recording.spans):,} host spans"
        return f"<Timeline of {self.device}: {held}>"
