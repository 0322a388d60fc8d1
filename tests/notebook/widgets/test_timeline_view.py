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
from interactive_infer.notebook.widgets import panel, timeline_view
from interactive_infer.notebook.widgets.timeline_view import TimelineView
from interactive_infer.timeline import Phase, Recorder, Timeline, Work

SOURCE = Path(widgets.__file__).parent / "timeline_view.js"


class FrontEnd:
    """The browser's side: what has arrived, and how often the output was renewed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[dict[str, Any]] = []
        self.intervals: list[tuple[int, float, float]] = []
        self.lags: list[tuple[float, float]] = []
        self.counts: list[tuple[float, float]] = []
        self.renewed = 0
        monkeypatch.setattr(TimelineView, "send", lambda view, content, buffers: self.receive(content, buffers))
        monkeypatch.setattr(TimelineView, "renew", lambda view: self._renew())

    def _renew(self) -> None:
        self.renewed += 1

    def receive(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append(content)
        if content["first"]:
            self.intervals, self.lags, self.counts = [], [], []
        rows, lanes = np.frombuffer(buffers[0], np.float64).reshape(-1, 2), np.frombuffer(buffers[1], np.uint8)
        assert len(rows) == len(lanes)
        self.intervals += [(lane, *row) for lane, row in zip(lanes.tolist(), rows.tolist(), strict=True)]
        self.lags += np.frombuffer(buffers[2], np.float64).reshape(-1, 2).tolist()
        self.counts += np.frombuffer(buffers[3], np.float64).reshape(-1, 2).tolist()


async def see(view: TimelineView, visible: bool, page: str = "page") -> None:
    """Say that a page is in sight or not, and let it be heard."""
    view._handle_custom_msg({"visible": visible, "page": page}, [])
    await asyncio.sleep(0)


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
    await see(view, True)
    recorder.step(now(view, 5), now(view, 6), step_id=2, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.work(now(view, 6), now(view, 7), "mine")
    recorder.lag(now(view, 6), 250_000)
    recorder.runnable(now(view, 2), 3)
    await see(view, True)
    assert len(front_end.messages) == 1, "it goes on in its time"
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
    assert [message["first"] for message in front_end.messages] == [True, False]
    view.close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def test_it_goes_on_by_itself_and_pauses_while_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_view, "UPDATE_S", 0.005)
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    assert not view.sending
    await see(view, True)
    await until(lambda: len(front_end.messages) >= 3)
    await see(view, False)
    assert not view.sending
    sent = len(front_end.messages)
    timeline.recorder.record(Phase.PLAN, now(view, 1), now(view, 2))
    await asyncio.sleep(0.05)
    assert len(front_end.messages) == sent
    await asyncio.to_thread(view._handle_custom_msg, {"visible": True, "page": "page"}, [])  # as ipykernel 7 may
    await until(lambda: view.sending)
    assert front_end.messages[sent]["first"]
    assert sum(view.lanes.get(str(lane)) == "plan" for lane, *_ in front_end.intervals) == 1
    view.close()
    assert not view.sending


async def test_who_goes_on_looking_sees_it_go_on_and_who_is_gone_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_view, "UPDATE_S", 0.01)
    monkeypatch.setattr("interactive_infer.notebook.widgets.panel.UNSEEN_AFTER_S", 0.5)
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    for _ in range(20):
        await see(view, True)
        assert view.sending
        await asyncio.sleep(0.05)
    assert [message["first"] for message in front_end.messages].count(True) == 1, "what is there is not sent again"
    await until(lambda: not view.sending)
    await until(lambda: front_end.renewed)
    await see(view, True)
    assert view.sending and front_end.messages[-1]["first"]
    view.close()


async def test_a_page_that_comes_while_it_goes_on_gets_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    await see(view, True)
    view._handle_custom_msg({"hello": True}, [])
    await see(view, True, "another page")
    view._tick()
    assert [message["first"] for message in front_end.messages] == [True, True]
    await see(view, False)
    assert view.sending, "the other page still looks"
    await see(view, False, "another page")
    assert not view.sending
    view.close()


async def test_it_ends_with_its_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    FrontEnd(monkeypatch)
    timeline = Timeline()
    view = timeline.live()
    await see(view, True)
    assert view.sending
    del timeline
    gc.collect()
    view._tick()
    assert not view.sending
    view.close()


async def test_what_is_saved_needs_no_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline(device="<b>GPU</b>", source="a stopwatch")
    view = timeline.live()
    assert set(view.bundle()) == {"text/plain", "text/html"}
    assert view.bundle()["text/plain"] == "<b>GPU</b>: the last 10 s, live"
    await see(view, True)
    timeline.recorder.step(now(view, 1), now(view, 3), step_id=1, batch_size=1, tokens=9, prefill_tokens=8)
    await see(view, False)
    await until(lambda: front_end.renewed)
    bundle = view.bundle()
    assert "a stopwatch" in bundle["text/plain"]
    assert "tokens drawn" in bundle["text/plain"] and "tokens drawn" in bundle["text/html"]
    assert "&lt;b&gt;GPU" in bundle["text/html"] and "<b>" not in bundle["text/html"]
    view.close()


async def test_only_the_last_seconds_are_sent_and_clearing_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = FrontEnd(monkeypatch)
    timeline = Timeline(Recorder(spans=8))
    view = timeline.live(1.0)
    for ms in (-5_000, -1_500, -500, 0):
        timeline.recorder.record(Phase.PLAN, now(view, ms - 1), now(view, ms))
    await see(view, True)
    plans = [end for lane, _, end in front_end.intervals if view.lanes[str(lane)] == "plan"]
    assert plans == [-500, 0]
    timeline.clear()
    timeline.recorder.record(Phase.COMMIT, now(view, 1), now(view, 2))
    view._tick()
    assert [end for lane, _, end in front_end.intervals if view.lanes[str(lane)] == "commit"] == [2]
    view.close()


@pytest.mark.parametrize(
    "content", [{}, {"visible": 1}, {"visible": True}, {"visible": True, "page": 1}, {"hello": 1}, [], None]
)
async def test_messages_that_are_not_ours_are_ignored(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    FrontEnd(monkeypatch)
    view = Timeline().live()
    view._handle_custom_msg(content, [])
    await asyncio.sleep(0)
    assert not view.sending
    view.close()


def test_without_a_loop_it_says_what_to_use() -> None:
    with pytest.raises(WrongLoopError, match="figure"):
        Timeline().live()


@pytest.mark.parametrize("seconds", [0, -1, 500, "10", True, float("nan")])
def test_bad_seconds(seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match="seconds"):
        Timeline().live(seconds)


def test_without_anywidget_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (timeline_view, panel):
        monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(MissingPackageError, match="notebook"):
        Timeline().live()


def test_the_page_inserts_text_only_as_text() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|srcdoc", source)
