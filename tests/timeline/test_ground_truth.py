"""A simulated card, on which everything is planted: what comes out is exactly that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interactive_infer.timeline import Phase, Timeline, Work
from interactive_infer.timeline import clock as clock_module
from interactive_infer.timeline.analysis import window_of
from interactive_infer.timeline.bubbles import find_bubbles
from tests.timeline.simulated import MS, Card, Event

# (ms of host work or idling before the launch, by what, ms on the card)
PLANTED: list[tuple[float, str, float]] = [
    (0, "", 8),
    (5, "user cell [12]", 8),
    (0.5, "planning", 4),
    (0, "", 4),
    (2, "committing", 16),
    (3, "my work", 8),
    (1, "garbage collection", 8),
    (0.25, "unknown", 2),
]


@pytest.fixture(params=[0.0, 1e-6, -1e-6, 1e-5], ids=["exact", "fast", "slow", "very fast"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    holder: list[Card] = []
    monkeypatch.setattr(clock_module.time, "perf_counter_ns", lambda: holder[0].now)
    card = Card.__new__(Card)
    holder.append(card)
    card.__init__(request.param)  # type: ignore[misc]
    yield card


def run(card: Card, timeline: Timeline, wait_ms: int = 0) -> list[tuple[int, int]]:
    """Steps on three streams in turn, each placed by the card's clock; returns the planted idle stretches."""
    recorder = timeline.recorder
    phases = {"planning": Phase.PLAN, "committing": Phase.COMMIT, "garbage collection": Phase.GC}
    card.now += wait_ms * MS
    gaps: list[tuple[int, int]] = []
    recorder.runnable(card.now, 1)
    for number, (before, what, ms) in enumerate(PLANTED, start=1):
        start, card.now = card.now, card.now + round(before * MS)
        if before:
            gaps.append((start, card.now))
        if what == "user cell [12]":
            recorder.record(Phase.CELL, start, card.now, 12)
        elif what == "my work":
            recorder.record(Phase.USER, start, card.now, name=what)
        elif what in phases:
            recorder.record(phases[what], start, card.now, number - 1)
        card.stream = number % 3
        begun, ended = card.launch(round(ms * MS))
        place = card.clock.ns
        recorder.step(
            place(Event(card, begun)),
            place(Event(card, ended)),
            step_id=number,
            batch_size=1,
            tokens=1,
            prefill_tokens=0,
            stream=card.stream,
        )
        card.now = ended
    recorder.runnable(card.now, 0)
    return gaps


@pytest.mark.parametrize("wait_ms", [0, 1_000, 4_500, 3_600_000])
def test_planted_bubbles_and_causes_come_out(card: Card, wait_ms: int) -> None:
    timeline = Timeline()
    timeline.clock = card.clock
    begun = card.now + wait_ms * MS
    gaps = run(card, timeline, wait_ms)
    held = timeline.recorder.snapshot()
    found = [bubble for bubble in find_bubbles(held, window_of(held)) if bubble.duration_ns > MS // 8]
    assert [bubble.cause for bubble in found] == [what for _, what, _ in PLANTED if what]
    # Without drift to the nanosecond; else as far off as 5 seconds of drift and the width of the reference.
    off = 0 if card.drift == 0.0 else 20_000 + round(abs(card.drift) * 5e9)
    for bubble, (start, end) in zip(found, gaps, strict=True):
        assert abs(bubble.start_ns - start) <= off and abs(bubble.end_ns - end) <= off
    summary = timeline.summary()
    whole, idle = card.now - begun, sum(end - start for start, end in gaps)
    assert summary.busy == pytest.approx(1 - idle / whole, abs=4 * off / whole + 1e-12)
    assert summary.busy_runnable == pytest.approx(summary.busy, abs=4 * off / whole + 1e-12)
    assert summary.steps == summary.tokens == len(PLANTED)
    assert summary.critical_path is not None
    assert summary.critical_path.host == pytest.approx(2.5 * MS / whole, abs=4 * off / whole + 1e-12)


def test_the_clocks_error_is_said(card: Card) -> None:
    timeline = Timeline()
    timeline.clock = card.clock
    run(card, timeline)
    run(card, timeline, 6_000)
    error_ns = timeline.summary().clock_error_ns
    assert 0 < error_ns == card.clock.error_ns <= 100_000
    assert f"± {error_ns / 1e3:.0f} µs" in str(timeline.summary())


def test_device_spans_of_several_streams(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(events=card)
    planted = []
    for number in range(12):
        card.stream = 1 + number % 2
        with timeline.span(f"work {number}", device=True):
            planted.append((f"work {number}", card.stream, *card.launch((1 + number % 3) * MS)))
        card.now += MS // 4
    early = timeline.recording()
    card.now += 100 * MS
    held = timeline.recording()
    assert len(early.work) < len(held.work) == len(planted)
    found = sorted(
        (name, stream, start, end)
        for name, stream, start, end in zip(
            held.work_names.tolist(), held.work["stream"], held.work["start"], held.work["end"], strict=True
        )
    )
    off = round(200e6 * abs(card.drift)) + 10
    for (name, stream, start, end), expected in zip(found, sorted(planted), strict=True):
        assert (name, stream) == expected[:2]
        assert abs(start - expected[2]) <= off and abs(end - expected[3]) <= off
    assert (held.work["kind"] == Work.USER).all()
    assert held.names.tolist() == [name for name, *_ in planted], "the host's part is there too"
    covered = {at for _, _, start, end in planted for at in range(start // 1_000, end // 1_000)}
    first, last = min(start for _, _, start, _ in planted), max(end for *_, end in planted)
    summary = timeline.summary(window=(first, last))
    assert summary.busy == pytest.approx(len(covered) / ((last - first) / 1_000), abs=1e-3)
    assert summary.devices == {0: summary.busy}


def test_device_spans_that_a_lost_device_never_reaches_are_given_up(card: Card) -> None:
    timeline = Timeline(events=card)
    for _ in range(5_000):
        with timeline.span("lost", device=True):
            card.launch(10**15)
    assert len(timeline._device_spans._open) == 4_096
    assert len(timeline.recording().work) == 0
