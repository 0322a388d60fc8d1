"""A host clock that moves only when something takes time, and a card whose events know what was planted."""

from __future__ import annotations

import numpy as np

from interactive_infer.timeline.clock import DeviceClock
from interactive_infer.timeline.device_spans import Mark

MS = 1_000_000
READING = MS // 64  # times that a float32 of milliseconds holds exactly
START = 7_000_000_000_000


class Event:
    """Reached at `at_ns`, a time of the host's that nobody but the test knows."""

    def __init__(self, card: Card, at_ns: int) -> None:
        self.card = card
        self.at_ns = at_ns

    def query(self) -> bool:
        return self.card.now >= self.at_ns

    def synchronize(self) -> None:
        self.card.now = max(self.card.now, self.at_ns) + READING

    def elapsed_time(self, end: Event) -> float:
        """As CUDA's: a float32 of milliseconds, on the card's own clock, which runs `drift` too fast."""
        return float(np.float32((end.at_ns - self.at_ns) * (1 + self.card.drift) / 1e6))


class Card:
    """Also a `DeviceEvents`: `mark` records on the stream that `stream` says, which reaches it after its work."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now = START
        self.drift = drift
        self.stream = 1
        self.done: dict[int, int] = {}
        self.clock = DeviceClock(self.reference)

    def perf_counter_ns(self) -> int:
        return self.now

    def reference(self) -> Event:
        """On an idle stream: reached in the middle between the readings around it."""
        self.now += READING
        return Event(self, self.now)

    def launch(self, ns: int) -> tuple[int, int]:
        """Put `ns` of work on the current stream; when it runs."""
        start = max(self.now, self.done.get(self.stream, 0))
        self.done[self.stream] = start + ns
        return start, start + ns

    def mark(self) -> Mark:
        return Mark(Event(self, max(self.now, self.done.get(self.stream, 0))), self.stream, 0)

    def ns(self, mark: Mark) -> int:
        assert isinstance(mark.event, Event)
        return self.clock.ns(mark.event)

    @property
    def error_ns(self) -> int:
        return self.clock.error_ns
