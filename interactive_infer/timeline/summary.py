"""A window of a timeline in numbers, and in words."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.analysis import (
    CriticalPath,
    Window,
    busy_intervals,
    critical_path,
    devices_of,
    duration,
    host_intervals,
    kernels_known,
    lags_in,
    profiled_intervals,
    runnable_intervals,
)
from interactive_infer.timeline.bubbles import Bubble, find_bubbles
from interactive_infer.timeline.intervals import intersect, total
from interactive_infer.timeline.recorder import CPU, Work
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.tokens import between_tokens_ns, first_token_ns

STEP_EVENTS = "the begin and end of each step: an upper bound, gaps inside a step count as busy"
SPAN_EVENTS = "the events around each device span: an upper bound, gaps inside a span count as busy"
KERNELS = "the kernels that torch.profiler saw"
OPERATORS = "the operators that torch.profiler saw on the CPU"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations in ms. Percentiles are of the nearest rank: values that occurred."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    def __str__(self) -> str:
        return f"p50 {self.p50:.2f} ms, p90 {self.p90:.2f} ms, p99 {self.p99:.2f} ms, max {self.max:.2f} ms"


def distribution(ns: NDArray[np.int64]) -> Distribution | None:
    """None of nothing."""
    if not len(ns):
        return None
    ms = ns / 1e6
    p50, p90, p99, most = np.percentile(ms, [50, 90, 99, 100], method="inverted_cdf").tolist()
    return Distribution(len(ms), float(ms.mean()), p50, p90, p99, most)


@dataclass(frozen=True, slots=True)
class Profiled:
    """The part of the window in which every kernel is known: its seconds, and device busy in it by kernels and by
    steps. Their difference is what step events count too much."""

    seconds: float
    busy: float
    busy_by_steps: float


@dataclass(frozen=True)
class Summary:
    """A window of a timeline in numbers. None where there was nothing to measure.

    window_ns: (t0, t1); window_s its length.
    busy: device busy over the window, 0 to 1; `source` says what it was measured from. Of several devices the mean;
        `devices` has each, by its index (-1: the CPU).
    busy_runnable: device busy while sequences were runnable, over the time they were.
    host_work_s: the time of host work (`host_intervals`).
    overlap: the time of host work inside device busy, over all time of host work: the part that is hidden. Where busy
        is that of kernels, so is this; bubbles are always those between steps.
    steps, tokens, prompt_tokens: device steps that ended in the window, token ids they drew (a surplus token
        after a stop included), prompt tokens they took in; steps_per_s and tokens_per_s over the window.
    bubbles: in order of time.
    critical_path: what the next token waited for (`CriticalPath`).
    first_token, between_tokens: from the request to the first token, and from token to token of one generation, both on
        the host, for tokens that came in the window.
    lag: how late the heartbeats were that were due in the window.
    profiled: what kernels say, where they are known.
    clock_error_ns: how far off the device's times may be on the host's clock; 0 where they were measured with it.
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
    devices: dict[int, float]
    critical_path: CriticalPath | None
    first_token: Distribution | None
    between_tokens: Distribution | None
    lag: Distribution | None
    profiled: Profiled | None
    clock_error_ns: int

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
        if len(self.devices) > 1:
            shares = [f"{device_name(index)} {percent(busy, 1)}" for index, busy in self.devices.items()]
            rows.append(("busy by device", ", ".join(shares)))
        if self.profiled is not None:
            known = self.profiled
            rows.append(
                (
                    "profiled part",
                    f"{known.seconds:.3f} s: busy {percent(known.busy, 1)} by kernels, "
                    f"{percent(known.busy_by_steps, 1)} by steps",
                )
            )
        if self.overlap is not None:
            hidden = f"{percent(self.overlap, 1)} of it hidden (overlap)"
            rows.append(("host work", f"{self.host_work_s:.3f} s, {hidden}"))
        if self.critical_path is not None:
            device, host, other = (percent(share, 1) for share in self.critical_path)
            rows.append(("tokens waited for", f"device {device}, host work {host}, other {other}"))
        if self.steps:
            rows.append(("steps", f"{self.steps:,} ({self.steps_per_s:,.1f}/s)"))
            rows.append(("tokens drawn", f"{self.tokens:,} ({self.tokens_per_s:,.1f}/s)"))
            rows.append(("prompt tokens", f"{self.prompt_tokens:,}"))
        if self.first_token is not None:
            rows.append((f"first token ({self.first_token.count:,})", str(self.first_token)))
        if self.between_tokens is not None:
            rows.append((f"between tokens ({self.between_tokens.count:,})", str(self.between_tokens)))
        rows.append(("bubbles", f"{len(self.bubbles):,}, {duration(round(self.bubble_s * 1e9))} in all"))
        if self.largest_bubble is not None:
            rows.append(("largest bubble", str(self.largest_bubble)))
            shares = [f"{cause} {percent(s / self.bubble_s)}" for cause, s in list(self.causes.items())[:4]]
            rows.append(("bubble time by cause", ", ".join(shares)))
        if self.lag is not None:
            rows.append(("loop lag", str(self.lag)))
        if self.clock_error_ns:
            rows.append(("device clock", f"± {self.clock_error_ns / 1e3:.0f} µs on the host's"))
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
        # Names are data: a front end would set what stands between two dollar signs as mathematics.
        caption = f"<caption>{html.escape(self.headline())}</caption>"
        return f'<table class="mathjax_ignore tex2jax_ignore">{caption}<tbody>{body}</tbody></table>'


def summarize(recording: Recording, window: Window, *, device: str = "device", source: str = STEP_EVENTS) -> Summary:
    """The numbers of [t0, t1); definitions at `Summary`. Where every kernel of the window is known, busy is theirs."""
    t0, t1 = window
    known = profiled_intervals(recording, window)
    by_kernels = kernels_known(recording, window)
    busy = busy_intervals(recording, window)
    ran = busy_intervals(recording, window, kernels=by_kernels)
    shares = {}
    if t1 > t0:
        for index in devices_of(recording):
            mine = busy_intervals(recording, window, device=index, kernels=by_kernels)
            shares[index] = total(mine) / (t1 - t0)
    host = host_intervals(recording, window)
    runnable = runnable_intervals(recording, window)
    steps = recording.steps[(recording.steps["end"] > t0) & (recording.steps["end"] <= t1)]
    if source == STEP_EVENTS and not len(recording.steps):
        source = SPAN_EVENTS
    profiled = None
    if len(known):
        kernels = busy_intervals(recording, window, kernels=True)
        profiled = Profiled(
            total(known) / 1e9,
            total(intersect(kernels, known)) / total(known),
            total(intersect(busy, known)) / total(known),
        )
    return Summary(
        device=device,
        source=profiled_source(recording) if by_kernels else source,
        window_ns=window,
        busy=sum(shares.values()) / len(shares) if shares else None,
        busy_runnable=total(intersect(ran, runnable)) / total(runnable) if len(runnable) else None,
        host_work_s=total(host) / 1e9,
        overlap=total(intersect(ran, host)) / total(host) if len(host) else None,
        steps=len(steps),
        tokens=int(steps["sampled"].sum()),
        prompt_tokens=int(steps["prefill_tokens"].sum()),
        bubbles=find_bubbles(recording, window),
        devices=shares,
        critical_path=critical_path(recording, window),
        first_token=distribution(first_token_ns(recording, window)),
        between_tokens=distribution(between_tokens_ns(recording, window)),
        lag=distribution(lags_in(recording, window)["lag"]),
        profiled=profiled,
        clock_error_ns=recording.clock_error_ns,
    )


def profiled_source(recording: Recording) -> str:
    """What a profile's busy time was measured from."""
    devices = recording.work["device"][recording.work["kind"] == Work.KERNEL]
    return OPERATORS if len(devices) and (devices == CPU).all() else KERNELS


def device_name(index: int) -> str:
    """In words, where there are several."""
    return "CPU" if index == CPU else f"GPU {index}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
