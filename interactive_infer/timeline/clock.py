"""A device's events on the host's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

_RENEW_NS = 5_000_000_000
"""How old a reference may get. Elapsed time is a float32 of milliseconds: its unit is 0.5 µs after 5 seconds, 4 µs
after a minute, 250 µs after an hour; and clocks drift apart by some microseconds a second."""
_UNIT_NS = 500
_TRIES = 16


class TimedEvent(Protocol):
    """A point in a device's work that knows how long after another it was reached; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> object: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceClock:
    """Places events on `time.perf_counter_ns`.

    A reference event is recorded on a stream of its own, which is idle, between two readings of the host's clock: it
    happened somewhere between them. Of several tries the one with the narrowest interval is kept, its middle taken. The
    reference is renewed every 5 seconds while events are placed: two of them say how fast one clock runs beside the
    other, and how far the old one would have misplaced the new is the error that was measured. Any thread may ask.

    Args:
        record: records an event on that stream, at once.
    """

    def __init__(self, record: Callable[[], TimedEvent]) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._rate = 1.0  # of the host's clock, as seen from the device's
        self._missed_ns = 0
        self._reference: tuple[TimedEvent, int, int] = self._calibrate()
        self._before = self._reference  # the one before, for what is asked for late

    @property
    def error_ns(self) -> int:
        """How far off a time may be: half the width of the reference's interval, the unit of elapsed times, and by how
        much the last renewal missed beyond both intervals, in 5 seconds (0 before the first)."""
        return self._reference[2] + _UNIT_NS + self._missed_ns

    def ns(self, event: TimedEvent) -> int:
        """When `event`, which was reached, happened; in ns on `time.perf_counter_ns`."""
        with self._lock:
            if time.perf_counter_ns() - self._reference[1] > _RENEW_NS:
                self._renew()
            (reference, at_ns, _), (before, before_ns, _), rate = self._reference, self._before, self._rate
        elapsed_ns = reference.elapsed_time(event) * 1e6
        if elapsed_ns < -_RENEW_NS and abs(since_ns := before.elapsed_time(event) * 1e6) < -elapsed_ns:
            at_ns, elapsed_ns = before_ns, since_ns
        return at_ns + round(elapsed_ns * rate)

    def _renew(self) -> None:
        old, old_ns, old_half_ns = self._before = self._reference
        new, new_ns, new_half_ns = self._reference = self._calibrate()
        elapsed_ns = old.elapsed_time(new) * 1e6
        missed_ns = max(abs(old_ns + round(elapsed_ns * self._rate) - new_ns) - old_half_ns - new_half_ns, 0)
        # After an idle hour the old reference misses by an hour's drift; nothing is placed so far from one.
        self._missed_ns = round(missed_ns * min(_RENEW_NS / (new_ns - old_ns), 1.0))
        self._rate = (new_ns - old_ns) / elapsed_ns

    def _calibrate(self) -> tuple[TimedEvent, int, int]:
        best: tuple[TimedEvent, int, int] | None = None
        for _ in range(_TRIES):
            before = time.perf_counter_ns()
            event = self._record()
            event.synchronize()
            after = time.perf_counter_ns()
            if best is None or (after - before) // 2 < best[2]:
                best = event, (before + after) // 2, (after - before) // 2
        assert best is not None
        return best
