"""Cancellation at every point where something suspends.

A scenario is run again and again. In run k its task is cancelled when any task of the run (its own, one that asyncio
made for it, the engine's) suspends for the k-th time, or when what that task waited for has come and it has not run
yet. What must hold then is in `Case.check`, `check_idle` and `nothing_left`. The runs end with the first that comes
through whole.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from interactive_infer import Completion, Engine, EngineClosedError, Generation
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPT, OTHER, LONG = "a long prompt", "another", "tokenized on a thread"
TOKENS, OTHER_TOKENS = 4, 7
# Steps shorter than the prompt, and pages for less than all texts: cancellations meet chunked prefill and preemption.
OPTIONS: dict[str, Any] = {"kv_cache_tokens": 32, "page_size": 4, "max_step_tokens": 8, "max_batch_size": 4}


async def load(model: Any = None, **options: Any) -> Engine:
    model = tiny_model("llama") if model is None else model
    return await Engine.load(
        model, tokenizer=tiny_tokenizer(), progress=False, freeze_gc=False, **{**OPTIONS, **options}
    )


def ask(engine: Engine, prompt: Any = PROMPT, max_tokens: int = TOKENS) -> Any:
    return engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=max_tokens)


async def texts_of(engine: Engine, *, idle: bool = True) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What it writes after each prompt when nothing disturbs it; `idle`: beside nothing else."""
    texts = {}
    for prompt in (PROMPT, OTHER, LONG):
        generation = ask(engine, prompt, max_tokens=10)
        texts[generation.prompt_token_ids] = (await generation).token_ids
        if idle:
            await check_idle(engine)
    return texts


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------------------- where to cancel


class Watched(Coroutine[Any, Any, Any]):
    """A task's coroutine that tells of each suspension: with the future that it waits for, or None."""

    def __init__(self, inner: Coroutine[Any, Any, Any], suspended: Callable[[Any], None]) -> None:
        self._inner, self._suspended = inner, suspended

    def send(self, value: Any) -> Any:
        return self._tell(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._tell(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def _tell(self, future: Any) -> Any:
        self._suspended(future)
        return future


@dataclass(frozen=True)
class How:
    """Which suspensions cancel: number `at` and those after it, `times` in all; and when: "suspending" or "waking"."""

    at: int
    moment: str
    times: int


class Injection:
    """Calls `strike` at the suspensions that `how` says, of all tasks made while `watching`."""

    def __init__(self, how: How, strike: Callable[[], None]) -> None:
        self._how, self._strike = how, strike
        self._seen = 0

    @property
    def reached(self) -> bool:
        return self._seen > self._how.at

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            return asyncio.Task(Watched(coro, self._suspended), loop=loop, **options)

        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory)
        try:
            yield
        finally:
            loop.set_task_factory(None)

    def _suspended(self, future: asyncio.Future[Any] | None) -> None:
        how, number = self._how, self._seen
        self._seen += 1
        if how.at <= number < how.at + how.times:
            if how.moment == "waking" and future is not None:
                future.add_done_callback(lambda _: self._strike())
            else:
                self._strike()


def hows() -> Any:
    cases = [(1, "suspending"), (1, "waking"), (2, "suspending")]
    return pytest.mark.parametrize(("times", "moment"), cases, ids=[f"{times}-{moment}" for times, moment in cases])


async def at_every_suspension(run: Callable[[How], Awaitable[bool]], times: int, moment: str) -> None:
    """`run` says whether the suspension was reached."""
    for at in itertools.count():
        if not await run(How(at, moment, times)):
            break
    assert at > 0, "nothing was cancelled"


# ------------------------------------------------------------------------------- what must hold whatever happens


@dataclass
class Case:
    """One run: who takes part, and how far each had come when the first cancellation was made."""

    engine: Engine
    texts: dict[tuple[int, ...], tuple[int, ...]]
    in_body: bool = False
    """The scenario is in no await of ours: what it reads must go on."""
    kept: list[Generation] = field(default_factory=list)
    """Generations that a cancellation must leave alone."""
    readers: list[tuple[Generation, asyncio.Task[Completion]]] = field(default_factory=list)
    progress: dict[int, int] | None = None

    def ask(self, prompt: Any = PROMPT) -> Any:
        return self.read_too(ask(self.engine, prompt))

    def read_too(self, asked: Any) -> Any:
        """Have a bystander await it as well."""
        for generation in [asked] if isinstance(asked, Generation) else asked:
            self.readers.append((generation, bystander(generation)))
        return asked

    def whole(self, generation: Generation) -> tuple[int, ...]:
        ids = generation.prompt_token_ids
        return () if ids is None else self.texts[ids][: generation.params.max_tokens]

    def strike(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task`."""
        if task is None or task.done():
            return
        if self.progress is None:
            reading = [] if self.in_body else [generation for generation, _ in self.readers]
            self.progress = {g.number: len(g.token_ids) for g in reading if g.finish_reason is None}
        task.cancel()

    async def check(self) -> None:
        published = {generation.number: generation.token_ids for generation, _ in self.readers}
        for generation, reader in self.readers:
            done, whole = await reader, self.whole(generation)  # raises CancelledError if that came here too
            if generation.number in (self.progress or {}) and generation not in self.kept:
                # A step that lands in the same turn of the loop may be committed first, and may be the last one.
                assert len(done.token_ids) <= self.progress[generation.number] + 1
                assert done.token_ids == published[generation.number], "nothing is published after a cancellation"
                assert done.token_ids == whole[: len(done.token_ids)]
                assert done.finish_reason == ("length" if 0 < len(whole) == len(done.token_ids) else "cancelled")
            else:
                assert done.finish_reason == "length"
                assert done.token_ids == whole


def bystander(generation: Generation) -> asyncio.Task[Completion]:
    """Awaits it in a task that no injection watches."""

    async def read() -> Completion:
        return await generation

    return asyncio.Task(read(), loop=asyncio.get_running_loop())


async def check_idle(engine: Engine) -> None:
    """No page, slot, step, reference or message of anything that was asked for is left."""
    steps, ledger, parts, scheduler = engine._steps, engine._ledger, engine._parts, engine._parts.scheduler
    await until(lambda: not len(parts.flights) and steps._task is None)
    parts.cache.check(held=[])
    assert parts.cache.num_available == parts.cache.num_pages
    assert [scheduler.waiting, scheduler.running, list(scheduler.paused)] == [[], [], []]
    assert sorted(scheduler._slots) == list(range(scheduler.max_batch_size))
    assert [ledger._unfinished, ledger._sequences, ledger._held] == [{}, {}, {}]
    assert not steps._inbox
    assert not steps._wheel.locked()
    assert not parts.flights.driver.mine


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task, no thread of ours and no report to the loop's exception handler comes out of the block."""
    loop, reports = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    tasks, threads = asyncio.all_tasks(), our_threads()
    try:
        async with asyncio.timeout(300):  # what hangs is to fail
            yield
        await until(lambda: asyncio.all_tasks() <= tasks and our_threads() <= threads)
        gc.collect()  # a pending task, or a failure that nobody looked at, reports when it goes
    finally:
        loop.set_exception_handler(None)
    assert not reports


def our_threads() -> set[threading.Thread]:
    """Not those of asyncio's pool, which stay for the next `to_thread`."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("interactive_infer")}


# --------------------------------------------------------------------------------------------------- readers


async def awaited(case: Case) -> None:
    await case.ask()


async def iterated(case: Case) -> None:
    async for _ in case.ask():
        pass


async def iterated_with_an_await_in_the_body(case: Case) -> None:
    async for _ in case.ask():
        case.in_body = True
        await asyncio.sleep(0)
        case.in_body = False


async def left_by_break(case: Case) -> None:
    generation = case.ask()
    async for _ in generation:
        break
    case.in_body = True
    while generation.finish_reason is None:
        await asyncio.sleep(0.0005)


async def as_a_future(case: Case) -> None:
    await case.ask().future()


async def as_a_future_in_wait(case: Case) -> None:
    generation = case.ask()
    case.kept.append(generation)  # asyncio.wait cancels nothing
    await asyncio.wait([generation.future()])


async def shielded(case: Case) -> None:
    generation = case.ask()
    case.kept.append(generation)
    await asyncio.shield(generation)


async def within_a_timeout(case: Case) -> None:
    async with asyncio.timeout(60):
        await case.ask()


async def grouped(case: Case) -> None:
    await case.read_too(ask(case.engine, [PROMPT, OTHER]))


async def tokenized_on_a_thread(case: Case) -> None:
    await case.ask(LONG)


async def branched(case: Case) -> None:
    parent = case.ask()
    async for token in parent:
        if token.index == 2:
            break
    case.kept.append(parent)
    await case.read_too(parent.branch(at=2))


async def continued(case: Case) -> None:
    parent = case.ask()
    await parent
    await case.read_too(parent.continue_(3))


async def paused_and_resumed(case: Case) -> None:
    generation = case.ask()
    async for token in generation:
        if token.index == 1:
            generation.pause()
            asyncio.get_running_loop().call_later(0.002, generation.resume)


async def awaited_again(case: Case) -> None:
    """Takes the cancellation late: the text has ended, and whoever reads it now is told how."""
    generation = case.ask()
    try:
        await generation
    except asyncio.CancelledError:
        await generation
        raise


READERS = [
    awaited,
    iterated,
    iterated_with_an_await_in_the_body,
    left_by_break,
    as_a_future,
    as_a_future_in_wait,
    shielded,
    within_a_timeout,
    grouped,
    tokenized_on_a_thread,
    branched,
    continued,
    paused_and_resumed,
    awaited_again,
]
Scenario = Callable[[Case], Coroutine[Any, Any, None]]


async def run_reader(scenario: Scenario, how: How, case: Case, victim: Callable[[asyncio.Task[None]], Any]) -> bool:
    """One run, beside a generation of somebody else's. Returns whether suspension `how.at` was reached."""
    engine = case.engine
    task: asyncio.Task[None] | None = None

    def strike() -> None:
        if task is not None and not task.done():
            case.strike(victim(task))

    injection = Injection(how, strike)
    with injection.watching():
        other = ask(engine, OTHER, max_tokens=OTHER_TOKENS)
        read_other = bystander(other)
        task = asyncio.get_running_loop().create_task(scenario(case))
        _, pending = await asyncio.wait([task], timeout=30)
    assert not pending, "a reader was left waiting"
    assert task.cancelled() == (case.progress is not None and victim(task) is task)
    if not task.cancelled():
        task.result()
    await case.check()
    assert (await read_other).token_ids == case.whole(other)
    await check_idle(engine)
    return injection.reached


@hows()
@pytest.mark.parametrize("scenario", READERS, ids=[scenario.__name__ for scenario in READERS])
async def test_a_cancelled_reader(scenario: Scenario, times: int, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nothing_left(), await load() as engine:
        texts = await texts_of(engine)
        monkeypatch.setattr("interactive_infer.prompts.SHORT_TEXT", len(LONG) - 1)

        async def run(how: How) -> bool:
            return await run_reader(scenario, how, Case(engine, texts), lambda task: task)

        await at_every_suspension(run, times, moment)


@hows()
async def test_a_cancelled_step_loop_starts_again(times: int, moment: str) -> None:
    """Whoever cancels every task there is hits the engine's own too: nobody who reads may wait for ever."""
    async with nothing_left(), await load() as engine:
        texts = await texts_of(engine)

        async def run(how: How) -> bool:
            case = Case(engine, texts, in_body=True)
            return await run_reader(awaited, how, case, lambda _: engine._steps._task)

        await at_every_suspension(run, times, moment)


async def test_a_cancelled_reader_of_a_paused_generation() -> None:
    async with nothing_left(), await load() as engine:
        generation = ask(engine)
        reading = bystander(generation)
        async for _ in generation:
            break
        generation.pause()
        await until(lambda: not len(engine._parts.flights))
        assert generation.state == "paused"
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert generation.finish_reason == "cancelled"
        await check_idle(engine)


# --------------------------------------------------------------------------------------- loading and closing


@dataclass
class Lifetime:
    """An engine over a model that the test owns, and what was asked of it."""

    model: Any = field(default_factory=lambda: tiny_model("llama"))
    engine: Engine | None = None
    readers: list[asyncio.Task[Completion]] = field(default_factory=list)

    async def start(self) -> None:
        """Load it, with two generations on the way."""
        self.engine = await load(self.model)
        self.ask()
        async for _ in ask(self.engine, OTHER):
            break

    def ask(self) -> Generation:
        assert self.engine is not None
        generation: Generation = ask(self.engine)
        self.readers.append(bystander(generation))
        return generation

    async def check(self) -> None:
        """Everything has been given back, though nobody calls close() again."""
        # A thread cannot be cancelled: a load runs to its end, and what it made is dropped then.
        await until(lambda: self.model.config._attn_implementation == "sdpa")
        for reader in self.readers:
            assert (await reader).finish_reason in ("cancelled", "length")
        engine = self.engine
        if engine is not None:
            await until(lambda: engine.closed)  # the model is given back a moment before
            assert await engine.close() == 0
            await check_idle(engine)
            with pytest.raises(EngineClosedError):
                ask(engine)


async def loaded(life: Lifetime) -> None:
    engine = await load(life.model)
    await engine.close()


async def within_async_with(life: Lifetime) -> None:
    async with await load(life.model) as life.engine:
        ask(life.engine, OTHER)
        await life.ask()


async def closed(life: Lifetime) -> None:
    assert life.engine is not None
    assert await life.engine.close() > 0


async def closed_again(life: Lifetime) -> None:
    assert life.engine is not None
    try:
        await life.engine.close()
    except asyncio.CancelledError:
        await life.engine.close()
        assert life.engine.closed
        raise


async def closed_beside_another_close(life: Lifetime) -> None:
    assert life.engine is not None
    closing = asyncio.Task(life.engine.close(), loop=asyncio.get_running_loop())
    await asyncio.sleep(0)
    try:
        await life.engine.close()
        assert life.engine.closed
    finally:
        await asyncio.shield(closing)


LIFETIMES = [loaded, within_async_with, closed, closed_again, closed_beside_another_close]


@hows()
@pytest.mark.parametrize("scenario", LIFETIMES, ids=[scenario.__name__ for scenario in LIFETIMES])
async def test_a_cancelled_load_or_close(
    scenario: Callable[[Lifetime], Coroutine[Any, Any, None]], times: int, moment: str
) -> None:
    async def run(how: How) -> bool:
        life, task, struck = Lifetime(), None, False
        if scenario not in (loaded, within_async_with):
            await life.start()

        def strike() -> None:
            nonlocal struck
            if task is not None and not task.done():
                struck = True
                task.cancel()

        injection = Injection(how, strike)
        with injection.watching():
            task = asyncio.get_running_loop().create_task(scenario(life))
            _, pending = await asyncio.wait([task], timeout=30)
        assert not pending
        assert task.cancelled() == struck
        if not struck:
            task.result()
        await life.check()
        return injection.reached

    async with nothing_left():
        await at_every_suspension(run, times, moment)


# ------------------------------------------------------------------------------------------- a loop that ends


def run_to_its_end(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, which cancels every task, the engine's own among them; nothing is pending or reported then."""
    reports: list[dict[str, Any]] = []
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        result = runner.run(main)
    assert not asyncio.all_tasks(loop)
    gc.collect()
    assert not reports
    return result


@pytest.mark.parametrize("tokens", range(TOKENS + 1))
def test_a_loop_that_ends_leaves_an_engine_for_the_next(tokens: int) -> None:
    engine = Engine.load_sync(
        tiny_model("llama"), tokenizer=tiny_tokenizer(), kv_cache_tokens=256, progress=False, freeze_gc=False
    )

    async def leave() -> list[Generation]:
        read, broken_out_of, of_a_future, protected = (
            ask(engine, prompt, max_tokens=30) for prompt in (PROMPT, OTHER, OTHER, LONG)
        )
        left = [bystander(read), of_a_future.future(), asyncio.shield(protected)]
        async for _ in broken_out_of:
            break
        await until(lambda: len(read.token_ids) >= tokens)
        assert not any(reader.done() for reader in left)
        return [read, broken_out_of, of_a_future, protected]

    generations = run_to_its_end(leave())

    async def use() -> list[Completion]:
        texts = await texts_of(engine, idle=False)
        done = [await generation for generation in generations]
        assert await texts_of(engine) == texts
        return done

    reasons = [done.finish_reason for done in run_to_its_end(use())]
    assert reasons == ["cancelled", "length", "cancelled", "cancelled"], "only where nobody waited it goes on"
    assert engine.close_sync() > 0


def test_a_loop_that_ends_while_an_engine_is_closed() -> None:
    model, threads = tiny_model("llama"), our_threads()

    async def main() -> Engine:
        engine = await load(model)
        async for _ in ask(engine):
            break
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        assert not closing.done()
        return engine

    engine = run_to_its_end(main())
    assert model.config._attn_implementation == "sdpa"
    assert our_threads() <= threads
    assert engine.close_sync() == 0


def test_a_load_goes_on_after_its_loop_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    reported: concurrent.futures.Future[None] = concurrent.futures.Future()

    def slow_load(*arguments: Any) -> None:
        *_, report, _ = arguments
        started.set()
        go_on.wait(30)
        try:
            reported.set_result(report("weights", 0.5))
        except BaseException as error:
            reported.set_exception(error)

    monkeypatch.setattr(Engine, "_load", slow_load)
    loop = asyncio.new_event_loop()
    loading = loop.create_task(Engine.load(progress=False))
    loop.run_until_complete(loop.run_in_executor(None, started.wait))
    loading.cancel()
    loop.run_until_complete(asyncio.wait([loading]))
    loop.close()
    go_on.set()
    reported.result(30)
