"""Waiting for a simulated device.

A check is a function that takes a way of waiting. It must pass with ours, and fail, for the reason given, with
the stand-ins of `pull_request_future.py`: so it is known that it can fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
import torch
import uvloop

from interactive_infer import waiting
from interactive_infer.errors import DeviceError, EngineClosedError, InvalidRequestError
from interactive_infer.waiting import Completion, Waiter, device_done, run_on_device
from tests.pull_request_future import PriorityLoop, PullRequestFuture, spin

LONG = 60.0  # s; only ever spent on a hang


class Hung(AssertionError):
    """Something that had to end did not."""


class Work:
    """Work on a simulated device: kernels, then the copy of their result to the host.

    `host_functions` holds the Python functions that were put into the stream; as in CUDA they run between the
    two, on the device's time, what they raise goes nowhere, and after an error they do not run.
    """

    def __init__(self, patience: float = LONG) -> None:
        self._kernels = threading.Event()
        self._copy = threading.Event()
        self._patience = patience
        self._error: str | None = None
        self.host_functions: list[Callable[[], None]] = []
        self.queries = 0

    def finish_kernels(self) -> None:
        self._kernels.set()
        for fn in self.host_functions:
            with contextlib.suppress(Exception):
                fn()

    def finish(self) -> None:
        if not self._kernels.is_set():
            self.finish_kernels()
        self._copy.set()

    def fail(self, error: str = "CUDA error: an illegal memory access was encountered") -> None:
        self._error = error
        self._copy.set()

    def launch_host_function(self, fn: Callable[[], None]) -> None:
        self.host_functions.append(fn)

    def query(self) -> bool:
        self.queries += 1
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._copy.is_set()

    def synchronize(self) -> None:
        if not self._copy.wait(self._patience):
            raise Hung("synchronize() did not return")
        if self._error is not None:
            raise RuntimeError(self._error)


class Way:
    """A way of waiting. `wait` is for the user, `engine_wait` for the steps of an engine's stream."""

    patience = LONG
    new_loop: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)

    def wait(self, work: Work) -> Awaitable[Any]:
        raise NotImplementedError

    def engine_wait(self, work: Work) -> Awaitable[Any]:
        return self.wait(work)

    def close(self) -> None:
        pass


class ByDeviceDone(Way):
    def __init__(self) -> None:
        self._engine = ByWaiter()

    def wait(self, work: Work) -> Awaitable[None]:
        return device_done(work)

    def engine_wait(self, work: Work) -> Awaitable[None]:
        return self._engine.wait(work)

    def close(self) -> None:
        self._engine.close()


class ByWaiter(Way):
    def __init__(self) -> None:
        self._waiter, self._engine = Waiter(), Waiter()

    def wait(self, work: Work, waiter: Waiter | None = None) -> Awaitable[None]:
        completion: Completion[None] = Completion()
        (waiter or self._waiter).watch(work, completion, lambda: None)
        return completion

    def engine_wait(self, work: Work) -> Awaitable[None]:
        return self.wait(work, self._engine)

    def close(self) -> None:
        self._waiter.close()
        self._engine.close()


class ByPullRequest(Way):
    patience = 0.4
    new_loop = PriorityLoop

    def wait(self, work: Work) -> Awaitable[None]:
        return PullRequestFuture(work)


class BySpinning(ByPullRequest):
    def wait(self, work: Work) -> Awaitable[None]:
        return spin(work)


@pytest.fixture(params=[ByDeviceDone, ByWaiter])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter()
    yield made
    made.close()


async def awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def ended(task: asyncio.Task[Any], patience: float, what: str) -> None:
    """Not `wait_for`, which would itself wait for a task that cannot be cancelled."""
    await asyncio.wait({task}, timeout=patience)
    if not task.done():
        raise Hung(what)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any]) -> None:
    """Run `main` on `loop`. No callback may have failed on the way."""
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, problem: problems.append(problem))
    try:
        loop.run_until_complete(main)
        assert not problems
    finally:
        loop.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > deadline:
            raise Hung(what)
        time.sleep(0.002)


# ---- the checks ------------------------------------------------------------------------------------------


def check_plain_wait(way: Way) -> None:
    """The control: also the stand-in does this."""

    async def main() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        await turns()
        assert not task.done()
        threading.Thread(target=work.finish, daemon=True).start()
        await ended(task, LONG, "a plain wait")
        task.result()

    run(way.new_loop(), main())


def check_foreign_loop(way: Way, new_loop: Callable[[], asyncio.AbstractEventLoop], in_thread: bool) -> None:
    async def main() -> None:
        for _ in range(3):
            work = Work(way.patience)
            task = asyncio.ensure_future(awaited(way.wait(work)))
            await turns()
            threading.Thread(target=work.finish, daemon=True).start()
            await ended(task, way.patience, "a wait on a foreign loop")
            task.result()

    if not in_thread:
        run(new_loop(), main())
        return

    failures: list[BaseException] = []

    def other_thread() -> None:
        try:
            run(new_loop(), main())
        except BaseException as error:
            failures.append(error)

    async def beside() -> None:
        """The way's own loop is running, and waiting, meanwhile."""
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.engine_wait(work)))
        await turns()
        thread = threading.Thread(target=other_thread, daemon=True)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.002)
        work.finish()
        await ended(task, LONG, "the wait on the own loop")

    run(way.new_loop(), beside())
    if failures:
        raise failures[0]


def check_cancel_while_waiting(way: Way) -> None:
    async def main() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        await turns()
        task.cancel()
        try:
            await ended(task, way.patience, "a cancelled wait")
            assert task.cancelled()
        finally:
            work.finish()
        await turns()

    run(way.new_loop(), main())


def check_cancel_as_it_completes(way: Way) -> None:
    """Cancelled and completed in one turn, in either order, or by a thread in the very moment."""

    async def main() -> None:
        gc.collect()
        for i in range(90):
            work = Work(way.patience)
            task = asyncio.ensure_future(awaited(way.wait(work)))
            await turns(i % 4 + 1)
            if i % 3 == 0:
                work.finish()
                task.cancel()
            elif i % 3 == 1:
                task.cancel()
                work.finish()
            else:
                thread = threading.Thread(target=work.finish, daemon=True)
                thread.start()
                task.cancel()
                thread.join()
            await ended(task, way.patience, "a wait cancelled as it completes")
            if not task.cancelled():
                task.result()
            await turns()
        del task, work
        left = gc.collect()
        assert left < 45, f"{left} objects left in cycles"

    gc.disable()
    try:
        run(way.new_loop(), main())
    finally:
        gc.enable()


def check_failing_device(way: Way) -> None:
    async def main() -> None:
        works = [Work(way.patience) for _ in range(3)]
        tasks = [asyncio.ensure_future(awaited(way.wait(work))) for work in works]
        await turns()
        for work in works:
            work.fail()
        tasks.append(asyncio.ensure_future(awaited(way.wait(works[0]))))
        for task in tasks:
            await ended(task, way.patience, "a wait for a device that failed")
            error = task.exception()
            assert isinstance(error, DeviceError)
            assert "illegal memory access" in str(error)
            assert isinstance(error.__cause__, RuntimeError)

    run(way.new_loop(), main())


def check_no_cycles(way: Way, end: str) -> None:
    async def one() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        await asyncio.sleep(0)
        if end == "done":
            work.finish()
        elif end == "failed":
            work.fail()
        else:
            task.cancel()
        await ended(task, way.patience, f"a wait that is {end}")
        work.finish()
        if not task.cancelled():
            assert (task.exception() is not None) == (end == "failed")

    async def main() -> None:
        for _ in range(20):
            await one()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(10_000):
            await one()
        while waiting._unfinished:  # a thread may lag behind, it holds its work rightly
            await asyncio.sleep(0.001)
        grown = len(gc.get_objects()) - before
        assert grown < 1_000, f"{grown} objects left by 10,000 waits"

    gc.disable()
    try:
        run(way.new_loop(), main())
    finally:
        gc.enable()
        gc.collect()


def check_close_ends_pending_waits(way: Way) -> None:
    async def main() -> None:
        works = [Work(way.patience) for _ in range(3)]
        tasks = [asyncio.ensure_future(awaited(way.wait(work))) for work in works]
        await turns()
        way.close()
        try:
            for task in tasks:
                await ended(task, way.patience, "a wait that was pending at close")
                assert isinstance(task.exception(), EngineClosedError)
        finally:
            for work in works:
                work.finish()

    run(way.new_loop(), main())


def check_long_wait_beside_an_engine(way: Way) -> None:
    """A cell waits for long work of its own, an engine steps; the cell is interrupted, the engine steps on."""

    async def main() -> None:
        long = Work(way.patience)
        cell = asyncio.ensure_future(awaited(way.wait(long)))
        await turns()

        async def steps(count: int) -> None:
            in_flight = [Work(way.patience), Work(way.patience)]
            waits = [way.engine_wait(work) for work in in_flight]
            for _ in range(count):
                in_flight.pop(0).finish()
                await waits.pop(0)
                in_flight.append(Work(way.patience))
                waits.append(way.engine_wait(in_flight[-1]))
            for work, wait in zip(in_flight, waits, strict=True):
                work.finish()
                await wait

        try:
            await ended(asyncio.ensure_future(steps(100)), LONG, "steps beside a long wait")
            assert not cell.done()
            cell.cancel()
            await ended(cell, way.patience, "the interrupted cell")
            await ended(asyncio.ensure_future(steps(50)), LONG, "steps after a long wait")
        finally:
            long.finish()

    run(way.new_loop(), main())


def check_loop_stays_alive(way: Way) -> None:
    """The kernels end, and then the copy ends, only because a heartbeat ticks on the loop meanwhile."""

    async def main() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        for _ in range(20):
            await asyncio.sleep(0.001)
        work.finish_kernels()
        for _ in range(20):
            await asyncio.sleep(0.001)
        work.finish()
        await ended(task, way.patience, "a wait beside a heartbeat")
        task.result()

    run(way.new_loop(), main())


def check_no_python_in_the_stream(way: Way) -> None:
    async def main() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        await turns()
        left = len(work.host_functions)
        work.finish()
        await ended(task, way.patience, "a wait")
        assert left == 0, "a Python function in the stream"

    run(way.new_loop(), main())


def check_no_spinning(way: Way) -> None:
    async def main() -> None:
        work = Work(way.patience)
        task = asyncio.ensure_future(awaited(way.wait(work)))
        await turns(500)
        work.finish()
        await ended(task, way.patience, "a wait")
        assert work.queries < 5, f"{work.queries} queries"

    run(way.new_loop(), main())


LOOPS = pytest.mark.parametrize(
    ("new_loop", "in_thread"),
    [(uvloop.new_event_loop, False), (asyncio.new_event_loop, False), (asyncio.new_event_loop, True)],
    ids=["uvloop", "plain", "second loop in a thread"],
)
ENDS = pytest.mark.parametrize("end", ["done", "failed", "cancelled"])


@LOOPS
def test_foreign_loop(way: Way, new_loop: Any, in_thread: bool) -> None:
    check_foreign_loop(way, new_loop, in_thread)


@ENDS
def test_ten_thousand_waits_leave_nothing(way: Way, end: str) -> None:
    check_no_cycles(way, end)


def test_close_ends_pending_waits() -> None:
    check_close_ends_pending_waits(ByWaiter())


@pytest.mark.parametrize(
    "check",
    [
        check_plain_wait,
        check_cancel_while_waiting,
        check_cancel_as_it_completes,
        check_failing_device,
        check_long_wait_beside_an_engine,
        check_loop_stays_alive,
        check_no_python_in_the_stream,
        check_no_spinning,
    ],
)
def test_check(way: Way, check: Callable[[Way], None]) -> None:
    check(way)


def test_stand_in_waits_on_its_own_loop() -> None:
    """Nothing but their faults makes the stand-ins fail below."""
    check_plain_wait(ByPullRequest())
    check_plain_wait(BySpinning())


@LOOPS
def test_stand_in_hangs_on_a_foreign_loop(new_loop: Any, in_thread: bool) -> None:
    with pytest.raises(Hung, match="foreign loop"):
        check_foreign_loop(ByPullRequest(), new_loop, in_thread)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("done", r"\d{5} objects left"),
        ("failed", "a wait that is failed"),
        ("cancelled", "a wait that is cancelled"),
    ],
)
def test_stand_in_leaves_something(end: str, error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        check_no_cycles(ByPullRequest(), end)


@pytest.mark.parametrize(
    ("check", "error"),
    [
        (check_cancel_while_waiting, "a cancelled wait"),
        (check_cancel_as_it_completes, "left in cycles"),
        (check_failing_device, "a device that failed"),
        (check_close_ends_pending_waits, "pending at close"),
        (check_long_wait_beside_an_engine, "the interrupted cell"),
        (check_loop_stays_alive, r"synchronize\(\) did not return"),
        (check_no_python_in_the_stream, "a Python function in the stream"),
    ],
)
def test_stand_in_fails(check: Callable[[Way], None], error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        check(ByPullRequest())


def test_spinning_fails() -> None:
    with pytest.raises(AssertionError, match=r"\d{3} queries"):
        check_no_spinning(BySpinning())


# ---- Completion ------------------------------------------------------------------------------------------


def test_completion_is_settled_once() -> None:
    completion: Completion[int] = Completion()
    assert not completion.done()
    assert completion.start_ns is None and completion.end_ns is None
    with pytest.raises(asyncio.InvalidStateError, match="pending"):
        completion.result()
    completion.set_result(7, start_ns=1, end_ns=2)
    with pytest.raises(asyncio.InvalidStateError, match="settled"):
        completion.set_result(8)
    with pytest.raises(asyncio.InvalidStateError, match="settled"):
        completion.set_exception(ValueError())
    assert completion.done()
    assert (completion.result(), completion.start_ns, completion.end_ns) == (7, 1, 2)


def test_only_one_of_many_threads_settles() -> None:
    for _ in range(50):
        completion: Completion[int] = Completion()
        start, won = threading.Barrier(4), []

        def settle(i: int, completion: Completion[int] = completion, start: Any = start, won: Any = won) -> None:
            start.wait()
            with contextlib.suppress(asyncio.InvalidStateError):
                completion.set_result(i)
                won.append(i)

        threads = [threading.Thread(target=settle, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [completion.result()]


def test_threads_wait() -> None:
    completion: Completion[str] = Completion()
    assert completion.wait(0) is False
    assert completion.wait(0.01) is False
    assert completion.wait(-1.0) is False
    assert not completion._wakers
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda t=t: seen.append(completion.wait(t)), daemon=True)
        for t in (None, LONG, float("inf"))
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(completion._wakers) == 3, "threads to wait")
    completion.set_result("x")
    for thread in threads:
        thread.join(LONG)
    assert seen == [True] * 3
    assert completion.wait() and not completion._wakers


def test_awaiters_on_several_loops_and_one_of_them_closed() -> None:
    completion: Completion[int] = Completion()
    seen: list[int] = []

    async def read() -> None:
        seen.append(await completion)

    async def reads() -> None:
        await asyncio.gather(read(), read())

    threads = [
        threading.Thread(target=run, args=(new_loop(), reads()), daemon=True)
        for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop, asyncio.new_event_loop)
    ]
    for thread in threads:
        thread.start()
    closed = [asyncio.new_event_loop(), uvloop.new_event_loop()]
    left = []
    for loop in closed:
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending"
        left.append(loop.create_task(read()))
        loop.run_until_complete(turns())
        loop.close()
    until(lambda: len(completion._wakers) == 8, "all to wait")
    completion.set_result(5)
    for thread in threads:
        thread.join(LONG)
    assert seen == [5] * 6
    assert not completion._wakers
    del left


async def test_awaiting_is_a_checkpoint_even_when_done() -> None:
    completion: Completion[int] = Completion()
    completion.set_result(3)
    turned = []
    asyncio.get_running_loop().call_soon(turned.append, 1)
    assert await completion == 3
    assert turned
    task = asyncio.ensure_future(awaited(completion))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not completion._wakers


async def test_a_cancelled_awaiter_disturbs_no_other() -> None:
    completion: Completion[int] = Completion()
    tasks = [asyncio.ensure_future(awaited(completion)) for _ in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    assert len(completion._wakers) == 2
    completion.set_result(1)
    await asyncio.wait(tasks)
    assert tasks[0].result() == tasks[2].result() == 1 and tasks[1].cancelled()


async def test_every_reader_gets_a_failure_of_its_own() -> None:
    class Odd(Exception):
        def __init__(self, argument: str, value: int) -> None:
            super().__init__(f"{argument}={value}")
            self.value = value

    class Unmakeable(Exception):
        def __new__(cls, *args: Any, secret: int) -> Unmakeable:
            return super().__new__(cls, *args)

        def __init__(self, *args: Any, secret: int) -> None:
            super().__init__(*args)

    cause = KeyError("cause")
    for error, fields in [
        (Odd("x", 5), {"value": 5}),
        (OSError(2, "nothing there", "file"), {"errno": 2, "filename": "file"}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"reason": "bad", "end": 1}),
        (DeviceError("lost"), {}),
        (Unmakeable("one", secret=1), {}),
    ]:
        error.__cause__ = cause
        error.add_note("a note")
        completion: Completion[None] = Completion()
        completion.set_exception(error)
        lengths = []
        for _ in range(3):
            with pytest.raises(type(error)) as caught:
                await completion
            seen = caught.value
            assert str(seen) == str(error) and seen.args == error.args
            assert seen.__cause__ is cause and seen.__notes__ == ["a note"]
            assert {name: getattr(seen, name) for name in fields} == fields
            lengths.append(len(traceback.extract_tb(seen.__traceback__)))
            assert (seen is error) == isinstance(error, Unmakeable)
        assert isinstance(error, Unmakeable) or len(set(lengths)) == 1


def test_a_failure_held_by_its_reader_makes_no_cycle() -> None:
    async def main() -> weakref.ref[Any]:
        completion: Completion[None] = Completion()
        completion.set_exception(DeviceError("lost"))
        try:
            await completion  # this frame, which the traceback holds, holds the completion
        except DeviceError:
            return weakref.ref(completion)
        raise AssertionError

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


# ---- Waiter ----------------------------------------------------------------------------------------------


def test_waiter_settles_in_order_with_value_and_interval(waiter: Waiter) -> None:
    works = [Work() for _ in range(3)]
    completions: list[Completion[int]] = [Completion() for _ in works]
    for i, (work, completion) in enumerate(zip(works, completions, strict=True)):
        waiter.watch(work, completion, lambda i=i: i, interval=lambda i=i: (10 * i, 10 * i + 5))
    works[2].finish()
    works[1].finish()
    assert not completions[2].wait(0.02)
    works[0].finish()
    assert completions[2].wait(LONG)
    assert [c.result() for c in completions] == [0, 1, 2]
    assert [(c.start_ns, c.end_ns) for c in completions] == [(0, 5), (10, 15), (20, 25)]
    assert all(work.queries == 0 for work in works)


def test_waiter_survives_whatever_an_event_raises(waiter: Waiter) -> None:
    class Exit(Work):
        def synchronize(self) -> None:
            raise SystemExit(3)

    def bad_interval() -> tuple[int, int]:
        raise ZeroDivisionError

    good, done = Work(), Work()
    good.finish()
    done.finish()
    failed: list[Completion[None]] = [Completion(), Completion()]
    waiter.watch(Exit(), failed[0], lambda: None)
    waiter.watch(good, failed[1], lambda: None, interval=bad_interval)
    last: Completion[str] = Completion()
    waiter.watch(done, last, lambda: "alive")
    assert last.wait(LONG) and last.result() == "alive"
    for completion, cause in zip(failed, (SystemExit, ZeroDivisionError), strict=True):
        with pytest.raises(DeviceError) as caught:
            completion.result()
        assert type(caught.value.__cause__) is cause


def test_close_ends_waits_of_a_device_that_never_answers() -> None:
    waiter, work = Waiter("closing waiter"), Work()
    completions: list[Completion[None]] = [Completion() for _ in range(3)]
    for completion in completions:
        waiter.watch(work, completion, lambda: None)
    waiter.close()
    late: Completion[None] = Completion()
    waiter.watch(work, late, lambda: None)
    waiter.close()
    for completion in [*completions, late]:
        assert completion.wait(LONG)
        with pytest.raises(EngineClosedError):
            completion.result()
    work.finish()
    until(lambda: all(t.name != "closing waiter" for t in threading.enumerate()), "the thread to end")
    assert not waiter._pending and not set(waiting._unfinished) & {*completions, late}


def test_watching_while_closing_always_ends() -> None:
    for i in range(60):
        waiter, work = Waiter(), Work()
        completions: list[Completion[None]] = [Completion() for _ in range(20)]
        closing = threading.Thread(target=waiter.close, daemon=True)
        for j, completion in enumerate(completions):
            if j == i % 20:
                closing.start()
            waiter.watch(work, completion, lambda: None)
        closing.join()
        assert all(completion.wait(LONG) for completion in completions)
        work.finish()
        until(lambda c=completions: not set(waiting._unfinished) & set(c), "nothing to be left at exit")


def test_a_dropped_waiter_finishes_what_it_was_given_and_holds_nothing() -> None:
    class Value:
        pass

    waiter, work, value = Waiter("dropped waiter"), Work(), Value()
    completion: Completion[Value] = Completion()
    waiter.watch(work, completion, lambda value=value: value)
    dropped = weakref.ref(waiter)
    del waiter
    assert dropped() is None
    work.finish()
    assert completion.wait(LONG) and completion.result() is value
    until(lambda: all(t.name != "dropped waiter" for t in threading.enumerate()), "the thread to end")


def test_an_idle_waiter_holds_nothing_of_its_last_wait(waiter: Waiter) -> None:
    class Value:
        pass

    work, completion, value = Work(), Completion[Value](), Value()
    waiter.watch(work, completion, lambda value=value: value)
    work.fail()
    assert completion.wait(LONG)
    last, last_value = weakref.ref(completion), weakref.ref(value)
    with pytest.raises(DeviceError) as held:
        completion.result()
    gc.disable()
    try:
        del work, completion, value
        until(lambda: last_value() is None, "the value to be dropped while somebody holds the failure")
        del held
        until(lambda: last() is None, "the last wait to be dropped")
    finally:
        gc.enable()


def test_a_closed_loop_harms_nobody(way: Way) -> None:
    works = [Work(), Work()]
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    left = [loop.create_task(awaited(way.wait(work))) for work in works]
    loop.run_until_complete(turns())
    loop.close()
    for work in works:
        work.finish()
    check_plain_wait(way)
    assert not any(task.done() for task in left)


# ---- public waits ----------------------------------------------------------------------------------------


async def test_done_at_once_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_threads", None)
    turned: list[int] = []
    asyncio.get_running_loop().call_soon(turned.append, 1)
    await device_done(torch.zeros(2))
    assert turned
    work = Work()
    work.finish()
    await device_done(work)


@pytest.mark.parametrize("work", [None, 5, "cuda", Work, object(), torch.zeros(1, device="meta")])
async def test_device_done_refuses(work: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^work=") as caught:
        await device_done(work)
    assert caught.value.argument == "work"


async def test_device_done_of_a_device_that_has_failed() -> None:
    work = Work()
    work.fail()
    with pytest.raises(DeviceError, match="CUDA error") as caught:
        await device_done(work)
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_public_waits_do_not_stand_behind_one_another() -> None:
    works = [Work() for _ in range(8)]
    tasks = [asyncio.ensure_future(device_done(work)) for work in works]
    await turns()
    for work, task in zip(reversed(works), reversed(tasks), strict=True):
        work.finish()
        await ended(task, LONG, "a wait")
    assert [task.result() for task in tasks] == [None] * 8


def wait_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "interactive_infer wait"]


async def test_threads_are_used_again_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_IDLE_S", 0.2)
    monkeypatch.setattr(waiting, "_threads", waiting._Threads())
    before = set(wait_threads())
    seen = {await run_on_device(threading.get_ident, device="cpu") for _ in range(50)}
    assert len(seen) < 5
    await asyncio.gather(*(run_on_device(time.sleep, 0.01, device="cpu") for _ in range(10)))
    assert len(set(wait_threads()) - before) >= 10
    await asyncio.to_thread(until, lambda: not set(wait_threads()) - before, "idle threads to end")
    await run_on_device(int, device="cpu")


def test_a_caller_who_is_woken_finds_the_thread_idle() -> None:
    threads, first, second = waiting._Threads(), Completion[None](), Completion[None]()
    seen: list[int] = []

    def job() -> waiting._Outcome:
        seen.append(threading.get_ident())
        return waiting._Outcome()

    first._wakers[lambda: threads.start(job, second)] = None
    threads.start(job, first)
    assert second.wait(LONG)
    assert len(seen) == 2 and len(set(seen)) == 1


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_run_on_device_returns_the_result_and_carries_the_context() -> None:
    variable.set("caller's")

    def fn(a: int, b: int) -> tuple[int, str, bool, bool]:
        seen = variable.get()
        variable.set("fn's")
        return a + b, seen, torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()

    assert await run_on_device(fn, 2, 3, device="cpu") == (5, "caller's", True, False)
    assert variable.get() == "caller's"
    with torch.no_grad():
        assert (await run_on_device(fn, 2, 3, device=torch.device("cpu")))[2] is False
    await run_on_device(lambda: torch.set_grad_enabled(False), device="cpu")
    assert (await run_on_device(fn, 2, 3, device="cpu"))[2] is True


@pytest.mark.parametrize("kind", [ValueError, KeyError, SystemExit, asyncio.CancelledError])
async def test_run_on_device_raises_what_fn_raises(kind: type[BaseException]) -> None:
    error = kind("fn's own")

    def fn() -> None:
        raise error

    for _ in range(2):
        with pytest.raises(kind) as caught:
            await run_on_device(fn, device="cpu")
        assert caught.value is error
        assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1] == "fn"
        error.__traceback__ = None


def test_run_on_device_makes_no_cycles() -> None:
    class Result:
        pass

    class Failure(Exception):
        pass

    refs: list[weakref.ref[Any]] = []

    def fn(fails: bool) -> Result:
        made = Failure() if fails else Result()
        refs.append(weakref.ref(made))
        if isinstance(made, Failure):
            try:
                raise made
            finally:
                del made
        return made

    async def main() -> None:
        for i in range(200):
            with contextlib.suppress(Failure):
                await run_on_device(fn, i % 2 == 0, device="cpu")

    gc.disable()
    try:
        asyncio.run(main())
        until(lambda: not any(ref() for ref in refs), "results and failures to be freed")
    finally:
        gc.enable()


async def test_cancelling_run_on_device_returns_at_once_and_drops_the_outcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (None, ValueError("dropped")):
        began, go_on, finished = threading.Event(), threading.Event(), threading.Event()

        def fn(error: Any = error, began: Any = began, go_on: Any = go_on, finished: Any = finished) -> None:
            began.set()
            go_on.wait(LONG)
            finished.set()
            if error is not None:
                raise error

        task = asyncio.ensure_future(run_on_device(fn, device="cpu"))
        await asyncio.to_thread(began.wait, LONG)
        task.cancel()
        await ended(task, LONG, "a cancelled call")
        assert task.cancelled() and not finished.is_set()
        go_on.set()
        assert await asyncio.to_thread(finished.wait, LONG)
    await asyncio.to_thread(until, lambda: not waiting._unfinished, "fn to end")
    gc.collect()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("device", ["cpux", "meta", "cuda:99", object()])
async def test_run_on_device_refuses_a_device(device: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^device="):
        await run_on_device(int, device=device)


async def test_run_on_device_refuses_what_is_no_function() -> None:
    with pytest.raises(InvalidRequestError, match=r"^fn="):
        await run_on_device(torch.zeros(1), device="cpu")  # type: ignore[arg-type]


class Lane:
    """A simulated device's lane for `run_on_device`; `log` says in which order it was used."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.work = Work()
        self.launch_error: Exception | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.log.append("enter")
        try:
            yield
        finally:
            self.log.append("leave")

    def launched(self) -> Work:
        self.log.append("launched")
        if self.launch_error is not None:
            raise self.launch_error
        return self.work

    def hand_over(self, result: Any) -> None:
        self.log.append(f"hand over {result} {threading.current_thread() is threading.main_thread()}")


async def test_run_on_device_waits_for_what_fn_launched() -> None:
    lane = Lane()
    task = asyncio.ensure_future(waiting._run_on(lane, lambda: lane.log.append("fn") or "result", ()))
    await asyncio.to_thread(until, lambda: lane.log[-1:] == ["launched"], "fn to launch")
    await turns()
    assert not task.done()
    lane.work.finish()
    await ended(task, LONG, "the call")
    assert task.result() == "result"
    assert lane.log == ["enter", "fn", "leave", "launched", "hand over result True"]


@pytest.mark.parametrize("at", ["launching", "running"])
@pytest.mark.parametrize("fn_fails", [False, True])
async def test_run_on_device_when_the_device_fails(at: str, fn_fails: bool) -> None:
    lane = Lane()
    if at == "launching":
        lane.launch_error = RuntimeError("CUDA error")
    else:
        lane.work.fail()

    def fn() -> None:
        if fn_fails:
            raise ValueError("fn's own")

    with pytest.raises(ValueError if fn_fails else DeviceError) as caught:
        await waiting._run_on(lane, fn, ())
    assert fn_fails or isinstance(caught.value.__cause__, RuntimeError)
    assert not any(entry.startswith("hand over") for entry in lane.log)


@pytest.mark.parametrize("fn_fails", [False, True])
async def test_arguments_live_until_the_device_is_done(fn_fails: bool) -> None:
    """Also if the call was cancelled, or fn has raised: kernels that read them are still in the stream."""

    class Argument:
        pass

    def fn(argument: Argument) -> None:
        if fn_fails:
            raise ValueError

    lane, argument = Lane(), Argument()
    alive = weakref.ref(argument)
    task = asyncio.ensure_future(waiting._run_on(lane, fn, (argument,)))
    del argument
    await asyncio.to_thread(until, lambda: lane.log[-1:] == ["launched"], "fn to launch")
    task.cancel()
    await ended(task, LONG, "a cancelled call")
    del task  # its CancelledError has a traceback, that has frames, and they have the argument
    gc.collect()
    assert alive() is not None
    lane.work.finish()
    await asyncio.to_thread(until, lambda: alive() is None, "the argument to be freed")


class CancelAt:
    """Awaits `inner`, but raises CancelledError in it at its suspension number `at`."""

    def __init__(self, inner: Coroutine[Any, Any, Any], at: int) -> None:
        self.inner, self.at, self.hit = inner, at, False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, count = self.inner.__await__(), 0
        try:
            waits_for = next(steps)
            while True:
                if count == self.at:
                    self.hit = True
                    waits_for = steps.throw(asyncio.CancelledError())
                count += 1
                yield waits_for
                waits_for = next(steps)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("call", ["device done at once", "device done", "run on device", "run and fail"])
async def test_cancellation_at_every_await(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Completion[Any]] = []

    class Recorded(Completion[Any]):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(waiting, "Completion", Recorded)

    def fail() -> None:
        raise ValueError

    suspensions = 0
    while True:
        work = Work()
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "device done at once": lambda: device_done(torch.zeros(1)),
            "device done": lambda work=work: device_done(work),
            "run on device": lambda: run_on_device(int, device="cpu"),
            "run and fail": lambda: run_on_device(fail, device="cpu"),
        }
        cancelling = CancelAt(calls[call](), suspensions)
        asyncio.get_running_loop().call_soon(work.finish)
        task = asyncio.ensure_future(awaited(cancelling))
        await ended(task, LONG, "the call")
        if not cancelling.hit:
            break
        assert task.cancelled()
        assert not any(completion._wakers for completion in made)
        work.finish()
        await asyncio.to_thread(until, lambda: not waiting._unfinished, "the thread to be free")
        suspensions += 1
    assert suspensions == 1  # each of the calls has one await at a time, and no other
    assert isinstance(task.exception(), ValueError) if call == "run and fail" else task.exception() is None


# ---- the interpreter's exit ------------------------------------------------------------------------------


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=LONG, check=False
    )


def test_exit_does_not_hang_on_pending_waits() -> None:
    ended = run_script(
        """
        import asyncio, threading
        from interactive_infer.waiting import Completion, Waiter, device_done, run_on_device
        class Never:
            def query(self): return False
            def synchronize(self): threading.Event().wait()
        async def main():
            waiter.watch(Never(), Completion(), lambda: None)
            for wait in device_done(Never()), run_on_device(threading.Event().wait, device="cpu"):
                asyncio.ensure_future(wait)
                await asyncio.sleep(0)
        waiter = Waiter()
        asyncio.run(main())
        print("left")
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_exit_beside_a_thread_in_torch() -> None:
    """Without `_drain` the process ends by SIGABRT, up to Python 3.13."""
    ended = run_script(
        """
        import asyncio, time, torch
        from interactive_infer.waiting import Completion, Waiter, run_on_device
        torch.set_num_threads(1)
        def compute(seconds):
            x, end = torch.randn(64, 64), time.monotonic() + seconds
            while time.monotonic() < end: x @ x
        class Computing:
            def query(self): return False
            def synchronize(self): compute(0.3)
        async def main():
            for _ in range(2): waiter.watch(Computing(), Completion(), lambda: None)
            asyncio.ensure_future(run_on_device(compute, 0.6, device="cpu"))
            await asyncio.sleep(0)
        waiter = Waiter()
        asyncio.run(main())
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- on a real device ------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MANY_CYCLES = 200_000_000  # about 0.1 s


class TestCuda:
    pytestmark = gpu

    @pytest.mark.parametrize("kind", ["event", "stream", "tensor", "generic event"])
    async def test_device_done(self, kind: str) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(1, device="cuda")
            torch.cuda._sleep(MANY_CYCLES)
            if kind == "event":
                work: Any = torch.cuda.Event(blocking=True)
                work.record()
            elif kind == "generic event":
                work = stream.record_event()
            else:
                work = stream if kind == "stream" else x
            after = stream.record_event()
            wait = asyncio.ensure_future(device_done(work))
            await asyncio.sleep(0)  # a tensor's event is recorded on the stream that is current here
        ticks = 0
        while not wait.done():
            ticks += 1
            await asyncio.sleep(0.001)
        await wait
        assert after.query() and ticks > 5

    async def test_run_on_device(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(MANY_CYCLES)
            x += 1  # the side stream must wait for this

            def fn(x: torch.Tensor) -> dict[str, torch.Tensor]:
                assert torch.cuda.current_stream() != stream
                return {"y": x * 2}

            result = await run_on_device(fn, x)
            assert (result["y"] == 2).all()
            # Memory that the caller's stream still reads is not given out again.
            torch.cuda._sleep(MANY_CYCLES)
            kept = result["y"] + 1
            del result
            await run_on_device(lambda: torch.full((1 << 20,), 9.0, device="cuda"))
            assert (kept == 3).all()
