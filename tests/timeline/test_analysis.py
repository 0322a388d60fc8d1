from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Recorder, Timeline
from interactive_infer.timeline.analysis import awaiting_intervals, critical_path, held_intervals, window_of
from interactive_infer.timeline.bubbles import find_bubbles
from interactive_infer.timeline.intervals import Intervals, clip, complement, coverage, intersect, topmost, total, union
from interactive_infer.timeline.summary import summarize

GRID = 24
spans = st.lists(
    st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(lambda pair: tuple(sorted(pair))), max_size=12
).map(lambda pairs: np.array(pairs, np.int64).reshape(-1, 2))


def cells(a: Intervals) -> set[int]:
    return {cell for start, end in a.tolist() for cell in range(start, end)}


def is_normal(a: Intervals) -> bool:
    flat = a.ravel()
    return bool((np.diff(flat) > 0).all())


@given(spans, spans)
def test_union_is_the_cells_of_either(a: Intervals, b: Intervals) -> None:
    got = union(a, b)
    assert is_normal(got) and cells(got) == cells(a) | cells(b)
    assert total(got) == len(cells(got))


@given(spans, spans)
def test_intersect_is_the_cells_of_both(a: Intervals, b: Intervals) -> None:
    got = intersect(union(a), union(b))
    assert is_normal(got) and cells(got) == cells(a) & cells(b)


@given(spans, st.integers(0, GRID), st.integers(0, GRID))
def test_complement_and_clip(a: Intervals, t0: int, t1: int) -> None:
    t0, t1 = sorted((t0, t1))
    inside = set(range(t0, t1))
    got = complement(union(a), t0, t1)
    assert is_normal(got) and cells(got) == inside - cells(a)
    assert cells(clip(a, t0, t1)) == inside & cells(a)


@given(spans)
def test_topmost_is_the_last_that_covers(a: Intervals) -> None:
    cuts = np.unique(np.concatenate([a.ravel(), [0, GRID]]))
    expected = [
        max((i for i, (start, end) in enumerate(a.tolist()) if start <= cut < end), default=-1)
        for cut in cuts[:-1].tolist()
    ]
    assert topmost(a, cuts).tolist() == expected


@given(spans, st.sets(st.integers(0, GRID), min_size=2))
def test_coverage_is_the_share_of_cells(a: Intervals, borders: set[int]) -> None:
    edges = np.array(sorted(borders), np.int64)
    expected = [len(cells(a) & set(range(s, e))) / (e - s) for s, e in pairwise(edges)]
    assert coverage(union(a), edges) == pytest.approx(expected)


def step(recorder: Recorder, number: int, start: int, end: int, *, stream: int = 0, prefill: int = 0) -> None:
    tokens = 2 + prefill
    recorder.step(start, end, step_id=number, batch_size=2, tokens=tokens, prefill_tokens=prefill, stream=stream)


MS = 1_000_000
T = 7_000_000_000_000_000  # a clock far from zero


def at(start_ms: float, end_ms: float) -> tuple[int, int]:
    return T + round(start_ms * MS), T + round(end_ms * MS)


def planted() -> Recorder:
    """Six steps; the five gaps between them are planted, each with its cause."""
    recorder = Recorder()
    recorder.runnable(T, 2)
    for number, (start, end) in enumerate([(0, 10), (13, 20), (25, 30), (31, 40), (48, 50), (52, 60)], start=1):
        step(recorder, number, *at(start, end))
    recorder.record(Phase.AWAIT, *at(0, 9.9), 1)
    recorder.record(Phase.COMMIT, *at(10.2, 12.5), 1)  # 10 to 13: committing, 2.3 of 3
    recorder.record(Phase.CELL, *at(20, 25), 12)  # 20 to 25: a cell that blocks
    recorder.record(Phase.LAUNCH, *at(28, 30.1), 4)  # 30 to 31: launched at 30.1, begun at 31
    recorder.record(Phase.PLAN, *at(40, 47), 5)  # 40 to 48: planning, but 6 of 8 in a collection
    recorder.record(Phase.GC, *at(40.5, 46.5), 2)
    recorder.runnable(T + 60 * MS, 0)
    return recorder


def test_planted_bubbles_come_out_exactly() -> None:
    held = planted().snapshot()
    bubbles = find_bubbles(held, window_of(held))
    found = [((b.start_ns - T) / MS, (b.end_ns - T) / MS, b.cause, b.share) for b in bubbles]
    assert found == [
        (10, 13, "committing", pytest.approx(2.3 / 3)),
        (20, 25, "user cell [12]", 1.0),
        (30, 31, "launch latency", pytest.approx(0.9)),
        (40, 48, "garbage collection", 0.75),
        (50, 52, "unknown", 1.0),
    ]


def test_planted_numbers_come_out_exactly() -> None:
    held = planted().snapshot()
    summary = summarize(held, window_of(held), device="CPU device")
    assert summary.window_s == 0.06
    assert summary.busy == summary.busy_runnable == (60 - 19) / 60
    # commit 2.3, launch 2.1, plan 7; of these only 28 to 30 is under a step. Awaits count nowhere.
    assert summary.host_work_s == pytest.approx(0.0114)
    assert summary.overlap == pytest.approx(2 / 11.4)
    assert (summary.steps, summary.tokens, summary.prompt_tokens) == (6, 12, 0)
    assert summary.steps_per_s == pytest.approx(100) and summary.tokens_per_s == pytest.approx(200)
    assert summary.bubble_s == pytest.approx(0.019)
    assert summary.causes == {
        "garbage collection": 0.008,
        "user cell [12]": 0.005,
        "committing": 0.003,
        "unknown": 0.002,
        "launch latency": 0.001,
    }
    assert summary.largest_bubble is not None
    busy, worst = "CPU device busy 68.3 %, 18 % of host work hidden", "8.0 ms: garbage collection"
    assert summary.headline() == f"{busy}; largest bubble {worst}"


@pytest.mark.parametrize("graph", [True, False])
def test_what_the_card_makes_of_a_launch_is_not_the_hosts(graph: bool) -> None:
    """Two in flight: the second was launched long before the first ended, and the host is at the third."""
    recorder = Recorder()
    recorder.runnable(T, 1)
    for number, (start, end) in enumerate([(0, 10), (12, 20), (25, 30)], start=1):
        recorder.step(*at(start, end), step_id=number, batch_size=1, tokens=1, prefill_tokens=0, graph=graph)
    recorder.record(Phase.LAUNCH, *at(-2, -1), 1)
    recorder.record(Phase.LAUNCH, *at(1, 2), 2)
    recorder.record(Phase.COMMIT, *at(10, 11), 1)
    recorder.record(Phase.LAUNCH, *at(11, 24), 3)  # 12 to 20 is hidden
    recorder.record(Phase.GC, *at(10.5, 11.5), 2)
    held = recorder.snapshot()
    found = [(bubble.cause, bubble.share) for bubble in find_bubbles(held, (T, T + 30 * MS))]
    path = critical_path(held, (T, T + 30 * MS))
    assert path is not None
    if graph:
        assert found == [("launch latency", 1.0), ("launching", 0.8)]
        assert path == pytest.approx((23 / 30, 4 / 30, 3 / 30))
    else:
        assert found == [("garbage collection", 0.5), ("launching", 0.8)]
        assert path == pytest.approx((23 / 30, 6 / 30, 1 / 30))


def test_a_replay_left_to_a_thread_waits_for_the_thread() -> None:
    recorder = Recorder()
    recorder.runnable(T, 1)
    for number, (start, end) in enumerate([(0, 10), (20, 30)], start=1):
        recorder.step(*at(start, end), step_id=number, batch_size=1, tokens=1, prefill_tokens=0, graph=True)
    recorder.record(Phase.LAUNCH, *at(10, 11), 2)  # until it was left
    recorder.record(Phase.GC, *at(11, 18), 2)
    recorder.record(Phase.LAUNCH, *at(18, 19), 2)  # the thread's own, recorded with the step
    (bubble,) = find_bubbles(recorder.snapshot(), (T, T + 30 * MS))
    assert (bubble.cause, bubble.share) == ("garbage collection", 0.7)


def test_what_holds_the_loop_between_a_commit_and_the_next_plan_is_a_late_loop() -> None:
    """The loop has an iteration of its own there, with a step in flight, which ends meanwhile."""
    recorder = Recorder()
    recorder.runnable(T, 1)
    for number, (start, end) in enumerate([(0, 10), (10, 20), (42, 50)], start=1):
        recorder.step(*at(start, end), step_id=number, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.record(Phase.LAUNCH, *at(-2, -1), 1)
    recorder.record(Phase.LAUNCH, *at(-1, 0), 2)
    recorder.record(Phase.COMMIT, *at(10, 11), 1)
    recorder.record(Phase.PLAN, *at(40, 41), 3)
    recorder.record(Phase.LAUNCH, *at(41, 42), 3)
    recorder.record(Phase.AWAIT, *at(42, 42.1), 2)
    recorder.record(Phase.COMMIT, *at(42.1, 42.5), 2)
    recorder.record(Phase.AWAIT, *at(42.5, 50), 3)
    held = recorder.snapshot()
    assert (held_intervals(held) - T).tolist() == [[11 * MS, 40 * MS]]
    (bubble,) = find_bubbles(held, (T, T + 50 * MS))
    assert (bubble.cause, bubble.share) == ("late loop", pytest.approx(20 / 22))


def test_a_launch_that_a_thread_has_yet_to_begin_is_launch_latency() -> None:
    recorder = Recorder()
    recorder.runnable(T, 1)
    for number, (start, end) in enumerate([(0, 10), (20, 30)], start=1):
        recorder.step(*at(start, end), step_id=number, batch_size=1, tokens=1, prefill_tokens=0, graph=True)
    recorder.record(Phase.LAUNCH, *at(10, 11), 2)
    recorder.record(Phase.LAUNCH, *at(17, 20), 2)
    (bubble,) = find_bubbles(recorder.snapshot(), (T, T + 30 * MS))
    assert (bubble.cause, bubble.share) == ("launch latency", 0.6)


def test_a_window_cuts_bubbles_and_steps() -> None:
    held = planted().snapshot()
    summary = summarize(held, (T + 11 * MS, T + 22 * MS))
    assert [(b.start_ns - T, b.end_ns - T) for b in summary.bubbles] == [
        (11 * MS, 13 * MS),
        (20 * MS, 22 * MS),
    ]
    assert summary.busy == 7 / 11 and summary.steps == 1


def test_a_gap_of_one_stream_under_work_of_another_is_not_idle() -> None:
    recorder = Recorder()
    step(recorder, 1, *at(0, 10))
    step(recorder, 2, *at(15, 20))
    step(recorder, 3, *at(8, 14), stream=1)
    held = recorder.snapshot()
    summary = summarize(held, window_of(held))
    assert [(b.start_ns - T, b.end_ns - T) for b in summary.bubbles] == [(14 * MS, 15 * MS)]
    assert summary.busy == 19 / 20


def test_idle_without_anything_runnable_is_no_bubble() -> None:
    recorder = Recorder()
    for number, start in enumerate((0, 100), start=1):
        recorder.runnable(T + start * MS, 1)
        step(recorder, number, *at(start, start + 10))
        recorder.runnable(T + (start + 10) * MS, 0)
    held = recorder.snapshot()
    summary = summarize(held, window_of(held))
    assert summary.bubbles == () and summary.busy_runnable == 1.0
    assert summary.busy == pytest.approx(20 / 110)
    assert "of the time there was work" in summary.headline()


def gap_under(recorder: Recorder) -> str:
    """The cause of a gap from 10 to 20 ms between two steps, beside what `recorder` has."""
    recorder.runnable(T, 1)
    step(recorder, 1, *at(0, 10))
    step(recorder, 2, *at(20, 30))
    held = recorder.snapshot()
    (bubble,) = find_bubbles(held, (T, T + 30 * MS))
    return bubble.cause


def test_a_cell_that_only_awaits_is_not_to_blame() -> None:
    recorder = Recorder()
    recorder.record(Phase.CELL, *at(-50, 80), 3)
    recorder.lag(T + 5 * MS, 50_000)
    assert gap_under(recorder) == "unknown"


def test_an_awaiting_cell_is_to_blame_while_it_holds_the_loop() -> None:
    recorder = Recorder()
    recorder.record(Phase.CELL, *at(-50, 80), 3)
    recorder.lag(T + 19 * MS, 8 * MS)
    assert gap_under(recorder) == "user cell [3]"


def test_a_late_loop_by_its_heartbeat() -> None:
    recorder = Recorder()
    recorder.lag(T + 19 * MS, 8 * MS)
    assert gap_under(recorder) == "late loop"


def test_a_cell_that_asks_and_goes_on_is_to_blame_until_the_loop_plans() -> None:
    """It has awaited before and will again, and no heartbeat was due."""

    def ask(recorder: Recorder, *, flying: bool = False) -> list[str]:
        recorder.record(Phase.CELL, *at(-50, 80), 3)
        recorder.lag(T - 5 * MS, 0)
        recorder.runnable(T, 1)
        step(recorder, 1, *at(0, 10))
        if flying:
            recorder.record(Phase.LAUNCH, *at(0, 0), 1)
            recorder.record(Phase.COMMIT, *at(25, 26), 1)
        recorder.runnable(T + 10 * MS, 0)
        recorder.runnable(T + 20 * MS, 2)
        recorder.record(Phase.PLAN, *at(28, 29), 2)
        step(recorder, 2, *at(29, 40))
        return [bubble.cause for bubble in find_bubbles(recorder.snapshot(), (T, T + 40 * MS))]

    assert ask(Recorder()) == ["user cell [3]"]
    assert ask(Recorder(), flying=True) == ["waking the loop"], "it waited for the flight"
    stopped = Recorder()
    stopped.runnable(T, 1)
    stopped.runnable(T + 5 * MS, 0)
    stopped.record(Phase.PLAN, *at(20, 21), 1)
    assert len(held_intervals(stopped.snapshot())) == 0, "nothing was to be planned any more"


def test_a_late_loop_by_the_end_of_an_await() -> None:
    recorder = Recorder()
    recorder.record(Phase.AWAIT, *at(1, 18), 1)
    assert gap_under(recorder) == "late loop"


def test_the_time_until_the_loop_hears_of_a_steps_end() -> None:
    recorder = Recorder()
    recorder.record(Phase.AWAIT, *at(1, 10.6), 1)
    recorder.record(Phase.COMMIT, *at(10.6, 10.7), 1)
    recorder.runnable(T, 1)
    step(recorder, 1, *at(0, 10))
    step(recorder, 2, *at(10.8, 30))
    (bubble,) = find_bubbles(recorder.snapshot(), (T, T + 30 * MS))
    assert bubble.cause == "waking the loop" and bubble.share == pytest.approx(0.75)


def test_the_time_until_a_commit_where_nobody_awaits() -> None:
    recorder = Recorder()
    recorder.record(Phase.COMMIT, *at(17, 18), 1)
    assert gap_under(recorder) == "waking the loop"


def test_the_innermost_of_the_users_spans_is_to_blame() -> None:
    recorder = Recorder()
    recorder.record(Phase.USER, *at(11, 19), name="inner")
    recorder.record(Phase.USER, *at(10, 20), name="outer")
    recorder.record(Phase.CELL, *at(9, 21), 4)
    assert gap_under(recorder) == "inner"


def test_awaiting_is_neither_a_cause_nor_host_work() -> None:
    recorder = Recorder()
    recorder.record(Phase.AWAIT, *at(0, 30), 9)
    assert gap_under(recorder) == "unknown"
    held = recorder.snapshot()
    summary = summarize(held, (T, T + 30 * MS))
    assert summary.host_work_s == 0 and summary.overlap is None


def test_a_named_callback_and_host_work_of_two_threads() -> None:
    recorder = Recorder()
    recorder.record(Phase.CALLBACK, *at(10, 20), name="slider")
    recorder.record(Phase.PLAN, *at(2, 6), 2)
    recorder.record(Phase.LAUNCH, *at(4, 8), 2)
    assert gap_under(recorder) == "callback: slider"
    assert summarize(recorder.snapshot(), (T, T + 30 * MS)).host_work_s == 0.006


def test_lag_percentiles_are_values_that_occurred() -> None:
    recorder = Recorder()
    for i in range(101):
        recorder.lag(T + i, i * 10_000)
    summary = summarize(recorder.snapshot(), (T - 1, T + 101))
    assert (summary.lag.p50, summary.lag.p99, summary.lag.max) == (0.5, 0.99, 1.0)
    few = Recorder()
    for late in (1, 2, 868):
        few.lag(T + late * MS, late * MS)
    summary = summarize(few.snapshot(), (T - 1, T + 1_000 * MS))
    assert (summary.lag.p50, summary.lag.p99) == (2, 868)


def test_a_beat_that_was_due_in_the_window_counts_though_it_ran_after_its_end() -> None:
    recorder = planted()
    recorder.lag(T + 70 * MS, 30 * MS)  # due at 40, ran once the loop was let go of, after the last step
    recorder.lag(T + 90 * MS, 5 * MS)
    held = recorder.snapshot()
    assert summarize(held, window_of(held)).lag.max == 30


def test_awaiting_leaves_out_the_time_in_which_the_loop_was_late() -> None:
    recorder = Recorder()
    recorder.record(Phase.AWAIT, *at(0, 30), 1)
    recorder.lag(T + 25 * MS, 15 * MS)
    recorder.lag(T + 28 * MS, 100_000)  # that is a timer's
    assert awaiting_intervals(recorder.snapshot(), (T, T + 30 * MS)).tolist() == [list(at(0, 10)), list(at(25, 30))]


def test_windows() -> None:
    held = planted().snapshot()
    assert window_of(held) == (T, T + 60 * MS)
    assert window_of(held, 0.01) == (T + 50 * MS, T + 60 * MS)
    assert window_of(held, 100.0) == (T, T + 60 * MS)
    assert window_of(Recorder().snapshot()) == (0, 0)
    recorder = planted()
    recorder.record(Phase.CELL, *at(900, 990), 13)  # later cells do not push the work out of the window
    assert window_of(recorder.snapshot()) == (T, T + 60 * MS)
    small = Recorder(steps=2)
    for number in range(4):
        step(small, number, *at(10 * number, 10 * number + 5))
    assert window_of(small.snapshot()) == (T + 25 * MS, T + 35 * MS)


@pytest.mark.parametrize("last", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_bad_last_is_answered(last: object) -> None:
    timeline = Timeline(planted())
    with pytest.raises(InvalidRequestError, match="last"):
        timeline.summary(last)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="last"):
        timeline.figure(last)  # type: ignore[arg-type]


@given(st.data())
def test_bubbles_add_up_on_any_recording(data: st.DataObject) -> None:
    """Whatever was recorded: bubbles are runnable minus busy, and each has a cause with a share in (0, 1]."""
    recorder = Recorder()
    number = st.integers(0, GRID)
    for index, (start, end) in enumerate(data.draw(spans).tolist()):
        step(recorder, index, start, end, stream=index % 2)
    for start, end in data.draw(spans).tolist():
        recorder.record(
            data.draw(st.sampled_from(Phase)), start, end, data.draw(number), data.draw(st.sampled_from("ab"))
        )
    for moment in sorted(data.draw(st.lists(number, max_size=6))):
        recorder.runnable(moment, data.draw(st.integers(0, 2)))
    held = recorder.snapshot()
    busy = {cell for row in held.steps for cell in range(row["start"], row["end"])}
    if len(held.runnable):
        states = {row["at"]: row["count"] for row in held.runnable}
        runnable = {c for c in range(GRID) if states[max((t for t in states if t <= c), default=min(states))] > 0}
        runnable = {c for c in runnable if c >= min(states)}
    else:
        ends = [*held.steps["start"].tolist(), *held.steps["end"].tolist()]
        runnable = set(range(min(ends), max(ends))) if ends else set()
    summary = summarize(held, (0, GRID))
    found = {cell for b in summary.bubbles for cell in range(b.start_ns, b.end_ns)}
    assert found == runnable - busy
    assert all(0 < b.share <= 1 and b.cause for b in summary.bubbles)


PUT_DOWN_TO = {
    Phase.GC: "garbage collection: {name}",
    Phase.PLAN: "planning: {name}",
    Phase.CALLBACK: "callback: {name}",
    Phase.OTHER: "{name}",
    Phase.USER: "{name}",
    Phase.CELL: "user cell [{ref}]",
}


@settings(max_examples=200)
@given(
    st.integers(1, 10),
    st.lists(st.tuples(st.sampled_from([*PUT_DOWN_TO]), st.integers(0, 11), st.integers(1, 8)), max_size=6),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=2),
)
def test_causes_as_found_cell_by_cell(
    middle: int, drawn: list[tuple[Phase, int, int]], beats: list[tuple[int, int]]
) -> None:
    """The order of claims that `find_bubbles` states, looked up one ms after the other in two bubbles of 12 ms."""
    recorder = Recorder()
    for number, start in enumerate((-1, middle, 12)):
        step(recorder, number, start * MS, (start + 1) * MS)
    kept = [(phase, start, start + length, f"n{i}", i) for i, (phase, start, length) in enumerate(drawn)]
    for phase, start, end, name, ref in kept:
        recorder.record(phase, start * MS, end * MS, ref, name)
    for moment, late in beats:
        recorder.lag(moment * MS, late * MS)

    held = {cell for moment, late in beats for cell in range(moment - late, moment)}
    signs = [moment for moment, _ in beats] + [start for phase, start, *_ in kept if phase is Phase.PLAN]
    open_ended = (Phase.CELL, Phase.USER)
    covered = {cell for phase, a, b, *_ in kept if phase not in open_ended for cell in range(a, b)}

    def claims(cell: int) -> list[tuple[int, int, int, str]]:
        found = [(1, 0, 0, "late loop")] if cell in held else [(0, 0, 0, "unknown")]
        for phase, start, end, name, ref in kept:
            alive = phase in open_ended and any(start < sign < end for sign in signs)
            inside = phase is Phase.USER and set(range(start, end)) <= covered
            rank = {Phase.GC: 6, Phase.OTHER: 4, Phase.CELL: 3, Phase.USER: 5 if inside else 3}.get(phase, 5)
            if start <= cell < end and (not alive or cell in held):
                found.append((rank, start, -end, PUT_DOWN_TO[phase].format(name=name, ref=ref)))
        return found

    for bubble in find_bubbles(recorder.snapshot(), (0, 12 * MS)):
        parts: dict[str, int] = {}
        for cell in range(bubble.start_ns // MS, bubble.end_ns // MS):
            best = max(claims(cell))
            assume(sum(claim[:3] == best[:3] for claim in claims(cell)) == 1)
            parts[best[3]] = parts.get(best[3], 0) + 1
        assert parts[bubble.cause] == max(parts.values())
        assert bubble.share == pytest.approx(parts[bubble.cause] / sum(parts.values()))


def test_a_span_of_the_users_inside_the_engines_is_to_blame() -> None:
    recorder = Recorder()
    recorder.record(Phase.COMMIT, *at(10, 20), 1)
    recorder.record(Phase.USER, *at(11, 19), name="a listener")
    assert gap_under(recorder) == "a listener"


def test_one_that_only_begins_there_is_not() -> None:
    recorder = Recorder()
    recorder.record(Phase.COMMIT, *at(10, 19.5), 1)
    recorder.record(Phase.USER, *at(11, 20), name="my work")
    assert gap_under(recorder) == "committing"


def test_the_critical_path_adds_up() -> None:
    held = planted().snapshot()
    path = critical_path(held, window_of(held))
    assert path is not None and sum(path) == pytest.approx(1)
    assert path.device == pytest.approx(41 / 60)
    # Committing 10.2 to 12.5, launching 30 to 30.1, planning 40 to 47: also under a collection it is the engine's.
    assert path.host == pytest.approx((2.3 + 0.1 + 7) / 60)
    assert critical_path(Recorder().snapshot(), (0, 1)) is None


def test_several_devices_have_shares_of_their_own() -> None:
    recorder = Recorder()
    recorder.step(T, T + 8 * MS, step_id=1, batch_size=1, tokens=1, prefill_tokens=0, device=0)
    recorder.step(T + 4 * MS, T + 10 * MS, step_id=2, batch_size=1, tokens=1, prefill_tokens=0, device=1)
    recorder.work(T, T + 2 * MS, "copy", device=1, stream=5)
    summary = summarize(recorder.snapshot(), (T, T + 10 * MS))
    assert summary.devices == {0: 0.8, 1: 0.8} and summary.busy == 0.8
    assert summary.bubbles == () and "GPU 0 80.0 %, GPU 1 80.0 %" in str(summary)


def test_a_windows_ends_may_be_given() -> None:
    timeline = Timeline(planted())
    assert timeline.summary(window=(T, T + 20 * MS)).busy == 17 / 20
    for window in ((5, 5), (1,), "ab", (3, 1)):
        with pytest.raises(InvalidRequestError, match="window"):
            timeline.summary(window=window)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="window"):
        timeline.summary(1.0, window=(T, T + 1))


def test_loading_does_not_stretch_the_window() -> None:
    recorder = planted()
    recorder.record(Phase.LOAD, T - 9_000 * MS, T - 500 * MS, name="a model")
    recorder.record(Phase.CAPTURE, T - 500 * MS, T - 400 * MS)
    assert window_of(recorder.snapshot()) == (T, T + 60 * MS)


@pytest.mark.parametrize(
    "window",
    [(0, float("inf")), (float("nan"), 1), (0, 2**63), (0, 2**64), (-(2**62), 0), (0, 2**62), (5, 5), (1,), "x", 3],
)
def test_a_bad_window_is_answered(window: object) -> None:
    timeline = Timeline(planted())
    for call in (timeline.summary, timeline.figure, timeline.show):
        with pytest.raises(InvalidRequestError, match="window"):
            call(window=window)  # type: ignore[operator]


def test_a_window_may_be_as_wide_as_times_are() -> None:
    timeline = Timeline(planted())
    timeline.recorder.lag(T, 5 * MS)
    widest = 1 - 2**62, 2**62 - 1
    assert 0 < timeline.summary(window=widest).busy < 1e-9  # type: ignore[operator]
    assert timeline.figure(window=widest)._repr_png_()
    assert timeline.summary(1e308) == timeline.summary()


def test_a_step_in_flight_ends_the_window_at_the_last_known_one() -> None:
    recorder = Recorder()
    recorder.runnable(T, 1)
    for number, start in ((1, 0), (2, 8)):
        recorder.record(Phase.LAUNCH, T + start * MS, T + (start + 1) * MS, number)
    recorder.step(T + MS, T + 10 * MS, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.runnable(T + 25 * MS, 0)  # cancelled, with step 2 on the device
    held = recorder.snapshot()
    assert window_of(held) == (T, T + 10 * MS)
    assert all(bubble.cause != "unknown" for bubble in find_bubbles(held, window_of(held)))
    recorder.step(T + 10 * MS, T + 28 * MS, step_id=2, batch_size=1, tokens=1, prefill_tokens=0)
    assert window_of(recorder.snapshot()) == (T, T + 28 * MS)
