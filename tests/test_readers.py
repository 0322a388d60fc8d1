"""How those who wait for generations are woken: all of them, in order, and not all in one turn of the loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref

import pytest

from interactive_infer import Engine, readers
from interactive_infer.core.output import Output
from interactive_infer.interrupts import deferred_interrupts
from interactive_infer.readers import _WAKES_A_TURN, Readers, _wakes
from interactive_infer.timeline import Phase
from tests.tiny_models import tiny_model, tiny_tokenizer

COUNT = 5 * _WAKES_A_TURN + 3


class Waiting:
    """Readers of as many outputs, each a task that waits for news again and again."""

    def __init__(self, count: int) -> None:
        self.readers = [Readers(Output(None, [], [])) for _ in range(count)]
        self.woken: list[int] = []
        self.tasks = [asyncio.ensure_future(self._wait(index)) for index in range(count)]

    async def _wait(self, index: int) -> None:
        while True:
            future = asyncio.get_running_loop().create_future()
            self.readers[index].of_news[future] = None
            await future
            self.woken.append(index)

    def tell(self) -> None:
        for each in self.readers:
            each()

    def tell_from_a_thread(self) -> None:
        """The loop stands still meanwhile."""
        thread = threading.Thread(target=self.tell)
        thread.start()
        thread.join()

    async def woken_each_turn(self) -> list[int]:
        """How many in each turn of the loop, until all are."""
        each_turn = []
        while len(self.woken) < len(self.readers):
            before = len(self.woken)
            await asyncio.sleep(0)  # comes again once everything of this turn has run
            each_turn.append(len(self.woken) - before)
        return each_turn

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_step_wakes_its_readers_over_several_turns_of_the_loop() -> None:
    waiting = Waiting(COUNT)
    await asyncio.sleep(0)
    waiting.tell()
    assert waiting.woken == []
    assert max(await waiting.woken_each_turn()) <= _WAKES_A_TURN
    assert waiting.woken == list(range(COUNT))
    await waiting.end()


async def test_told_again_while_some_still_wait_for_their_turn_all_hear_of_it() -> None:
    waiting = Waiting(COUNT)
    await asyncio.sleep(0)
    waiting.tell()
    await asyncio.sleep(0)
    waiting.tell()  # those that have run wait again; the others are told once, and see both
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(waiting.woken) == set(range(COUNT))
    waiting.woken.clear()
    waiting.tell()
    for _ in range(20):
        await asyncio.sleep(0)
    assert waiting.woken == list(range(COUNT))
    await waiting.end()


async def test_one_that_is_cancelled_before_its_turn_takes_nobody_elses() -> None:
    waiting = Waiting(COUNT)
    await asyncio.sleep(0)
    waiting.tell()
    gone = range(_WAKES_A_TURN + 2, COUNT, 2)
    for index in gone:
        waiting.tasks[index].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert waiting.woken == [index for index in range(COUNT) if index not in gone]
    await waiting.end()


async def test_a_few_are_woken_at_once() -> None:
    waiting = Waiting(_WAKES_A_TURN)
    await asyncio.sleep(0)
    for _ in range(3):
        waiting.woken.clear()
        waiting.tell()
        await asyncio.sleep(0)
        assert len(waiting.woken) == _WAKES_A_TURN
        await asyncio.sleep(0)
    await waiting.end()


async def test_told_by_another_thread_they_wake_over_several_turns_too() -> None:
    waiting = Waiting(COUNT)
    await asyncio.sleep(0)
    waiting.tell_from_a_thread()
    assert max(await waiting.woken_each_turn()) <= _WAKES_A_TURN
    assert waiting.woken == list(range(COUNT))
    await waiting.end()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_interrupt_among_wakes_leaves_nobody_asleep(monkeypatch: pytest.MonkeyPatch, elsewhere: bool) -> None:
    """As in a terminal, where it is raised wherever the loop is, and the loop runs again for the next input."""
    usual, count = readers._set, 0

    def interrupted(future: asyncio.Future[None]) -> None:
        nonlocal count
        count += 1
        if count == _WAKES_A_TURN + 3:
            signal.raise_signal(signal.SIGINT)
        usual(future)

    monkeypatch.setattr(readers, "_set", interrupted)
    loop = asyncio.new_event_loop()

    made: list[Waiting] = []

    async def wait() -> None:
        waiting = Waiting(COUNT)
        made.append(waiting)
        await asyncio.sleep(0)
        if elsewhere:
            waiting.tell_from_a_thread()
        else:
            with deferred_interrupts():
                waiting.tell()
        await asyncio.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(wait())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert sorted(made[0].woken) == list(range(COUNT))
    loop.run_until_complete(made[0].end())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_loop_that_stops_in_between_wakes_the_rest_when_it_runs_again() -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> Waiting:
        waiting = Waiting(COUNT)
        await asyncio.sleep(0)
        waiting.tell()
        return waiting

    waiting = loop.run_until_complete(begin())
    assert len(waiting.woken) < COUNT
    loop.run_until_complete(asyncio.sleep(0.01))
    assert waiting.woken == list(range(COUNT))
    loop.run_until_complete(waiting.end())
    loop.close()


def test_no_loop_is_kept() -> None:
    loop = asyncio.new_event_loop()

    async def once() -> None:
        waiting = Waiting(COUNT)
        await asyncio.sleep(0)
        waiting.tell()
        await waiting.end()

    loop.run_until_complete(once())
    loop.close()
    gone = weakref.ref(loop)
    assert loop in _wakes
    del loop
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_what_was_read_is_not_kept(logprobs: int | None) -> None:
    """Every garbage collection would look at tokens that nobody looks at again."""
    async with await Engine.load(tiny_model("llama"), max_batch_size=4, progress=False, freeze_gc=False) as engine:
        gen = engine.generate([5, 9, 2], max_tokens=40, temperature=0, ignore_eos=True, logprobs=logprobs)
        first = [token async for token in gen]
        assert gen._tokens == []
        assert first == list(gen.tokens) == list((await gen).tokens)
        assert [token async for token in gen] == first


async def test_a_token_is_decoded_once_and_that_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = 0
    usual = Output.decode

    def decode(output: Output) -> int:
        nonlocal decodes
        decodes += 1
        return usual(output)

    monkeypatch.setattr(Output, "decode", decode)
    tokenizer = tiny_tokenizer()
    async with await Engine.load(
        tiny_model("llama"), tokenizer=tokenizer, max_batch_size=4, progress=False, freeze_gc=False
    ) as engine:
        gen = engine.generate([5, 9, 2], max_tokens=100, temperature=0, ignore_eos=True)
        assert len([token async for token in gen]) == 100
        assert decodes <= 101

        def recorded() -> int:
            spans = engine.timeline.recorder.snapshot().spans
            return int((spans["phase"] == Phase.DETOKENIZE).sum())

        before = recorded()
        for _ in range(3):
            assert len([token async for token in gen]) == len(gen.tokens) == 100
        assert recorded() == before, "what was decoded already is no work"
