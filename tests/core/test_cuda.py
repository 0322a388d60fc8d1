"""`CUDADevice` over a simulated torch.cuda: order of launches, failures, ways of waiting. (A card: test_gpu.py.)"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import pytest
import torch

from interactive_infer.core import cuda
from interactive_infer.core.cuda import CUDADevice
from interactive_infer.errors import DeviceError, EngineClosedError

PLACE = torch.device("cuda", 0)


class Card:
    """What the fake events read: a clock in ms that tests move, and whether the card has failed."""

    now = 0.0
    failure: Exception | None = None


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at: float | None = None
        self.held = threading.Event()
        self.held.set()

    def record(self, stream: object = None) -> None:
        self.at = Card.now

    def query(self) -> bool:
        time.sleep(0)  # a real one lets other threads in
        if Card.failure is not None:
            raise Card.failure
        return self.held.is_set()

    def synchronize(self) -> None:
        self.held.wait(10)
        if Card.failure is not None:
            raise Card.failure

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


class Stream:
    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.waits_for: list[object] = []
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1
        if Card.failure is not None:
            raise Card.failure

    def wait_stream(self, other: object) -> None:
        self.waits_for.append(other)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    Card.now, Card.failure = 0.0, None
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 30, 8 << 30))
    monkeypatch.setattr(cuda, "_idle_streams", {})
    return Card


@pytest.fixture
def device():
    device = CUDADevice(PLACE)
    yield device
    device.close()


def done(completion):
    assert completion.wait(10)
    return completion.result()


def test_a_result_is_read_once_the_card_is_done(device):
    held = Event()
    held.held.clear()
    device._events.append((Event(), held))
    read = []
    completion = device.submit(lambda: lambda: read.append("read") or 7)
    assert not completion.wait(0.05)
    assert not read
    held.held.set()
    assert done(completion) == 7


def test_an_interval_is_on_the_hosts_clock(device):
    def work():
        Card.now += 2.5
        return lambda: None

    before = time.perf_counter_ns()
    completion = device.submit(work)
    done(completion)
    assert completion.end_ns - completion.start_ns == 2_500_000
    assert abs(completion.start_ns - before) < 10_000_000_000


def test_how_long_the_card_says_it_took_counts_from_the_end(device):
    begin, end = Event(), Event()
    device._events.append((begin, end))

    def work():
        Card.now += 2.5
        return lambda: None

    completion = device.submit(work, here=True, took=lambda: 1_000_000)
    done(completion)
    assert completion.end_ns - completion.start_ns == 1_000_000
    assert begin.at is None, "an event that nobody asks takes the card's time"


def test_a_clock_that_runs_backwards_makes_no_step_that_ends_before_it_begins(device):
    completion = device.submit(lambda: lambda: None, took=lambda: -5)
    done(completion)
    assert completion.end_ns == completion.start_ns


def test_a_quick_launch_is_made_by_the_caller_unless_others_are_before_it(device):
    here = threading.current_thread()
    by = []

    def work():
        by.append(threading.current_thread())
        return lambda: None

    done(device.submit(work, here=True))
    assert by == [here]

    gate, order = threading.Event(), []
    slow = device.submit(lambda: (gate.wait(10), order.append("slow"), lambda: None)[-1])
    quick = device.submit(lambda: (order.append("quick"), lambda: None)[-1], here=True)
    assert not order, "it may not overtake"
    gate.set()
    done(slow), done(quick)
    assert order == ["slow", "quick"]
    done(device.submit(work, here=True))
    assert by[-1] is here


def test_what_is_left_to_the_thread_says_when_it_was_launched(device):
    gate = threading.Event()
    before = time.perf_counter_ns()
    first = device.submit(lambda: (gate.wait(10), lambda: None)[-1])
    second = device.submit(lambda: lambda: None, here=True)  # behind it
    left = time.perf_counter_ns()
    gate.set()
    done(first), done(second)
    for completion in (first, second):
        start, end = completion.launched_ns
        assert before <= start <= end <= time.perf_counter_ns()
    assert first.launched_ns[1] >= left
    assert second.launched_ns[0] >= first.launched_ns[1]
    here = device.submit(lambda: lambda: None, here=True)
    done(here)
    assert here.launched_ns is None


def test_a_failing_launch_fails_its_completion_alone(device):
    def bad():
        raise ValueError("a hook's own")

    failed = device.submit(bad, here=True)
    with pytest.raises(ValueError, match="own"):
        done(failed)
    assert device.stream.synchronized == 1, "what it had launched may still use its memory"
    assert done(device.submit(lambda: lambda: 1, here=True)) == 1


def test_out_of_memory_comes_with_numbers_and_a_remedy(device):
    def bad():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceError, match=r"3\.0 of 8\.0 GiB.*kv_cache_tokens"):
        done(device.submit(bad))
    assert done(device.submit(lambda: lambda: 1)) == 1


@pytest.mark.parametrize("where", ["in the launch", "on the card"])
@pytest.mark.parametrize("waiting", ["thread", "spin", "block"])
def test_a_lost_card_reaches_everybody_and_says_what_to_do(card, where, waiting):
    device = CUDADevice(PLACE, waiting)
    fault = torch.AcceleratorError("CUDA error: device-side assert triggered")

    def work():
        if where == "in the launch":
            raise fault
        card.failure = fault
        return lambda: None

    for completion in [device.submit(work) for _ in range(3)]:
        with pytest.raises(DeviceError, match="restart the kernel"):
            done(completion)
    device.close()


@pytest.mark.parametrize("waiting", ["spin", "block"])
def test_who_polls_needs_no_thread_of_ours(waiting):
    device = CUDADevice(PLACE, waiting)
    completion = device.submit(lambda: lambda: 5, here=True)
    assert completion.done()
    assert completion.result() == 5
    held = Event()
    held.held.clear()
    device._events.append((Event(), held))
    later = device.submit(lambda: lambda: 6, here=True)
    assert not later.done()
    assert not later.wait(0.01)
    held.held.set()
    assert done(later) == 6
    device.close()


@pytest.mark.parametrize("waiting", ["spin", "block"])
def test_who_polls_may_wait_for_what_has_yet_to_be_launched(waiting):
    device, gate = CUDADevice(PLACE, waiting), threading.Event()
    completion = device.submit(lambda: gate.wait(10) and (lambda: 5))
    threading.Timer(0.02, gate.set).start()
    assert completion.wait()
    assert completion.result() == 5
    device.close()


@pytest.mark.parametrize("waiting", ["thread", "spin", "block"])
def test_a_result_that_cannot_be_read_fails_its_completion_alone(waiting):
    device = CUDADevice(PLACE, waiting)
    failed = device.submit(lambda: lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            done(failed)
    assert done(device.submit(lambda: lambda: 1)) == 1
    device.close()


def test_two_who_poll_read_a_result_once():
    device, read = CUDADevice(PLACE, "spin"), []
    for number in range(100):
        completion = device.submit(lambda number=number: lambda: read.append(number), here=True)
        barrier, failed = threading.Barrier(2), []

        def poll(completion=completion, barrier=barrier, failed=failed):
            barrier.wait()
            try:
                while not completion.done():
                    pass
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=poll) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert len(device._events) == 1, "an event pair that is lent to two"
    assert read == list(range(100))
    device.close()


def test_work_can_follow_what_the_caller_has_launched(device, monkeypatch):
    theirs = Stream(PLACE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: theirs)
    device.follow_caller()
    assert device.stream.waits_for == [theirs]


def test_out_of_memory_keeps_nothing_of_the_step(device):
    class Activations:
        pass

    def bad():
        held = Activations()
        gone.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory")

    gone = []
    completion = device.submit(bad)
    with pytest.raises(DeviceError) as caught:
        done(completion)
    assert caught.value.__cause__ is not None
    assert gone[0]() is None


def test_out_of_memory_on_a_lost_card_is_told_too(device, card, monkeypatch):
    def bad():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def lost():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    with pytest.raises(DeviceError, match="restart the kernel"):
        done(device.submit(bad))
    assert done(device.submit(lambda: lambda: 1)) == 1


def test_a_closed_device_takes_nothing(device):
    held = Event()
    held.held.clear()
    device._events.append((Event(), held))
    pending = device.submit(lambda: lambda: 1, here=True)
    device.close()
    with pytest.raises(EngineClosedError):
        done(pending)
    held.held.set()
    with pytest.raises(DeviceError, match="closed"):
        done(device.submit(lambda: lambda: 1))


def test_streams_are_lent_again():
    first = CUDADevice(PLACE)
    stream = first.stream
    other = CUDADevice(PLACE)
    assert other.stream is not stream
    first.close()
    first.give_back()
    third = CUDADevice(PLACE)
    assert stream in (third.stream, third._clock_stream)
    assert stream.priority < 0, "of the usual ones torch gives the same to others"
    other.close()
    third.close()


def test_events_are_used_again(device):
    for _ in range(20):
        done(device.submit(lambda: lambda: None))
    assert len(device._events) == 1
