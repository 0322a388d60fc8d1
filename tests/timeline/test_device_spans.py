"""Device spans on CUDA: over a simulated `torch.cuda` anywhere, and on a card where there is one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Timeline, Work
from interactive_infer.timeline.device_spans import CUDAEvents, HostEvents, usual_events
from interactive_infer.timeline.recorder import CPU
from tests.timeline.simulated import MS, Card, Event


def test_without_a_card_the_block_is_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timeline = Timeline()
    assert isinstance(usual_events(), HostEvents)
    with pytest.raises(KeyError), timeline.span("mine", device=True):
        raise KeyError
    held = timeline.recording()
    assert held.work_names.tolist() == held.names.tolist() == ["mine"]
    assert held.spans["start"][0] <= held.work["start"][0] <= held.work["end"][0] <= held.spans["end"][0]
    assert held.work["device"].tolist() == [CPU] and held.clock_error_ns == 0
    with pytest.raises(InvalidRequestError, match="name"):
        timeline.span("", device=True)


def test_cuda_events_are_recorded_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card gets a clock with a stream of its own; streams are numbered in order of use."""
    card = Card()
    current = SimpleNamespace(device=torch.device("cuda", 1), cuda_stream=70)
    recorded: list[object] = []

    class FakeEvent(Event):
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            super().__init__(card, 0)

        def record(self, stream: object) -> None:
            recorded.append(stream)
            card.now += MS // 64
            self.at_ns = card.now

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("clock's", device))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(time, "perf_counter_ns", card.perf_counter_ns)
    timeline = Timeline()
    assert isinstance(timeline._device_spans.events, CUDAEvents)
    with timeline.span("a", device=True):
        card.now += 3 * MS
    other = SimpleNamespace(device=torch.device("cuda", 1), cuda_stream=80)
    with timeline.span("b", device=True):
        first, current = current, other
    held = timeline.recording()
    assert held.work_names.tolist() == ["a", "b"]
    assert held.work["device"].tolist() == [1, 1] and held.work["stream"].tolist() == [1, 1]
    assert [stream for stream in recorded if stream in (first, other)] == [first, first, first, other]
    assert ("clock's", torch.device("cuda", 1)) in recorded
    assert held.work["end"][0] - held.work["start"][0] == 3 * MS + MS // 64
    assert held.clock_error_ns == timeline._device_spans.events.error_ns > 0


@pytest.mark.gpu
def test_on_a_card_spans_last_as_long_as_their_work() -> None:
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    matrix @ matrix
    torch.cuda.synchronize()
    timeline = Timeline()
    side = torch.cuda.Stream()
    before = time.perf_counter_ns()
    with timeline.span("here", device=True):
        for _ in range(50):
            matrix @ matrix
    with torch.cuda.stream(side), timeline.span("beside", device=True):
        matrix @ matrix
    torch.cuda.synchronize()
    after = time.perf_counter_ns()
    held = timeline.recording()
    assert set(held.work_names.tolist()) == {"here", "beside"}
    assert len(set(held.work["stream"].tolist())) == 2 and (held.work["kind"] == Work.USER).all()
    off = held.clock_error_ns
    assert 0 < off <= 50_000
    assert (held.work["start"] >= before - off).all() and (held.work["end"] <= after + off).all()


@pytest.mark.gpu
def test_on_a_card_a_graphs_kernels_are_seen_once_each() -> None:
    matrix = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    out = matrix @ matrix
    with Timeline().profile():  # before the capture: a graph captured earlier may lack its kernels in the records
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize()
    timeline = Timeline()
    with timeline.profile() as profile:
        with timeline.span("replays", device=True):
            for _ in range(10):
                graph.replay()
        torch.cuda.synchronize()
    held = timeline.recording()
    kernels = held.work[held.work["kind"] == Work.KERNEL]
    assert 80 <= len(kernels) == profile.num_kernels <= 100
    (span,) = held.work[held.work["kind"] == Work.USER]
    off = held.clock_error_ns + 50_000
    inside = (kernels["start"] >= span["start"] - off) & (kernels["end"] <= span["end"] + off)
    assert inside.sum() >= 80
