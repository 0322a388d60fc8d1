from __future__ import annotations

import asyncio
import gc
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interactive_infer.errors import InvalidRequestError, MissingPackageError, WrongLoopError
from interactive_infer.notebook import widgets
from interactive_infer.notebook.widgets import timeline_view
from interactive_infer.notebook.widgets.timeline_view import TimelineView
from interactive_infer.timeline import Phase, Recorder, Timeline, Work

SOURCE = Path(widgets.__file__).parent / "timeline_view.js"


class FrontEnd:
    """The browser's side: what has arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[dict[str, Any]] = []
        self.intervals: list[tuple[int, float, float]] = []
        self.lags: list[tuple[float, float]] = []
        self.counts: list[tuple[float, float]] = []
        monkeypatch.setattr(TimelineView, "send", lambda view, content, buffers: self.receive(content, buffers))

    def receive(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append(content)
        if content["first"]:
            self.intervals, self.lags, self.counts = [], [], []
        rows, lanes = np.frombuffer(buffers[0], np.float64).reshape(-1, 2), np.frombuffer(buffers[1], np.uint8)
        assert len(rows) == len(lanes)
        self.intervals += [(lane, *row) for lane, row in zip(lanes.tolist(), rows.tolist(), strict=True)]
        self.lags += np.frombuffer(buffers[2], np.float64).reshape(-1, 2).tolist()
        self.counts += np.frombuffer(buffers[3], np.float64).reshape(-1, 2).tolist()


def now(view: TimelineView, ms: float) -> int:
    return view._origin_ns + round(ms * 1e6)


async def test_what_is_recorded_arrives_once_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline(device="GPU")
    recorder = timeline.recorder
    view = timeline.live(10.0)
    recorder.step(now(view, 1), now(view, 3), step_id=1, batch_size=1, tokens=9, prefill_tokens=8)
    recorder.record(Phase.PLAN, now(view, 0.5), now(view, 0.75), 1)
    recorder.work(now(view, 4), now(view, 5), "a kernel", kind=Work.KERNEL)
    view._tick()
    recorder.step(now(view, 5), now(view, 6), step_id=2, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.work(now(view, 6), now(view, 7), "mine")
    recorder.lag(now(view, 6), 250_000)
    recorder.runnable(now(view, 2), 3)
    view._tick()
    lanes = dict(view.lanes)
    own = {number for number, label in lanes.items() if label == "callbacks"}
    found = [interval for interval in front_end.intervals if str(interval[0]) not in own]
    assert [(lanes.get(str(n), n), start, end) for n, start, end in found] == [
        ("plan", 0.5, 0.75),
        (timeline_view._PREFILL, 1, 3),
        (timeline_view._DECODE, 5, 6),
        (timeline_view._DEVICE_SPAN, 6, 7),
    ]
    assert front_end.lags == [[6, 0.25]] and front_end.counts == [[2, 3]]
    assert [message["first"] for message in front_end.messages] == [True, False, False]
    view.close()


async def test_it_goes_on_by_itself_and_pauses_while_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_view, "UPDATE_S", 0.005)
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    while len(front_end.messages) < 3:
        await asyncio.sleep(0.005)
    view._handle_custom_msg({"seen": False}, [])
    await asyncio.sleep(0)
    assert not view.sending
    sent = len(front_end.messages)
    timeline.recorder.record(Phase.PLAN, now(view, 1), now(view, 2))
    await asyncio.sleep(0.05)
    assert len(front_end.messages) == sent
    await asyncio.to_thread(view._handle_custom_msg, {"seen": True}, [])  # as ipykernel 7 may
    while not view.sending:
        await asyncio.sleep(0.001)
    assert front_end.messages[sent]["first"]
    assert sum(view.lanes.get(str(lane)) == "plan" for lane, *_ in front_end.intervals) == 1
    view.close()
    assert not view.sending


async def test_it_ends_with_its_recorder_and_without_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    del timeline
    gc.collect()
    view._tick()
    assert not view.sending
    monkeypatch.setattr(timeline_view, "_UNHEARD_S", -1.0)
    kept = Timeline()
    assert not kept.live().sending
    view.close()


async def test_only_the_last_seconds_are_sent_and_clearing_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline(Recorder(spans=8))
    view = timeline.live(1.0)
    for ms in (-5_000, -1_500, -500, 0):
        timeline.recorder.record(Phase.PLAN, now(view, ms - 1), now(view, ms))
    view._see(True)
    plans = [end for lane, _, end in front_end.intervals if view.lanes[str(lane)] == "plan"]
    assert plans == [-500, 0]
    timeline.clear()
    timeline.recorder.record(Phase.COMMIT, now(view, 1), now(view, 2))
    view._tick()
    assert [end for lane, _, end in front_end.intervals if view.lanes[str(lane)] == "commit"] == [2]
    view.close()


@pytest.mark.parametrize("content", [{}, {"seen": 1}, {"seen": "no"}, [], None])
async def test_messages_that_are_not_ours_are_ignored(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    FrontEnd(monkeypatch)
    view = Timeline().live()
    view._handle_custom_msg(content, [])
    await asyncio.sleep(0)
    assert view.sending
    view.close()


def test_without_a_loop_it_says_what_to_use() -> None:
    with pytest.raises(WrongLoopError, match="figure"):
        Timeline().live()


@pytest.mark.parametrize("seconds", [0, -1, 500, "10", True, float("nan")])
def test_bad_seconds(seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match="seconds"):
        Timeline().live(seconds)


def test_without_anywidget_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, timeline_view.__name__)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(MissingPackageError, match="notebook"):
        Timeline().live()


def test_the_page_inserts_text_only_as_text() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|srcdoc", source)
