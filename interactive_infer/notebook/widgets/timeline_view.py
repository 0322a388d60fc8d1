"""The last seconds of a timeline, scrolling in the browser."""

from __future__ import annotations

import asyncio
import time
import weakref
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from numpy.typing import NDArray

from interactive_infer.errors import WrongLoopError
from interactive_infer.notebook.hostile import sound
from interactive_infer.notebook.kernel import keep_live
from interactive_infer.timeline import Phase, Recorder, Timeline, Work

_HERE = Path(__file__).parent

UPDATE_S = 0.25
"""Between two messages to the browser."""
_MOST_ROWS = 20_000
_UNHEARD_S = 30.0
"""Where no front end has been heard from for so long, there is probably none."""

# A lane's number is what the browser gets with each interval. The first four lie in one lane, the device's.
_DECODE, _PREFILL, _DEVICE_SPAN, _OTHER, _FIRST_PHASE = 0, 1, 2, 3, 8
_SHOWN = {
    Phase.PLAN: "plan",
    Phase.LAUNCH: "launch",
    Phase.COMMIT: "commit",
    Phase.DETOKENIZE: "detokenize",
    Phase.PUBLISH: "publish",
    Phase.CAPTURE: "capture",
    Phase.AWAIT: "awaiting",
    Phase.GC: "garbage coll.",
    Phase.CALLBACK: "callbacks",
    Phase.USER: "user spans",
    Phase.CELL: "user cells",
}


class TimelineView(anywidget.AnyWidget):
    """Draws what a recorder hears, on a canvas.

    Only what is new crosses the wire, a few times a second, as messages `{"now": ms, "first": bool}` with four buffers:
    float64 `(n, 2)` starts and ends of intervals, uint8 `(n,)` their lanes, float64 `(m, 2)` when a heartbeat ran and
    how late, float64 `(k, 2)` from when on how many texts could run; all times in ms from the view's making. The
    browser draws, keeps what it needs, and works out the shares. It sends `{"seen": bool}` whenever it begins or ceases
    to be visible: unseen, nothing is sent; seen again, the last seconds come as a first message.

    Sending belongs to the event loop on which it was made; front-end messages may arrive on any thread.
    """

    _esm = _HERE / "timeline_view.js"
    _css = _HERE / "timeline_view.css"

    seconds = traitlets.Float(10.0).tag(sync=True)
    device = traitlets.Unicode("device").tag(sync=True)
    lanes = traitlets.Dict().tag(sync=True)

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, timeline: Timeline, seconds: float) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoopError(
                "the live view is kept up to date by the running event loop, and none runs here; use figure()"
            ) from None
        lanes = {str(_FIRST_PHASE + phase): label for phase, label in _SHOWN.items()}
        super().__init__(seconds=float(seconds), device=sound(timeline.device), lanes=lanes)
        keep_live(self)
        self._recorder = weakref.ref(timeline.recorder)
        self._origin_ns = time.perf_counter_ns()
        self._heard_at = time.monotonic()
        self._after: list[int] | None = None
        self.on_msg(self._heard)
        self._see(True)

    @property
    def sending(self) -> bool:
        """Whether anything is sent now and then: somebody sees it, and there is something to see."""
        return self._timer is not None

    def close(self) -> None:
        self._cease()
        super().close()

    def _cease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _heard(self, _: TimelineView, content: Any, __: list[memoryview]) -> None:
        seen = content.get("seen") if isinstance(content, dict) else None
        if isinstance(seen, bool) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._see, seen)

    def _see(self, seen: bool) -> None:
        """On the loop: begin with the last seconds, or cease."""
        self._heard_at = time.monotonic()
        self._cease()
        if seen:
            self._after = None
            self._tick()

    def _tick(self) -> None:
        self._timer = None
        recorder = self._recorder()
        # The first message says whether a front end is there: it answers by telling that it is seen.
        if recorder is None or time.monotonic() - self._heard_at > _UNHEARD_S:
            return
        self._timer = self._loop.call_later(UPDATE_S, self._tick)
        start_ns = time.perf_counter_ns()
        self._publish(recorder, start_ns)
        # Not as the engine's publishing: this goes on while there is nothing to do.
        recorder.record(Phase.CALLBACK, start_ns, time.perf_counter_ns(), name="live view")

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
