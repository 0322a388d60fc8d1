from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Recorder, Timeline, compare, together
from interactive_infer.timeline.beside import beside
from interactive_infer.timeline.comparison import rows_of
from interactive_infer.timeline.summary import summarize

MS = 1_000_000


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def steps(period_ms: int, own_ms: int, *, count: int = 10, start_ms: int = 0, device: int = 0) -> Timeline:
    timeline = Timeline(device="GPU")
    timeline.recorder.runnable(start_ms * MS, 1)
    for number in range(count):
        begin = (start_ms + period_ms * number) * MS
        timeline.recorder.step(
            begin, begin + own_ms * MS, step_id=number, batch_size=1, tokens=1, prefill_tokens=0, device=device
        )
    timeline.recorder.runnable(begin + period_ms * MS, 0)
    return timeline


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_panels_share_a_scale_and_the_table_has_the_numbers(theme: str, tmp_path: Path) -> None:
    figure = compare({"blocking": steps(20, 10), "two in flight": steps(10, 9)}, theme=theme)
    slow, fast = figure.axes
    assert slow.get_xlim() == fast.get_xlim() == (0, 200)
    assert slow.get_position().y0 > fast.get_position().y1
    shown = texts(figure)
    assert {"blocking", "two in flight", "device busy", "50.0 %", "90.0 %", "steps/s"} <= set(shown)
    assert any(text.startswith("two in flight: GPU busy 90.0 %") for text in shown)
    assert "loop lag, ms, p50 / p99" not in shown  # nobody has any
    figure.savefig(tmp_path / "c.svg")
    for text in figure.texts:
        assert text.get_window_extent().y0 >= 0


def test_hostile_names_are_text(hostile: str, made: Timeline) -> None:
    figure = compare({hostile: made, "b": made})
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_one_device_that_works_for_another_engine_is_not_idle() -> None:
    a, b = steps(20, 10), steps(20, 10, start_ms=10)
    elsewhere = steps(20, 10, start_ms=10, device=1)
    assert a.summary().busy_runnable == pytest.approx(0.5)
    held = beside({"a": a.recording(), "b": b.recording(), "c": elsewhere.recording()})
    assert (held["a"].work_names == "b").all() and len(held["a"].work) == 10
    assert len(held["c"].work) == 0
    figure = compare({"a": a, "b": b, "c": elsewhere}, together=True)
    first, second, third = figure.axes
    assert first.get_xlim() == second.get_xlim() == third.get_xlim() == (0, 210)
    assert "other engines" in texts(first) and "other engines" not in texts(third)
    for name, expected in (("a", 1.0), ("b", 1.0), ("c", 0.5)):
        summary = summarize(held[name], (20 * MS, 180 * MS))
        assert summary.busy_runnable == pytest.approx(expected), name
        assert ["busy while there was work", f"{100 * expected:.1f} %"] in rows_of({name: summary})


def test_what_another_engine_did_can_be_a_bubbles_cause() -> None:
    a, b = steps(20, 10, count=3), steps(20, 10, count=3, device=1)
    b.recorder.record(Phase.LAUNCH, 10 * MS, 19 * MS, 1)
    b.recorder.record(Phase.CELL, 30 * MS, 39 * MS, 3)  # every engine hears of cells itself
    assert [bubble.cause for bubble in a.summary().bubbles][:2] == ["unknown", "unknown"]
    joined = together({"a": a, "b": b})
    summary = joined["a"].summary()
    assert [bubble.cause for bubble in summary.bubbles][:2] == ["b: launching", "unknown"]
    assert summary.host_work_s == 0 and summary.window_ns == a.summary().window_ns
    assert "others' work" in texts(joined["a"].figure())
    assert joined["b"].summary() == b.summary()
    with pytest.raises(InvalidRequestError, match="timelines"):
        together({})


def test_a_name_may_be_long() -> None:
    figure = compare({"a name of many words " * 12: steps(20, 10), "b": steps(20, 10)})
    for text in figure.texts:
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


def test_a_copy_stays_as_it_was() -> None:
    timeline = steps(20, 10)
    kept = timeline.copy()
    timeline.clear()
    assert kept.summary().steps == 10 and timeline.summary().steps == 0


@pytest.mark.parametrize("timelines", [{}, {"a": 3}, [], None])
def test_what_cannot_be_compared(timelines: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timelines"):
        compare(timelines)


def test_what_is_missing_of_one_engine_is_missing_for_the_other() -> None:
    """b worked all the time, but only its last 50 steps are recorded."""
    a, b = Timeline(), Timeline(Recorder(steps=50))
    a.recorder.runnable(0, 1)
    for number in range(100):
        start = number * MS
        a.recorder.record(Phase.PLAN, start, start + 1, number)
        b.recorder.step(start, start + MS, step_id=number, batch_size=1, tokens=1, prefill_tokens=0)
    a.recorder.step(98 * MS, 99 * MS, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    b.clock = SimpleNamespace(error_ns=700)
    joined = together({"a": a, "b": b})
    for timeline in joined.values():
        held = timeline.recording()
        assert (held.complete_from, held.clock_error_ns) == (51 * MS, 700)
    summary = joined["a"].summary()
    assert (summary.busy, summary.bubbles, summary.clock_error_ns) == (1.0, (), 700)
