from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Recorder, Timeline, Work


def test_keeps_what_it_was_told_in_order() -> None:
    recorder = Recorder()
    recorder.record(Phase.PLAN, 10, 20, 7)
    recorder.record(Phase.CALLBACK, 15, 16, name="slider")
    recorder.step(30, 40, step_id=7, batch_size=2, tokens=9, prefill_tokens=8, graph=True, stream=1)
    recorder.lag(50, 3)
    recorder.runnable(5, 2)
    recorder.runnable(6, 2)  # no change, no record
    recorder.runnable(60, 0)
    held = recorder.snapshot()
    assert held.spans[["start", "end", "phase", "ref"]].tolist() == [
        (10, 20, Phase.PLAN, 7),
        (15, 16, Phase.CALLBACK, 0),
    ]
    assert held.names.tolist() == ["", "slider"]
    assert held.steps.tolist() == [(1, 30, 40, 7, 2, 9, 8, 1, 1, 1, 0)]
    assert held.lags[["at", "lag"]].tolist() == [(50, 3)]
    assert held.runnable[["at", "count"]].tolist() == [(5, 2), (60, 0)]
    assert held.complete_from == 0


def test_a_full_ring_drops_the_oldest_and_says_from_when_it_is_complete() -> None:
    recorder = Recorder(spans=4, steps=4)
    for i in range(10):
        recorder.record(Phase.USER, 10 * i, 10 * i + 5, i, f"n{i}" if i % 2 else None)
    held = recorder.snapshot()
    assert held.spans["ref"].tolist() == [6, 7, 8, 9]
    assert held.names.tolist() == ["", "n7", "", "n9"]
    assert held.complete_from == 65
    recorder.record(Phase.PLAN, 100, 101)  # takes n7's neighbour's slot, has no name
    recorder.record(Phase.PLAN, 102, 103)  # takes n7's slot
    assert recorder.snapshot().names.tolist() == ["", "n9", "", ""]


def test_a_snapshot_does_not_change() -> None:
    recorder = Recorder(spans=2)
    recorder.record(Phase.PLAN, 1, 2, 1)
    held = recorder.snapshot()
    recorder.record(Phase.PLAN, 3, 4, 2)
    recorder.record(Phase.PLAN, 5, 6, 3)
    assert held.spans["ref"].tolist() == [1]
    assert held != recorder.snapshot()


def test_many_threads_lose_and_tear_nothing() -> None:
    recorder = Recorder(spans=8 * 2_000)
    stop = threading.Event()

    def write(thread: int) -> None:
        for i in range(2_000):
            value = thread * 10_000 + i
            recorder.record(Phase.USER, value, 2 * value, value, str(value))

    def read() -> None:
        while not stop.is_set():
            check(recorder)

    def check(recorder: Recorder) -> None:
        held = recorder.snapshot()
        assert (held.spans["end"] == 2 * held.spans["start"]).all()
        assert (held.spans["ref"] == held.spans["start"]).all()

    failures: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda args: failures.append(args.exc_value)  # type: ignore
    try:
        writers = [threading.Thread(target=write, args=(i,)) for i in range(8)]
        reader = threading.Thread(target=read)
        for thread in [reader, *writers]:
            thread.start()
        for thread in writers:
            thread.join(60)
        stop.set()
        reader.join(60)
    finally:
        threading.excepthook = hook
    assert not failures
    held = recorder.snapshot()
    assert sorted(held.spans["ref"].tolist()) == sorted(t * 10_000 + i for t in range(8) for i in range(2_000))
    assert held.names.tolist() == [str(ref) for ref in held.spans["ref"].tolist()]


def test_a_span_is_recorded_when_its_block_raises() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span("my work"):
        raise KeyError
    with recorder.span(Phase.PUBLISH, 3):
        pass
    held = recorder.snapshot()
    assert held.spans["phase"].tolist() == [Phase.USER, Phase.PUBLISH]
    assert held.spans["ref"].tolist() == [0, 3]
    assert held.names.tolist() == ["my work", ""]
    assert (held.spans["start"] <= held.spans["end"]).all()
    assert held.spans["end"][0] <= held.spans["start"][1]


def test_clear_forgets_all_but_what_is_runnable() -> None:
    recorder = Recorder(spans=2)
    for i in range(5):
        recorder.record(Phase.PLAN, i, i + 1)
    recorder.runnable(3, 4)
    recorder.clear()
    held = recorder.snapshot()
    assert (len(held.spans), len(held.steps), len(held.lags), held.complete_from) == (0, 0, 0, 0)
    assert held.runnable["count"].tolist() == [4]
    recorder.runnable(10, 0)
    recorder.clear()
    assert len(recorder.snapshot().runnable) == 0


def test_a_recorder_made_of_a_recording_equals_it_and_goes_on() -> None:
    recorder = Recorder(spans=3)
    for i in range(5):
        recorder.record(Phase.USER, i, i + 1, i, str(i))
    recorder.runnable(2, 1)
    held = recorder.snapshot()
    again = Recorder.of(held)
    assert again.snapshot() == held
    again.runnable(3, 1)
    assert again.snapshot() == held
    again.runnable(4, 0)
    assert again.snapshot() != held


def test_wrong_arguments() -> None:
    for argument in ("spans", "steps", "lags", "edges"):
        with pytest.raises(InvalidRequestError, match=argument):
            Recorder(**{argument: 0})
    recorder = Recorder()
    with pytest.raises(InvalidRequestError, match="end_ns"):
        recorder.record(Phase.PLAN, 2, 1)
    with pytest.raises(InvalidRequestError, match="end_ns"):
        recorder.step(2, 1, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    assert len(recorder.snapshot().spans) == len(recorder.snapshot().steps) == 0


def test_garbage_collections_are_heard_until_the_watch_is_closed() -> None:
    recorder = Recorder()
    with recorder.watch_gc(threshold_ns=0) as watch:
        gc.collect()
        held = recorder.snapshot()
        full = held.spans[held.spans["ref"] == 2]
        assert len(full) >= 1 and (full["phase"] == Phase.GC).all()
    count = len(gc.callbacks)
    watch.close()
    assert len(gc.callbacks) == count
    before = len(recorder.snapshot().spans)
    gc.collect()
    assert len(recorder.snapshot().spans) == before


def test_short_collections_are_left_out() -> None:
    recorder = Recorder()
    with recorder.watch_gc(threshold_ns=10**15):
        gc.collect()
    assert len(recorder.snapshot().spans) == 0


def test_a_watch_neither_keeps_its_recorder_nor_outlives_it() -> None:
    before = list(gc.callbacks)
    recorder = Recorder()
    watch = recorder.watch_gc()
    gone = weakref.ref(recorder)
    assert len(gc.callbacks) == len(before) + 1
    gc.disable()
    try:
        del recorder
        assert gone() is None
    finally:
        gc.enable()
    assert gc.callbacks == before
    watch.close()


def test_a_collection_in_the_middle_of_a_record_is_recorded_too() -> None:
    recorder = Recorder()
    threshold = gc.get_threshold()
    with recorder.watch_gc(threshold_ns=0):
        gc.set_threshold(1)
        try:
            kept = [[] for _ in range(500) if recorder.record(Phase.PLAN, 1, 2, 5) is None]  # type: ignore
        finally:
            gc.set_threshold(*threshold)
    held = recorder.snapshot()
    assert np.count_nonzero(held.spans["phase"] == Phase.PLAN) == len(kept) == 500
    assert np.count_nonzero(held.spans["phase"] == Phase.GC) > 0


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=8), st.booleans())
def test_reading_what_is_new_misses_and_repeats_nothing(capacity: int, batches: list[int], cleared: bool) -> None:
    recorder = Recorder(spans=capacity)
    written, seen, last = 0, [], 0
    for number, batch in enumerate(batches):
        for _ in range(batch):
            written += 1
            recorder.record(Phase.USER, written, written, written)
        if cleared and number == 3:
            recorder.clear()
            last_of_cleared = written
            seen = [ref for ref in seen if ref <= last_of_cleared]
        new = recorder.tail((last, 0, 0, 0, 0))[0]
        expected = [ref for ref in recorder.snapshot().spans["ref"].tolist() if not seen or ref > seen[-1]]
        assert new["ref"].tolist() == expected
        seen += expected
        last = int(new["number"][-1]) if len(new) else last
    assert seen == sorted(set(seen))


def test_a_span_that_goes_on_is_seen_as_ending_now() -> None:
    recorder = Recorder()
    recorder.begin(Phase.CELL, 100, 7)
    recorder.record(Phase.PLAN, 1, 2)
    held = recorder.snapshot()
    assert held.spans[["start", "phase", "ref"]].tolist() == [(1, Phase.PLAN, 0), (100, Phase.CELL, 7)]
    assert held.spans["end"][1] > 100
    recorder.end(Phase.CELL, 300, 7)
    recorder.end(Phase.CELL, 400, 7)
    assert recorder.snapshot().spans[["start", "end", "ref"]].tolist() == [(1, 2, 0), (100, 300, 7)]


def test_room_for_a_profile_keeps_what_there_is_and_readers_where_they_are() -> None:
    recorder = Recorder(work=4)
    for at in range(6):
        recorder.work(at, at + 1, f"k{at}")
    read = int(recorder.tail()[2]["number"][-1])
    recorder.make_room(3)
    assert recorder.snapshot().work_names.tolist() == ["k2", "k3", "k4", "k5"]
    recorder.make_room(100)
    for at in range(6, 20):
        recorder.work(at, at + 1, f"k{at}" if at % 2 else "even")
    held = recorder.snapshot()
    assert held.work["start"].tolist() == [*range(2, 20)] and held.work_names.tolist()[3:6] == ["k5", "even", "k7"]
    assert recorder.tail((0, 0, read, 0, 0))[2]["start"].tolist() == [*range(6, 20)]
    assert recorder.snapshot().complete_from == 3, "what was pushed out before is still gone"


def test_where_device_work_was_pushed_out_busy_says_nothing() -> None:
    """Back to back the device was busy all the time; the records of the first half are gone."""
    timeline = Timeline(Recorder(work=50))
    for at in range(0, 1_000, 10):
        timeline.recorder.record(Phase.USER, at, at + 1)
        timeline.recorder.work(at, at + 10, "x")
    assert timeline.recording().complete_from == 510 and timeline.summary().busy == 1.0


def test_kernels_that_were_pushed_out_only_shorten_the_profile() -> None:
    recorder = Recorder(work=4)
    recorder.step(0, 100, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    for at in range(10):
        recorder.work(10 * at, 10 * at + 5, "k", kind=Work.KERNEL)
    assert recorder.snapshot().complete_from == 0


def test_a_span_is_begun_and_ended_by_turns() -> None:
    recorder = Recorder()
    for span in (recorder.span("mine"), Timeline(recorder).span("mine", device=True)):
        with pytest.raises(InvalidRequestError, match="span='mine': it has not begun"):
            span.__exit__(None, None, None)
        for _ in range(2):
            with span, pytest.raises(InvalidRequestError, match="span='mine': it has begun"):
                span.__enter__()
        with pytest.raises(InvalidRequestError, match="span='mine': it has not begun, or has ended"):
            span.__exit__(None, None, None)
    assert recorder.snapshot().names.tolist() == 4 * ["mine"]
    with pytest.raises(InvalidRequestError, match="span='plan'"):
        recorder.span(Phase.PLAN, 3).__exit__(None, None, None)


def test_each_larger_profile_is_whole() -> None:
    recorder = Recorder(work=4)
    for begin, count in ((0, 9), (1_000, 10), (2_000, 500)):
        recorder.make_room(count)
        for at in range(begin, begin + count):
            recorder.work(at, at + 1, "k", kind=Work.KERNEL)
        recorder.profiled(begin, begin + count)
        assert recorder.snapshot().profiled.tolist()[-1] == [begin, begin + count]
    recorder.work(5_000, 5_001, "a later one")
    assert recorder.snapshot().profiled.tolist() == [[2_000, 2_500]]
    recorder.work(5_001, 5_002, "pushes the first one out")
    assert recorder.snapshot().profiled.tolist() == [[2_002, 2_500]], "what is there from the end of the second on"
