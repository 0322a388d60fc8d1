"""Kernels from torch.profiler: of traces made elsewhere, and of a window profiled now."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Timeline, Work
from interactive_infer.timeline.profiler import Profile, _placed, _without_kernels, kernels_of
from interactive_infer.timeline.recorder import CPU, Recorder
from interactive_infer.timeline.recording import WORK
from interactive_infer.timeline.summary import KERNELS, OPERATORS


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


ELSEWHERE: dict[str, Any] = {
    "schemaVersion": 1,
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("Trace", "PyTorch Profiler (0)", 100.0, 100.0),
        event("kernel", "gemm", 110.0, 20.0, device=0, stream=7),
        event("kernel", "in a graph", 135.125, 10.5, device=0, stream=7),
        event("kernel", "in a graph", 135.125, 10.5, device=0, stream=7),  # there twice
        event("gpu_memcpy", "Memcpy DtoH", 120.0, 20.0, device=0, stream=20),
        event("cuda_sync", "Stream Sync", 100.0, 100.0, device=0, stream=7),
        event("gpu_user_annotation", "step", 100.0, 90.0, device=0, stream=7),
        event("cuda_runtime", "cudaGraphLaunch", 101.0, 99.0),
        event("cpu_op", "aten::mm", 100.0, 100.0),
        event("user_annotation", "ProfilerStep#3", 105.0, 90.0),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 101.0, "pid": 0, "tid": 7, "id": 1},
    ],
}


def test_a_trace_made_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ELSEWHERE))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ELSEWHERE).encode()))
    for path in tmp_path.iterdir():
        timeline = Timeline.load(path)
        held = timeline.recorder.snapshot()
        base = ELSEWHERE["baseTimeNanoseconds"]
        found = zip(held.work_names.tolist(), held.work["start"] - base, held.work["end"] - base, strict=True)
        assert list(found) == [
            ("gemm", 110_000, 130_000),
            ("Memcpy DtoH", 120_000, 140_000),
            ("in a graph", 135_125, 145_625),
        ]
        assert held.work["stream"].tolist() == [7, 20, 7] and (held.work["kind"] == Work.KERNEL).all()
        assert held.names.tolist() == ["ProfilerStep#3"] and held.spans["phase"].tolist() == [Phase.USER]
        summary = timeline.summary(window=(base + 100_000, base + 200_000))
        assert summary.busy == pytest.approx(0.35625) and summary.source == KERNELS
        assert summary.largest_bubble is None, "before the first kernel and after the last nothing was to be done"
        assert timeline.figure()._repr_png_()
        again = tmp_path.parent / "saved.json"
        timeline.save(again)
        assert Timeline.load(again).recorder.snapshot() == held


def test_without_a_card_the_outermost_operators_count(tmp_path: Path) -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, torch.profiler.record_function("my part"):
        torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    held = Timeline.load(tmp_path / "t.json").recorder.snapshot()
    assert "aten::linear" in held.work_names.tolist() and "aten::addmm" not in held.work_names.tolist()
    assert "my part" in held.names.tolist()
    assert (held.work["device"] == CPU).all()
    for stream in np.unique(held.work["stream"]):
        mine = np.sort(held.work[held.work["stream"] == stream], order="start")
        assert (mine["end"][:-1] <= mine["start"][1:]).all()


@pytest.mark.parametrize("data", [{"traceEvents": []}, {"traceEvents": [event("cpu_op", "x", "no", 1)]}])
def test_a_trace_without_anything_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(InvalidRequestError, match="path"):
        Timeline.load(tmp_path / "t.json")


def test_marks_place_kernels_to_the_nanosecond_in_spite_of_drift() -> None:
    """The profiler's clock is off by hours and runs 1e-4 too fast; the narrowest reading of each end counts."""
    here = np.array([0, 40, 90, 1_000_000_000, 1_000_000_400, 1_000_000_900]) + 5_000_000_000_000
    there = np.rint((here - here[0]) * 1.0001).astype(np.int64) + 10**18
    slack = np.array([500, 0, 900, 700, 0, 300])
    readings = np.stack([here - slack, here + 2 * slack], axis=1)
    rows = np.zeros(3, WORK)
    rows["start"] = there[[1, 2, 4]]
    rows["end"] = there[[2, 3, 5]]
    placed = _placed(rows, there, readings)
    assert np.abs(placed["start"] - here[[1, 2, 4]]).max() <= 1
    assert np.abs(placed["end"] - here[[2, 3, 5]]).max() <= 1
    with pytest.raises(RuntimeError, match="marks"):
        _placed(rows, there[1:], readings)


def compute(timeline: Timeline, steps: int, stop: threading.Event | None = None) -> None:
    """Steps of operators on this thread, as a CPU engine's device does."""
    for number in range(steps):
        if stop is not None and stop.is_set():
            return
        start = time.perf_counter_ns()
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
        timeline.recorder.step(start, time.perf_counter_ns(), step_id=number, batch_size=1, tokens=1, prefill_tokens=0)


def test_profiled_now_operators_lie_inside_their_steps() -> None:
    timeline = Timeline(Recorder(device=CPU))
    with timeline.profile() as profile:
        worker = threading.Thread(target=compute, args=(timeline, 20))
        worker.start()
        worker.join()
    held = timeline.recorder.snapshot()
    names = held.work_names.tolist()
    products = held.work[[name == "aten::mm" for name in names]]
    assert len(products) == 20 and profile.num_kernels == len(names)
    assert not any(name.startswith("interactive_infer") for name in names)
    inside = (held.steps["start"][:, None] <= products["start"]) & (products["end"] <= held.steps["end"][:, None])
    assert inside.any(axis=0).sum() >= 18, "the profiler's clock is placed to within microseconds"
    summary = timeline.summary(window=profile.window)
    assert summary.source == OPERATORS and summary.profiled is not None
    assert summary.busy == pytest.approx(summary.profiled.busy)
    assert 0 < summary.profiled.busy <= summary.profiled.busy_by_steps + 0.02
    assert "by kernels" in str(summary)
    assert timeline.summary().profiled is not None


def test_in_a_profiled_window_host_work_is_hidden_by_kernels() -> None:
    timeline = Timeline(Recorder(device=0))
    recorder = timeline.recorder
    recorder.step(0, 100, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.record(Phase.COMMIT, 20, 60, 0)
    assert timeline.summary(window=(0, 100)).overlap == 1.0
    for start, end in ((0, 30), (50, 100)):
        recorder.work(start, end, "k", kind=Work.KERNEL)
    recorder.profiled(0, 100)
    summary = timeline.summary(window=(0, 100))
    assert (summary.busy, summary.overlap, summary.bubbles) == (0.8, 0.5, ())
    assert timeline.summary(window=(0, 101)).overlap == 1.0, "not every kernel of it is known"


class FakeProfiler:
    """torch.profiler on a card: its clock is an hour off, and between its marks a kernel ran for half of a step."""

    def __init__(self, use_device: str | None, use_kineto: bool, experimental_config: object) -> None:
        assert use_device == "cuda" and use_kineto

    def __enter__(self) -> None:
        torch.autograd.profiler._run_on_profiler_start()

    def __exit__(self, *_: object) -> None:
        torch.autograd.profiler._run_on_profiler_stop()

    def export_chrome_trace(self, path: str) -> None:
        readings = self.of._readings  # type: ignore[attr-defined]
        ran = self.ran  # type: ignore[attr-defined]
        off = 3_600_000_000_000
        events = [event("user_annotation", "interactive_infer clock", (a + b) // 2 / 1e3, 1) for a, b in readings]
        events += [event("cpu_op", "aten::mm", ran[0] / 1e3, 900, device=0)]
        events += [event("kernel", "k", ran[0] / 1e3, (ran[1] - ran[0]) / 1e3, device=0, stream=7)]
        events += [event("gpu_user_annotation", "no work", ran[0] / 1e3, 10**6, device=0, stream=7)]
        for each in events:
            each["ts"] = round(each["ts"] - events[0]["ts"], 3)
        base = (readings[0][0] + readings[0][1]) // 2 + off
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))


def test_on_a_card_kernels_count_and_operators_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "profile", FakeProfiler)
    timeline = Timeline(Recorder(device=0))
    with timeline.profile() as profile:
        start = time.perf_counter_ns()
        time.sleep(0.004)
        end = time.perf_counter_ns()
        timeline.recorder.step(start, end, step_id=1, batch_size=1, tokens=1, prefill_tokens=0, graph=True)
        profile._profiler.of, profile._profiler.ran = profile, (start + 1_000, start + 1_000 + (end - start) // 2)
    held = timeline.recording()
    (kernel,) = held.work
    assert (held.work_names[0], kernel["stream"], kernel["device"], profile.num_kernels) == ("k", 7, 0, 1)
    assert abs(int(kernel["start"]) - start - 1_000) < 50_000, "as far as the marks were apart"
    summary = timeline.summary(window=(start, end))
    assert summary.source == KERNELS and summary.busy == pytest.approx(0.5, abs=0.05)


def test_replayed_steps_without_kernels_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = np.array([[0, 10], [10, 20], [20, 30]])
    starts, names = np.array([1, 5, 12, 19, 30]), np.array(["k", "k", "Memcpy HtoD", "Memset", "k"], object)
    assert _without_kernels(steps, starts, names) == 2
    assert _without_kernels(steps[:0], starts, names) == 0
    timeline = Timeline(Recorder(device=0))

    def replay() -> None:
        before = time.perf_counter_ns()
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
        timeline.recorder.step(
            before, time.perf_counter_ns(), step_id=1, batch_size=1, tokens=1, prefill_tokens=0, graph=True
        )

    with timeline.profile() as profile:
        replay()
    assert timeline.summary(window=profile.window).source == OPERATORS
    timeline.clear()
    with pytest.warns(RuntimeWarning, match="no kernel in 1 of 2 replayed"), timeline.profile() as profile:
        replay()
        now = time.perf_counter_ns()
        timeline.recorder.step(now, now + 1, step_id=2, batch_size=1, tokens=1, prefill_tokens=0, graph=True)
    assert profile.window is not None and timeline.summary(window=profile.window).profiled is None


def test_a_profile_has_room_for_all_of_its_kernels() -> None:
    timeline = Timeline(Recorder(device=CPU, work=4))
    with timeline.profile() as profile:
        for _ in range(30):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert len(timeline.recording().work) == profile.num_kernels >= 30
    assert timeline.summary(window=profile.window).source == OPERATORS


async def test_it_ends_with_the_steps_that_were_asked_for() -> None:
    timeline = Timeline(Recorder(device=CPU))
    stop = threading.Event()
    async with timeline.profile(steps=5) as profile:
        worker = threading.Thread(target=compute, args=(timeline, 10**9, stop))
        worker.start()
        while not profile.done:
            await asyncio.sleep(0.005)
    stop.set()
    worker.join()
    assert profile.window is not None and timeline.recorder.num_steps_after(profile.window[0]) >= 5
    assert profile.num_kernels >= 5


async def test_a_block_that_ends_earlier_ends_it() -> None:
    timeline = Timeline(Recorder(device=CPU))
    async with timeline.profile(steps=5) as profile:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert profile.window is not None and profile.num_kernels >= 1


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "50"])
def test_bad_steps(steps: Any) -> None:
    with pytest.raises(InvalidRequestError, match="steps"):
        Profile(Recorder(), steps)


def test_kernels_that_fell_out_of_the_ring_shorten_the_profiled_window() -> None:
    recorder = Recorder(work=4)
    for at in range(10):
        recorder.work(10 * at, 10 * at + 5, "k", kind=Work.KERNEL)
    recorder.profiled(0, 100)
    assert recorder.snapshot().profiled.tolist() == [[65, 100]]


def test_no_kernel_no_operator() -> None:
    rows, names = kernels_of({"traceEvents": []})
    assert len(rows) == len(names) == 0


async def test_steps_without_await_are_refused() -> None:
    timeline = Timeline(Recorder(device=CPU))
    with pytest.raises(InvalidRequestError, match="steps=5: only `async with`"), timeline.profile(steps=5):
        pass
    async with timeline.profile(steps=5):
        pass  # nothing of the refused one runs


SECOND = r"""
import sys, threading
import torch
from torch.profiler import ProfilerActivity, profile
from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Recorder, Timeline
from interactive_infer.timeline.recorder import CPU

ours = lambda: Timeline(Recorder(device=CPU)).profile()
theirs = lambda: profile(activities=[ProfilerActivity.CPU])
first, second, where = sys.argv[1:]
refused = []

def inner():
    try:
        with globals()[second]():
            torch.ones(3) + 1
    except InvalidRequestError as error:
        refused.append(str(error))

try:
    with globals()[first]() as outer:
        if where == "thread":
            thread = threading.Thread(target=inner)
            thread.start()
            thread.join()
        else:
            inner()
        torch.ones(3) + 1
except InvalidRequestError as error:
    refused.append(str(error))
print(refused)
if second == "ours":
    assert len(refused) == 1 and "is already running" in refused[0]
    assert first == "theirs" or outer.num_kernels >= 2, "the first one goes on"
else:
    assert len(refused) == 1 and "has ended this one" in refused[0]
with ours() as later:
    torch.ones(3) + 1
assert later.num_kernels >= 2
"""


@pytest.mark.parametrize("where", ["here", "thread"])
@pytest.mark.parametrize(("first", "second"), [("ours", "ours"), ("theirs", "ours"), ("ours", "theirs")])
def test_a_second_profiler_is_refused_and_crashes_nothing(first: str, second: str, where: str) -> None:
    """In a process of its own, which a segmentation fault would end."""
    command = [sys.executable, "-c", SECOND, first, second, where]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


async def test_two_tasks_do_not_profile_at_once() -> None:
    timeline = Timeline(Recorder(device=CPU))
    begun, end = asyncio.Event(), asyncio.Event()

    async def first() -> Profile:
        async with timeline.profile(steps=10**6) as profile:
            begun.set()
            await end.wait()
        return profile

    task = asyncio.create_task(first())
    await begun.wait()
    with pytest.raises(InvalidRequestError, match=r"profile=<Profile of its block>: a profile is already running"):
        async with timeline.profile():
            pass
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    end.set()
    assert (await task).num_kernels >= 1
    async with timeline.profile() as second:
        pass
    with pytest.raises(InvalidRequestError, match="takes a profile of its own"), second:
        pass


async def test_a_profile_that_cannot_begin_or_end_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(Recorder(device=CPU))
    for method in ("__enter__", "__exit__"):
        with monkeypatch.context() as broken:
            usual = getattr(torch.autograd.profiler.profile, method)

            def fails(*args: Any, usual: Any = usual) -> None:
                usual(*args)
                broken.setattr(torch.autograd.profiler.profile, method, usual)  # noqa: B023
                raise KeyError("interrupted")

            broken.setattr(torch.autograd.profiler.profile, method, fails)
            with pytest.raises(KeyError, match="interrupted"):
                async with timeline.profile():
                    pass
        async with timeline.profile() as profile:
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        assert profile.num_kernels >= 1


async def test_a_cancelled_block_is_profiled_up_to_there() -> None:
    timeline = Timeline(Recorder(device=CPU))
    begun = asyncio.Event()

    async def block() -> None:
        async with timeline.profile(steps=10**6):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            begun.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(block())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(timeline.recording().work) >= 1
    with timeline.profile():
        pass


def test_the_profiler_neither_warns_nor_makes_an_object_of_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's torch.profiler warns at every start of a cycle; to keep all cycles' events stop parses them."""

    def warns(*_: object) -> None:
        raise AssertionError("Profiler clears events at the end of each cycle")

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", warns)
    monkeypatch.setattr(torch.autograd.profiler.profile, "_ensure_function_events", warns)
    with Timeline(Recorder(device=CPU)).profile() as profile:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert profile.num_kernels >= 1


def test_a_larger_second_profile_is_known_as_a_whole_too() -> None:
    timeline = Timeline(Recorder(device=CPU, work=4))
    for products in (30, 50):
        with timeline.profile() as profile:
            for _ in range(products):
                with timeline.span("mine", device=True):
                    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            timeline.recording()  # settles the spans: they are older records than the kernels
        summary = timeline.summary(window=profile.window)
        assert profile.num_kernels >= products and summary.source == OPERATORS
