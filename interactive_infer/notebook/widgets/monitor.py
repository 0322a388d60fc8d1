"""How full and how busy an engine is, live."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import traitlets

from interactive_infer.notebook.hostile import sound
from interactive_infer.notebook.widgets.panel import Panel, source, table
from interactive_infer.timeline.intervals import clip, intervals, total, union

if TYPE_CHECKING:
    from interactive_infer.engine import Engine

PERIOD_S = 1 / 3
WINDOW_S = 2.0
"""Tokens/s, busy and lag are over so long, back from now."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at an engine.

    `tokens_per_s`: drawn by steps that ended in the window. `busy`: 0 to 1, the share of the window in which such a
    step was on the device (an upper bound: gaps inside a step count). `lag_ms`: the latest that a heartbeat was, None
    without one (the heart beats while anything is unfinished). `memory_bytes`: of the process; `device_bytes`: of the
    card, in use and in all, by every process; None on a CPU.
    """

    running: int
    waiting: int
    paused: int
    pages: int
    pages_in_all: int
    tokens_per_s: float
    busy: float
    lag_ms: float | None
    memory_bytes: int | None
    device_bytes: tuple[int, int] | None


def look_at(engine: Engine) -> Figures:
    """Costs a fraction of a millisecond."""
    parts = engine._parts
    scheduler, recorder = parts.scheduler, engine.timeline.recorder
    now = time.perf_counter_ns()
    begin = now - int(WINDOW_S * 1e9)
    steps, lags = recorder._steps.read(), recorder._lags.read()
    steps = steps[steps["end"] > begin]
    lags = lags[lags["at"] > begin]
    place = parts.device.torch_device
    free_and_all = torch.cuda.mem_get_info(place) if place.type == "cuda" else None
    return Figures(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        paused=len(scheduler.paused),
        pages=parts.cache.num_held,
        pages_in_all=parts.kv_cache_tokens // parts.page_size,
        tokens_per_s=float(steps["sampled"].sum()) / WINDOW_S,
        busy=total(union(clip(intervals(steps), begin, now))) / (now - begin),
        lag_ms=float(lags["lag"].max()) / 1e6 if len(lags) else None,
        memory_bytes=_resident_bytes(),
        device_bytes=None if free_and_all is None else (free_and_all[1] - free_and_all[0], free_and_all[1]),
    )


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return None


def _gigabytes(value: int) -> str:
    return f"{value / 1e9:,.2f} GB"


class Monitor(Panel):
    """Looks at an engine three times a second while somebody looks at the monitor, and never otherwise.

    It does not keep the engine: when that is closed or gone the last figures stay.
    """

    _esm = source("panel.js", "monitor.js")

    title = traitlets.Unicode("").tag(sync=True)
    device = traitlets.Unicode("").tag(sync=True)

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, engine: Engine) -> None:
        loop = engine._steps.loop
        super().__init__(loop if loop is not None else asyncio.get_running_loop())
        self._engine = weakref.ref(engine)
        self.title = sound(engine.name)
        self.device = sound(engine.timeline.device)
        self._last = look_at(engine)

    def seen(self, visible: bool) -> None:
        if not visible:
            self._cease()
        elif self._timer is None:
            self._tick()

    def close(self) -> None:
        self._cease()
        super().close()

    def _cease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.renew()  # while nobody looks: a new output is drawn anew

    def _tick(self) -> None:
        self._timer = None
        engine = self._engine()
        if self.comm is None:  # closed this moment, on another thread
            return
        if engine is None or engine.closed:
            self.tell({"closed": True})
            self.renew()
            return
        if not self.in_sight:  # its page went without a word
            self.renew()
            return
        self._last = look_at(engine)
        self.tell({"figures": self._rows()})
        assert self.loop is not None
        self._timer = self.loop.call_later(PERIOD_S, self.attend, self._tick, context=contextvars.Context())

    def _rows(self) -> list[list[Any]]:
        """Name, value in words, the value as a number (None: there is none), and its most if it has one."""
        now = self._last
        tokens = f"{now.tokens_per_s:,.1f}"
        rows: list[list[Any]] = [
            ["running", str(now.running), now.running, None],
            ["waiting", str(now.waiting), now.waiting, None],
            ["paused", str(now.paused), now.paused, None],
            ["KV pages in use", f"{now.pages:,} of {now.pages_in_all:,}", now.pages, now.pages_in_all],
            ["tokens/s", tokens, now.tokens_per_s, None],
            [f"{self.device} busy", f"{100 * now.busy:.0f} %", now.busy, 1],
            ["loop lag, worst", "–" if now.lag_ms is None else f"{now.lag_ms:.1f} ms", now.lag_ms, None],
        ]
        if now.memory_bytes is not None:
            rows.append(["memory of this process", _gigabytes(now.memory_bytes), now.memory_bytes, None])
        if now.device_bytes is not None:
            used, whole = now.device_bytes
            rows.append(["memory of the card in use", f"{_gigabytes(used)} of {_gigabytes(whole)}", used, whole])
        return rows

    def static(self) -> tuple[str, str]:
        rows = [(name, words) for name, words, *_ in self._rows()]
        caption = f"{self.title}: the last {WINDOW_S:g} s"
        return table(rows, caption), "\n".join([caption, *(f"  {name:<28}{words}" for name, words in rows)])
