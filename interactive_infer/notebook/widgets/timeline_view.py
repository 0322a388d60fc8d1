"""The last seconds of a timeline, scrolling in the browser."""

from __future__ import annotations

import asyncio
import contextvars
import time
import weakref
from typing import Any

import numpy as np
import traitlets
from numpy.typing import NDArray

from interactive_infer.errors import WrongLoopError
from interactive_infer.notebook.hostile import markup, sound
from interactive_infer.notebook.widgets.panel import Message, Panel, source
from interactive_infer.timeline import Phase, Recorder, Summary, Timeline, Work
from interactive_infer.timeline.lanes import HOST_LANES

UPDATE_S = 0.25
"""Between two messages to the browser."""
_MOST_ROWS = 20_000

# A lane's number is what the browser gets with each interval. The first four lie in one lane, the device's.
_DECODE, _PREFILL, _DEVICE_SPAN, _OTHER, _FIRST_PHASE = 0, 1, 2, 3, 8
_SHOWN = {phase: label for phase, label in HOST_LANES.items() if phase not in (Phase.LOAD, Phase.OTHER)}


class TimelineView(Panel):
    """Draws what a recorder hears, on a canvas, while somebody looks at it.

    Only what is new crosses the wire, a few times a second, as messages `{"now": ms, "first": bool}` with four buffers:
    float64 `(n, 2)` starts and ends of intervals, uint8 `(n,)` their lanes, float64 `(m, 2)` when a heartbeat ran and
    how late, float64 `(k, 2)` from when on how many texts could run; all times in ms from the view's making. The
    browser draws, keeps what it needs, and works out the shares. Out of sight, nothing is sent; in sight again, the
    last seconds come as a first message, as they do for a page that says `{"hello": true}`.

    What is saved is the summary of the last seconds before it went out of sight, or what its page said of them when the
    notebook was saved. Raises WrongLoopError where no loop runs.
    """

    _esm = source("panel.js", "timeline_view.js")
    _css = source("panel.css", "timeline_view.css")

    seconds = traitlets.Float(10.0).tag(sync=True)
    device = traitlets.Unicode("device").tag(sync=True)
    lanes = traitlets.Dict().tag(sync=True)

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, timeline: Timeline, seconds: float) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoopError(
                "the live view is kept up to date by the running event loop, and none runs here; use figure()"
            ) from None
        lanes = {str(_FIRST_PHASE + phase): label for phase, label in _SHOWN.items()}
        super().__init__(loop, seconds=float(seconds), device=sound(timeline.device), lanes=lanes)
        self._recorder = weakref.ref(timeline.recorder)
        self._source = timeline.source
        self._origin_ns = time.perf_counter_ns()
        self._after: list[int] | None = None
        self._summary: Summary | None = None

    @property
    def sending(self) -> bool:
        """Whether anything is sent now and then: somebody sees it, and there is something to see."""
        return self._timer is not None

    def hear(self, message: Message) -> None:
        if message.get("hello") is True:
            self._after = None

    def seen(self, visible: bool) -> None:
        if not visible:
            if self._cease():
                self.spawn(self._sum_up())
        elif self._timer is None:
            self._after = None
            self._tick()

    def close(self) -> None:
        self._cease()
        super().close()

    @property
    def settled(self) -> bool:
        return self._summary is not None  # until then a page knows better what is to be saved

    def static(self) -> tuple[str, str]:
        if self._summary is not None:
            return self._summary._repr_html_(), str(self._summary)
        words = f"{self.device}: the last {self.seconds:g} s, live"
        return f"<p>{markup(words)}</p>", words

    def _cease(self) -> bool:
        """Whether it was sending."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _tick(self) -> None:
        self._timer = None
        recorder = self._recorder()
        if recorder is None or self.comm is None:
            return
        if not self.in_sight:  # its page went without a word
            self.spawn(self._sum_up())
            return
        assert self.loop is not None
        self._timer = self.loop.call_later(UPDATE_S, self._tick, context=contextvars.Context())
        start_ns = time.perf_counter_ns()
        self._publish(recorder, start_ns)
        # Not as the engine's publishing: this goes on while there is nothing to do.
        recorder.record(Phase.CALLBACK, start_ns, time.perf_counter_ns(), name="live view")

    async def _sum_up(self) -> None:
        """Have the output say how it was."""
        recorder = self._recorder()
        if recorder is not None:
            timeline = Timeline(recorder, device=self.device, source=self._source)
            # Thousands of records are gone through: not on the loop.
            self._summary = await asyncio.to_thread(timeline.summary, self.seconds)
        if self.comm is not None:
            self.renew()

    def _publish(self, recorder: Recorder, now_ns: int) -> None:
        first = self._after is None
        parts = recorder.tail(self._after or (0, 0, 0, 0, 0))
        numbers = [int(rows["number"][-1]) if len(rows) else 0 for rows in parts]
        self._after = [max(pair) for pair in zip(numbers, self._after or numbers, strict=True)]
        spans, steps, work, lags, edges = parts
        spans = spans[np.isin(spans["phase"], list(_SHOWN))]
        work = work[work["kind"] != Work.KERNEL]
        rows = np.concatenate([self._ms(part, "start", "end") for part in (steps, work, spans)])
        lanes = np.concatenate(
            [
                np.where(steps["prefill_tokens"] > 0, _PREFILL, _DECODE),
                np.where(work["kind"] == Work.OTHER, _OTHER, _DEVICE_SPAN),
                spans["phase"] + _FIRST_PHASE,
            ]
        )
        now = (now_ns - self._origin_ns) / 1e6
        kept = np.flatnonzero(rows[:, 1] > now - 1e3 * self.seconds)
        kept = kept[np.argsort(rows[kept, 1])][-_MOST_ROWS:]
        late = np.stack([(lags["at"] - self._origin_ns) / 1e6, lags["lag"] / 1e6], axis=1)[-_MOST_ROWS:]
        counts = np.stack([(edges["at"] - self._origin_ns) / 1e6, edges["count"]], axis=1)[-_MOST_ROWS:]
        buffers = [rows[kept].tobytes(), lanes[kept].astype(np.uint8).tobytes(), late.tobytes(), counts.tobytes()]
        self.send({"now": now, "first": first}, buffers)

    def _ms(self, records: NDArray[Any], *names: str) -> NDArray[np.float64]:
        times: NDArray[np.float64] = np.stack([(records[name] - self._origin_ns) / 1e6 for name in names], axis=1)
        return times
