"""Events of a simulated device, whose clock drifts, on the host's clock."""

from __future__ import annotations

import numpy as np
import pytest

from interactive_infer.timeline import clock as clock_module
from interactive_infer.timeline.clock import DeviceClock

SECOND = 1_000_000_000


class Simulated:
    """A host clock that reading moves, and a device whose clock runs `drift` too fast."""

    def __init__(self, drift: float) -> None:
        self.now = 5 * SECOND
        self.drift = drift
        self.recorded = 0

    def perf_counter_ns(self) -> int:
        self.now += 300
        return self.now

    def record(self) -> Event:
        self.recorded += 1
        self.now += 6_000
        event = Event(self, self.now)
        self.now += 9_000
        return event


class Event:
    def __init__(self, device: Simulated, at_ns: int) -> None:
        self.device = device
        self.at_ns = at_ns

    def synchronize(self) -> None:
        self.device.now += 2_000

    def elapsed_time(self, end: Event) -> float:
        """As CUDA's: a float32 of milliseconds."""
        return float(np.float32((end.at_ns - self.at_ns) * (1 + self.device.drift) / 1e6))


@pytest.mark.parametrize("drift", [0.0, 1e-6, -1e-6, 1e-5])
def test_a_simulated_hour(drift, monkeypatch):
    device = Simulated(drift)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    clock = DeviceClock(device.record)
    worst = 0
    for _ in range(3600):
        device.now += SECOND
        event = Event(device, device.now - 5_000_000)
        worst = max(worst, abs(clock.ns(event) - event.at_ns))
    assert worst <= 50_000
    assert clock.error_ns <= 50_000
    assert device.recorded >= 3600 / 60 * 16, "the reference is renewed at least once a minute"


def test_without_renewal_the_hour_would_be_off(monkeypatch):
    device = Simulated(1e-6)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    monkeypatch.setattr(clock_module, "_RENEW_NS", 10**18)
    clock = DeviceClock(device.record)
    device.now += 3600 * SECOND
    event = Event(device, device.now)
    assert abs(clock.ns(event) - event.at_ns) > 500_000


def test_one_slow_reading_does_not_spoil_the_reference(monkeypatch):
    device = Simulated(0.0)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    record, calls = device.record, []

    def sometimes_slow() -> Event:
        calls.append(1)
        event = record()
        if len(calls) % 3:
            device.now += 3_000_000  # the thread lost the processor
        return event

    clock = DeviceClock(sometimes_slow)
    event = Event(device, device.now)
    assert abs(clock.ns(event) - event.at_ns) <= clock.error_ns <= 50_000


def test_what_a_drift_that_changes_costs_is_measured(monkeypatch):
    device = Simulated(0.0)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    clock = DeviceClock(device.record)
    width = clock.error_ns
    for moment in range(1, 13):
        device.drift = 1e-5 if moment > 6 else 0.0
        device.now += 5 * SECOND
        clock.ns(Event(device, device.now))
        missed = clock.error_ns - width
        assert (missed > 30_000) == (moment == 7), "once the rate is known, nothing is missed any more"


def test_an_idle_hour_is_not_taken_for_an_error(monkeypatch):
    """Drift that nobody has measured yet: the reference of an hour ago misses by 36 ms, the new one by nothing."""
    device = Simulated(1e-5)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    clock = DeviceClock(device.record)
    device.now += 3600 * SECOND
    event = Event(device, device.now)
    assert abs(clock.ns(event) - event.at_ns) <= clock.error_ns < 100_000


def test_the_reference_is_renewed_while_events_come_and_not_before(monkeypatch):
    device = Simulated(0.0)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    clock = DeviceClock(device.record)
    once = device.recorded
    for _ in range(3):
        clock.ns(Event(device, device.now))
    assert device.recorded == once
    device.now += 6 * SECOND
    clock.ns(Event(device, device.now))
    assert device.recorded == 2 * once


@pytest.mark.parametrize("drift", [0.0, 1e-5])
def test_what_is_asked_for_an_hour_late_is_placed_by_the_reference_of_its_time(drift, monkeypatch):
    device = Simulated(drift)
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", device.perf_counter_ns)
    clock = DeviceClock(device.record)
    device.now += SECOND + 123_456
    late = Event(device, device.now)
    device.now += 3600 * SECOND
    for event in (Event(device, device.now), late):
        assert abs(clock.ns(event) - event.at_ns) <= 50_000
