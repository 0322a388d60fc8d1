"""A device's events on the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

_RENEW_NS = 30_000_000_000
"""How old a reference may get. Elapsed time is a float32 of milliseconds: its unit is 4 µs after a minute (2**-8 ms
from 32.8 s on), 250 µs after an hour."""

_TRIES = 16


class TimedEvent(Protocol):
    """A point in a device's work that knows how long after another it was reached; `torch.cuda.Event` is one."""

    def synchronize(self) -> object: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceClock:
    """Places events on `time.perf_counter_ns`.

    A reference event is recorded on a stream of its own, which is idle, between two readings of the host's clock: it
    happened somewhere between them. Of several tries the one with the narrowest interval is kept, its middle taken. The
    reference is renewed every 30 seconds, so that neither drift between the clocks nor the resolution of elapsed times
    adds up. Any thread may ask.

    Args:
        record: records an event on that stream, at once.
    """

    def __init__(self, record: Callable[[], TimedEvent]) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._reference: tuple[TimedEvent, int, int] = self._calibrate()

    @property
    def error_ns(self) -> int:
        """How far off a time may be: half the width of the reference's interval, and the unit of elapsed times."""
        return self._reference[2]

    def ns(self, event: TimedEvent) -> int:
        """When `event`, which was reached, happened; in ns on `time.perf_counter_ns`."""
        with self._lock:
            if time.perf_counter_ns() - self._reference[1] > _RENEW_NS:
                self._reference = self._calibrate()
            reference, at_ns, _ = self._reference
        return at_ns + round(reference.elapsed_time(event) * 1e6)

    def _calibrate(self) -> tuple[TimedEvent, int, int]:
        best: tuple[TimedEvent, int, int] | None = None
        for _ in range(_TRIES):
            before = time.perf_counter_ns()
            event = self._record()
            event.synchronize()
            after = time.perf_counter_ns()
            error = (after - before) // 2 + 4_000
            if best is None or error < best[2]:
                best = event, (before + after) // 2, error
        assert best is not None
        return best
