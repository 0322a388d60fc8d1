"""A window of a timeline in numbers, and in words."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import numpy as np

from interactive_infer.timeline.analysis import (
    Bubble,
    Window,
    busy_intervals,
    duration,
    find_bubbles,
    host_intervals,
    intersect,
    lags_in,
    runnable_intervals,
    total,
)
from interactive_infer.timeline.recorder import Recording

STEP_EVENTS = "step events: an upper bound, gaps inside a step count as busy"


@dataclass(frozen=True)
class Summary:
    """A window of a timeline in numbers. None where there was nothing to measure.

    window_ns: (t0, t1); window_s its length.
    busy: device busy over the window, 0 to 1; `source` says what it was measured from.
    busy_runnable: device busy while sequences were runnable, over the time they were.
    host_work_s: the time of host work (`host_intervals`).
    overlap: the time of host work inside device busy, over all time of host work: the part that is hidden.
    steps, tokens, prompt_tokens: device steps that ended in the window, token ids they drew (a surplus token
        after a stop included), prompt tokens they took in; steps_per_s and tokens_per_s over the window.
    bubbles: in order of time.
    lag_*_ms: how late the heartbeats were that were due in the window. Percentiles are of the nearest rank: values
        that occurred.
    """

    device: str
    source: str
    window_ns: Window
    busy: float | None
    busy_runnable: float | None
    host_work_s: float
    overlap: float | None
    steps: int
    tokens: int
    prompt_tokens: int
    bubbles: tuple[Bubble, ...] = field(repr=False)
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None

    @property
    def window_s(self) -> float:
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.window_s if self.window_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.window_s if self.window_s else 0.0

    @property
    def largest_bubble(self) -> Bubble | None:
        return max(self.bubbles, key=lambda bubble: bubble.duration_ns, default=None)

    @property
    def bubble_s(self) -> float:
        """All bubbles together, s."""
        return sum(bubble.duration_ns for bubble in self.bubbles) / 1e9

    @property
    def causes(self) -> dict[str, float]:
        """Seconds of bubbles by cause, largest first; each bubble counts whole for its one cause."""
        sums: dict[str, int] = {}
        for bubble in self.bubbles:
            sums[bubble.cause] = sums.get(bubble.cause, 0) + bubble.duration_ns
        return {cause: ns / 1e9 for cause, ns in sorted(sums.items(), key=lambda item: -item[1])}

    def headline(self) -> str:
        """One sentence: busy, hidden, largest bubble."""
        if self.busy is None:
            return f"{self.device}: nothing recorded"
        text = f"{self.device} busy {percent(self.busy, 1)}"
        # A notebook idles between its cells: then the share of the window says little about the engine.
        if self.busy_runnable is not None and self.busy_runnable - self.busy > 0.01:
            text += f" of the window ({percent(self.busy_runnable, 1)} of the time there was work)"
        if self.overlap is not None:
            text += f", {percent(self.overlap)} of host work hidden"
        largest = self.largest_bubble
        return f"{text}; largest bubble {largest}" if largest else f"{text}; no bubbles"

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) in words, for people."""
        rows = [("window", f"{self.window_s:.3f} s"), ("measured from", self.source)]
        if self.busy is not None:
            rows.append((f"{self.device} busy", percent(self.busy, 1)))
        if self.busy_runnable is not None:
            rows.append(("busy while there was work", percent(self.busy_runnable, 1)))
        hidden = "" if self.overlap is None else f", {percent(self.overlap, 1)} of it hidden (overlap)"
        rows.append(("host work", f"{self.host_work_s:.3f} s{hidden}"))
        rows.append(("steps", f"{self.steps:,} ({self.steps_per_s:,.1f}/s)"))
        rows.append(("tokens drawn", f"{self.tokens:,} ({self.tokens_per_s:,.1f}/s)"))
        rows.append(("prompt tokens", f"{self.prompt_tokens:,}"))
        rows.append(("bubbles", f"{len(self.bubbles):,}, {duration(round(self.bubble_s * 1e9))} in all"))
        if self.largest_bubble is not None:
            rows.append(("largest bubble", str(self.largest_bubble)))
            shares = [f"{cause} {percent(s / self.bubble_s)}" for cause, s in list(self.causes.items())[:4]]
            rows.append(("bubble time by cause", ", ".join(shares)))
        if self.lag_p50_ms is not None:
            lag = f"p50 {self.lag_p50_ms:.2f} ms, p99 {self.lag_p99_ms:.2f} ms, max {self.lag_max_ms:.2f} ms"
            rows.append(("loop lag", lag))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join([self.headline(), *(f"  {what:<{width}}  {value}" for what, value in rows)])

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left">'
        body = "".join(
            f"<tr>{cell}{html.escape(what)}</td>{cell}{html.escape(value)}</td></tr>" for what, value in self.rows()
        )
        return f"<table><caption>{html.escape(self.headline())}</caption><tbody>{body}</tbody></table>"


def summarize(recording: Recording, window: Window, *, device: str = "device", source: str = STEP_EVENTS) -> Summary:
    """The numbers of [t0, t1); definitions at `Summary`."""
    t0, t1 = window
    busy = busy_intervals(recording, window)
    host = host_intervals(recording, window)
    runnable = runnable_intervals(recording, window)
    steps = recording.steps[(recording.steps["end"] > t0) & (recording.steps["end"] <= t1)]
    lags = lags_in(recording, window)["lag"] / 1e6
    ranks = np.percentile(lags, [50, 99, 100], method="inverted_cdf").tolist() if len(lags) else (None, None, None)
    p50, p99, worst = ranks
    return Summary(
        device=device,
        source=source,
        window_ns=window,
        busy=total(busy) / (t1 - t0) if t1 > t0 and len(recording.steps) else None,
        busy_runnable=total(intersect(busy, runnable)) / total(runnable) if len(runnable) else None,
        host_work_s=total(host) / 1e9,
        overlap=total(intersect(busy, host)) / total(host) if len(host) else None,
        steps=len(steps),
        tokens=int(steps["sampled"].sum()),
        prompt_tokens=int(steps["prefill_tokens"].sum()),
        bubbles=find_bubbles(recording, window),
        lag_p50_ms=p50,
        lag_p99_ms=p99,
        lag_max_ms=worst,
    )


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
