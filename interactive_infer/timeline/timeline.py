"""`Timeline`: what a person holds to see a recorder's numbers, figure and trace."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from interactive_infer.errors import InvalidRequestError, MissingPackageError
from interactive_infer.timeline import trace
from interactive_infer.timeline.analysis import FURTHEST_NS, Window, window_of
from interactive_infer.timeline.beside import beside
from interactive_infer.timeline.device_spans import DeviceEvents, DeviceSpan, DeviceSpans
from interactive_infer.timeline.profiler import Profile
from interactive_infer.timeline.recorder import Recorder, Span
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.steps import Step, step_by_number, step_of_token
from interactive_infer.timeline.summary import STEP_EVENTS, Summary, summarize

if TYPE_CHECKING:
    from interactive_infer.timeline.figure import TimelineFigure

_LIVE_VIEW = "interactive_infer.notebook.widgets.timeline_view"
"""Imported when it is asked for: nothing here needs a notebook."""


class Clock(Protocol):
    @property
    def error_ns(self) -> int: ...


class Timeline:
    """Was the device busy, and if not, why.

    Every engine has one (`engine.timeline`); `Timeline()` stands alone for a training loop or other device work:
    `with timeline.span("forward", device=True):` for what runs on the device, `with timeline.span("my work"):` for what
    the host does meanwhile.

    Args:
        recorder: where the records are; a new one by default.
        device: the device's name in titles ("CPU device", "GPU").
        source: what the device's intervals were measured from, and what that leaves out.
        events: where device spans get their events; by default CUDA, or without a card the host's clock.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        *,
        device: str = "device",
        source: str = STEP_EVENTS,
        events: DeviceEvents | None = None,
    ) -> None:
        self.recorder = Recorder() if recorder is None else recorder
        self.device = device
        self.source = source
        self.clock: Clock | None = None
        """What places steps on the host's clock; None where they were measured with that."""
        self._device_spans = DeviceSpans(self.recorder, events)
        self._clock_error_ns = 0  # of the records that it was made with

    def span(self, name: str, *, device: bool = False) -> Span | DeviceSpan:
        """`with timeline.span("my work"):` puts the block on the timeline, as a cause a bubble can have.

        device: also what the block launches on the current stream, between two events, which makes the device busy.
            Nothing waits; it is on the timeline once the stream has come so far.
        """
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("name", name, "give the span a name, a string")
        return DeviceSpan(self.recorder, self._device_spans, name) if device else self.recorder.span(name)

    def recording(self) -> Recording:
        """What is recorded now, as arrays."""
        self._device_spans.settle()
        clock_ns = 0 if self.clock is None else self.clock.error_ns
        error_ns = max(clock_ns, self._device_spans.error_ns, self._clock_error_ns)
        return replace(self.recorder.snapshot(), clock_error_ns=error_ns)

    def summary(self, last: float | None = None, *, window: Window | None = None) -> Summary:
        """The numbers of all that is recorded, of its `last` seconds (back from the newest work), or of a window
        (t0, t1) in ns on `time.perf_counter_ns`."""
        recording = self.recording()
        return summarize(recording, _chosen(recording, last, window), device=self.device, source=self.source)

    def figure(
        self, last: float | None = None, theme: str = "light", *, window: Window | None = None
    ) -> TimelineFigure:
        """Draw the window as a matplotlib figure, which a notebook displays as a cell's last line.

        Args:
            last, window: as in `summary`.
            theme: "light" or "dark".

        Raises MissingPackageError where matplotlib is not installed.
        """
        draw = _drawing("figure").draw
        recording = self.recording()
        window = _chosen(recording, last, window)
        figure: TimelineFigure = draw(recording, window, device=self.device, source=self.source, theme=theme)
        return figure

    def show(self, last: float | None = None, theme: str = "light", *, window: Window | None = None) -> None:
        """Display the figure now; outside of IPython print the summary."""
        # Whoever runs under IPython has it imported; nobody else needs it.
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            print(self.summary(last, window=window))
            return
        from IPython.display import display

        display(self.figure(last, theme, window=window))

    def live(self, seconds: float = 10.0) -> Any:
        """A widget that scrolls the last `seconds`, drawn by the browser; as a cell's last line it is displayed.

        It is told of new records a few times a second by the running event loop, and of none while nobody sees it.
        Raises MissingPackageError where anywidget is not installed, InvalidRequestError for impossible seconds.
        """
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not (is_number and 0.5 <= seconds <= 120):
            raise InvalidRequestError("seconds", seconds, "give the width of the view, 0.5 to 120 seconds")
        try:
            module = importlib.import_module(_LIVE_VIEW)
        except ModuleNotFoundError as error:
            if error.name not in ("anywidget", "traitlets", "ipywidgets"):
                raise
            raise MissingPackageError(
                f"the live view is a widget, and {error.name} is not installed: pip install anywidget, or install this "
                "package with its [notebook] extra. figure() and summary() do without"
            ) from error
        return module.TimelineView(self, seconds)

    def profile(self, steps: int | None = None) -> Profile:
        """`async with timeline.profile(steps=50):` adds the kernels that torch.profiler sees (`Profile`)."""
        return Profile(self.recorder, steps)

    def step_of(self, generation: Any, token: Any) -> Step | None:
        """The step that drew a token: `timeline.step_of(gen, gen.tokens[3])`, or by numbers (`gen.number`, index).

        None where it is not recorded (any more). `step(step.step_id).drawn` leads back.
        """
        numbers = []
        for argument, value, attribute in (("generation", generation, "number"), ("token", token, "index")):
            number = getattr(value, attribute, value)
            if callable(number) or not isinstance(number, int) or isinstance(number, bool):
                raise InvalidRequestError(argument, value, f"give an object with `{attribute}`, or that number")
            numbers.append(number)
        return step_of_token(self.recorder.snapshot(), *numbers)

    def step(self, step_id: int) -> Step | None:
        """A step by its number, with the tokens that it drew; None where it is not recorded (any more)."""
        return step_by_number(self.recorder.snapshot(), step_id)

    def copy(self) -> Timeline:
        """A timeline with what is recorded now, to be kept beside later ones (`compare`)."""
        return Timeline._of(self.recording(), self.device, self.source)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the records as Chrome trace-event JSON: opens in ui.perfetto.dev, and in `Timeline.load`.

        A file that is there is replaced only once the new one is whole. Raises InvalidRequestError where `path` is no
        path, OSError (of `path`) where it cannot be written.
        """
        trace.save(self.recording(), path, device=self.device, source=self.source)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """A timeline from a file that `save` wrote, with equal records; or from a trace that torch.profiler exported
        (`.json` or `.json.gz`), with its kernels, or on a CPU the outermost operators.

        Raises FileNotFoundError when there is none, InvalidRequestError when it is something else, or damaged.
        """
        return Timeline._of(*trace.load(path))

    @classmethod
    def _of(cls, recording: Recording, device: str, source: str) -> Timeline:
        timeline = cls(Recorder.of(recording), device=device, source=source)
        timeline._clock_error_ns = recording.clock_error_ns
        return timeline

    def clear(self) -> None:
        """Forget all that was recorded."""
        self.recorder.clear()

    def __repr__(self) -> str:
        recording = self.recorder.snapshot()
        held = f"{len(recording.steps):,} steps, {len(recording.spans):,} host spans"
        return f"<Timeline of {self.device}: {held}>"


def compare(
    timelines: Mapping[str, Timeline], last: float | None = None, theme: str = "light", *, together: bool = False
) -> TimelineFigure:
    """Draw several timelines one above the other on one scale, with a table of their numbers.

    `compare({"blocking": a, "awaiting": b})` sets each one's beginning at the left edge. `together`: they went on at
    the same time (several engines), so one window holds for all, and a device that worked for one was not idle for
    another. `together()` gives such timelines for their numbers.
    """
    _check(timelines)
    draw = _drawing("comparison").draw_several
    held = {str(name): (timeline.recording(), timeline.device, timeline.source) for name, timeline in timelines.items()}
    figure: TimelineFigure = draw(held, last, theme=theme, together=together)
    return figure


def together(timelines: Mapping[str, Timeline]) -> dict[str, Timeline]:
    """Copies of timelines of engines that ran at the same time: in each, what the others did is there too.

    A device that worked for one engine was not idle for another, and a bubble can be put down to another engine
    ("b: launching"): `together({"a": a.timeline, "b": b.timeline})["a"].summary()`.
    """
    _check(timelines)
    joined = beside({str(name): timeline.recording() for name, timeline in timelines.items()})
    return {
        name: Timeline._of(joined[str(name)], timeline.device, timeline.source) for name, timeline in timelines.items()
    }


def _check(timelines: Mapping[str, Timeline]) -> None:
    is_dict = isinstance(timelines, Mapping)
    if not is_dict or not timelines or not all(isinstance(timeline, Timeline) for timeline in timelines.values()):
        raise InvalidRequestError("timelines", timelines, "give a dict of at least one Timeline by name")


def _drawing(module: str) -> Any:
    """A module that needs matplotlib."""
    try:
        return importlib.import_module(f"interactive_infer.timeline.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise MissingPackageError(
            "the figure is drawn with matplotlib, which is not installed: pip install matplotlib, or install this "
            "package with its [notebook] extra. summary() and save() do without"
        ) from error


def _chosen(recording: Recording, last: float | None, window: Window | None) -> Window:
    if window is None:
        return window_of(recording, last)
    try:
        t0, t1 = (int(at) for at in window)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError("window", window, "give (t0, t1) in ns on time.perf_counter_ns") from error
    if t1 <= t0 or last is not None:
        raise InvalidRequestError("window", window, "give (t0, t1) with t0 < t1, and no `last` beside it")
    if not -FURTHEST_NS < t0 < t1 < FURTHEST_NS:
        raise InvalidRequestError("window", window, "give (t0, t1) in ns, between -2**62 and 2**62")
    return t0, t1
