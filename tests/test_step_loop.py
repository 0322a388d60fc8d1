"""Who drives: several threads, several loops, and what happens when a driver is taken away or fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from interactive_infer import Engine, ReentrantStepError, WrongLoopError
from interactive_infer.core.flight import Driver
from interactive_infer.core.step import StepResult
from interactive_infer.waiting import Completion
from tests.tiny_models import tiny_model

PROMPT = [5, 9, 2, 7, 11, 3]
ROOT = Path(__file__).parents[1]
LIMIT = 60.0  # seconds; only a hang takes as long


def load(**options):
    options = {"kv_cache_tokens": 1024, "page_size": 4, **options}
    return Engine.load_sync(tiny_model("llama"), progress=False, freeze_gc=False, **options)


@pytest.fixture
async def engine():
    engine = load()
    yield engine
    await engine.close()
    engine._parts.cache.check(held=[])


def ask(engine, prompt=PROMPT, **sampling):
    return engine.generate(prompt, **{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **sampling})


def ask_sync(engine, number=0, **sampling):
    sampling = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, **sampling}
    return engine.generate_sync([number + 1, 2, 3], **sampling).token_ids


async def within(awaitable):
    """`awaitable`'s result; a failure, not a hang, if it never comes."""
    return await asyncio.wait_for(awaitable, LIMIT)


class TestDriver:
    def test_one_thread_has_it_and_only_once(self):
        driver = Driver()
        assert driver.take() and driver.mine
        assert not driver.take()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(driver.take).result()
            assert not pool.submit(lambda: driver.mine).result()
            driver.give_back()
            assert pool.submit(driver.take).result()
        assert not driver.mine


class TestThreads:
    def test_generate_sync_on_several_threads(self):
        with load() as engine:
            expected = [ask_sync(engine, i) for i in range(4)]
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(lambda i: ask_sync(engine, i % 4), range(16))) == expected * 4
            engine._parts.cache.check(held=[])

    async def test_generate_sync_on_other_threads_beside_a_running_loop(self, engine):
        expected = ask_sync(engine)
        mine = ask(engine, max_tokens=100)
        calls = [asyncio.to_thread(ask_sync, engine) for _ in range(4)]
        *others, done = await within(asyncio.gather(*calls, mine))
        assert others == [expected] * 4
        assert len(done.token_ids) == 100

    async def test_a_loop_that_waits_for_threads_that_wait_for_it(self, engine):
        reader = asyncio.ensure_future(ask(engine, max_tokens=300)._finished())
        await asyncio.sleep(0.01)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda i: ask_sync(engine), range(4)))
        assert len(set(results)) == 1
        assert len((await within(reader)).token_ids) == 300

    def test_asyncio_run_ends_while_a_thread_waits(self):
        engine = load()
        done = []

        async def main():
            asyncio.get_running_loop().run_in_executor(None, lambda: done.append(ask_sync(engine, max_tokens=400)))
            await asyncio.sleep(0.05)

        asyncio.run(main())
        assert len(done[0]) == 400
        assert engine.close_sync() > 0

    async def test_close_sync_inside_a_step_raises(self, engine):
        gen, caught = ask(engine), []

        def listener():
            try:
                engine.close_sync()
            except ReentrantStepError as error:
                caught.append(error)

        gen._output.listeners.append(listener)
        await within(gen)
        assert caught

    async def test_two_turns_never_overlap(self, engine):
        inside, overlaps = [], []
        finish = engine._parts.flights.finish

        def watched(flight):
            if inside:
                overlaps.append(threading.get_ident())
            inside.append(1)
            time.sleep(0.001)  # hands the GIL over in the middle of a commit
            finish(flight)
            inside.pop()

        engine._parts.flights.finish = watched
        calls = [asyncio.to_thread(ask_sync, engine, i) for i in range(4)]
        await within(asyncio.gather(*calls, ask(engine, max_tokens=60)))
        assert not overlaps


class TestLoops:
    @pytest.mark.parametrize("method", ["plan", "commit"])
    def test_an_interrupt_on_a_loop_waits_until_the_turn_is_over(self, method, monkeypatch, caplog):
        engine, completed = load(), []
        whole = getattr(engine._parts.scheduler, method)

        def interrupted(*args):
            if not completed:
                os.kill(os.getpid(), signal.SIGINT)
            result = whole(*args)
            completed.append(method)
            return result

        async def read():
            return await ask(engine)

        loop = asyncio.new_event_loop()  # unlike asyncio.run it leaves the handler that raises KeyboardInterrupt
        monkeypatch.setattr(engine._parts.scheduler, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(read())
        assert completed
        assert len(loop.run_until_complete(within(read())).token_ids) == 30
        loop.run_until_complete(engine.close())
        loop.close()
        engine._parts.cache.check(held=[])
        gc.collect()
        assert not caplog.records, "no task reports it a second time"

    def test_a_reader_on_a_closed_loop_disturbs_nobody(self):
        engine = load()
        loop = asyncio.new_event_loop()

        async def start():
            gen = ask(engine, max_tokens=300)
            reader = asyncio.ensure_future(gen._finished())
            await asyncio.sleep(0.01)
            return gen, reader

        gen, reader = loop.run_until_complete(start())
        reader._log_destroy_pending = engine._steps._task._log_destroy_pending = False
        loop.close()
        assert len(gen.result_sync().token_ids) == 300
        engine.close_sync()

    def test_the_task_of_a_loop_that_was_left_drives_no_more(self):
        engine = load()
        loop = asyncio.new_event_loop()

        async def start():
            gen = ask(engine, max_tokens=200)
            reader = asyncio.ensure_future(gen._finished())
            await asyncio.sleep(0.01)
            return reader, engine._steps._task

        reader, task = loop.run_until_complete(start())

        async def elsewhere():
            return await within(ask(engine, max_tokens=100))

        other = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        other.start()
        while engine._steps.loop is loop:
            time.sleep(0.001)
        first = loop.run_until_complete(within(reader))
        other.join(LIMIT)
        assert len(first.token_ids) == 200
        assert task.done()
        loop.close()
        engine.close_sync()

    async def test_an_engine_that_nobody_reads_on_its_loop_moves(self, engine):
        await ask(engine, max_tokens=2)
        unread = ask(engine, max_tokens=500)

        async def elsewhere():
            return len((await ask(engine, max_tokens=5)).token_ids)

        assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == 5
        reader = asyncio.ensure_future(unread._finished())
        await asyncio.sleep(0)
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        unread.cancel()
        await within(reader)


class TestTurns:
    """What the loop stands still for, with a device that is done when the test says so."""

    @pytest.fixture
    async def device(self, engine, monkeypatch):
        class Device:
            def __init__(self):
                self.flying, self.seen = [], []

            def launch(self, plan):
                self.seen.append("launch")
                self.flying.append(Completion())
                return self.flying[-1]

            def land(self, count=1):
                for _ in range(count):
                    self.flying.pop(0).set_result(StepResult([7], [], {}))

            async def until_launched(self):
                while "launch" not in self.seen:
                    await asyncio.sleep(0)

        device, flights = Device(), engine._parts.flights
        finish = flights.finish

        def commit(flight):
            finish(flight)
            device.seen.append("commit")
            asyncio.get_running_loop().call_soon(device.seen.append, "the loop's")

        monkeypatch.setattr(engine._parts.runner, "launch", device.launch)
        monkeypatch.setattr(flights, "finish", commit)
        generation = ask(engine, [3], max_tokens=8)
        while len(device.flying) < 2:
            await asyncio.sleep(0)
        yield device
        generation.cancel()
        while device.flying:
            device.land()

    async def test_while_the_device_works_the_loop_goes_between_commit_and_launch(self, device):
        device.seen.clear()
        device.land()
        await within(device.until_launched())
        assert device.seen[:3] == ["commit", "the loop's", "launch"]

    async def test_a_device_without_work_is_given_some_at_once(self, device):
        device.seen.clear()
        device.land(2)
        await within(device.until_launched())
        assert device.seen[:2] == ["commit", "launch"]

    async def test_with_one_in_flight_the_next_is_launched_at_once(self, engine, device):
        engine._parts.flights._max_in_flight = 1
        device.land()
        while len(engine._parts.flights) > 1 or device.seen[-1] != "the loop's":
            await asyncio.sleep(0)
        device.seen.clear()
        device.land()
        await within(device.until_launched())
        assert device.seen[:2] == ["commit", "launch"]

    async def test_a_task_cancelled_between_commit_and_launch_is_started_again(self, engine, device):
        device.seen.clear()
        device.land()
        while "commit" not in device.seen:
            await asyncio.sleep(0)
        assert "launch" not in device.seen
        engine._steps._task.cancel()
        await within(device.until_launched())
        assert device.seen.count("commit") == 1

    @pytest.mark.parametrize("waiting", ["spin", "block"])
    async def test_the_loop_has_an_iteration_a_step_however_it_waits(self, waiting):
        engine, seen = load(waiting=waiting, steps_in_flight=1), []
        generation = ask(engine, max_tokens=20)

        async def look():
            while generation.finish_reason is None:
                seen.append(len(generation.token_ids))
                await asyncio.sleep(0)

        await within(look())
        assert set(range(1, 20)) <= set(seen)
        await engine.close()


class TestSupervision:
    async def test_a_listener_that_raises_is_logged_and_disturbs_nobody(self, engine, caplog):
        gen, other = ask(engine), ask(engine, [1, 2, 3])

        def listener():
            raise UnicodeEncodeError("ascii", "é", 0, 1, "planted")

        gen._output.listeners.append(listener)
        with caplog.at_level(logging.ERROR):
            first, second = await within(asyncio.gather(gen, other))
        assert (len(first.token_ids), len(second.token_ids)) == (30, 30)
        assert len(caplog.records) == 1 and "planted" in caplog.text, "logged, and told no more"

    async def test_what_fails_in_a_request_is_logged_and_disturbs_nobody(self, engine, caplog):
        def request():
            raise ValueError("planted")

        with caplog.at_level(logging.ERROR):
            engine._steps.post(request)
            assert len((await within(ask(engine))).token_ids) == 30
        assert "planted" in caplog.text

    @pytest.mark.parametrize("where", ["plan", "commit"])
    async def test_what_nobody_can_handle_ends_everything(self, engine, where, monkeypatch, caplog):
        gens = [ask(engine, max_tokens=500) for _ in range(2)]
        async for token in gens[0]:
            if token.index == 3:
                break

        def broken(*args):
            raise RuntimeError("planted")

        monkeypatch.setattr(engine._parts.scheduler, where, broken)
        results = await within(asyncio.gather(*gens, return_exceptions=True))
        monkeypatch.undo()
        assert [str(result) for result in results] == ["planted", "planted"]
        assert results[0] is not results[1]
        assert len((await within(ask(engine))).token_ids) == 30, "the engine goes on"

    async def test_a_broken_launch_ends_everything(self, engine, monkeypatch):
        def broken(plan):
            raise MemoryError("planted")

        monkeypatch.setattr(engine._parts.runner, "launch", broken)
        with pytest.raises(MemoryError, match="planted"):
            await within(ask(engine))
        monkeypatch.undo()
        assert len((await within(ask(engine))).token_ids) == 30

    async def test_a_tokenizer_that_cannot_decode_fails_that_text_alone(self, engine, monkeypatch):
        bad, good = ask(engine, stop="never"), ask(engine, [1, 2, 3])

        def broken():
            raise KeyError("planted")

        monkeypatch.setattr(bad._output, "reached_stop_string", broken)
        results = await within(asyncio.gather(bad, good, return_exceptions=True))
        assert isinstance(results[0], KeyError)
        assert len(results[1].token_ids) == 30

    async def test_a_cancelled_task_is_started_again(self, engine):
        gen = ask(engine, max_tokens=300)
        reader = gen.future()
        await asyncio.sleep(0.01)
        task = engine._steps._task
        for other in asyncio.all_tasks():
            if other not in (asyncio.current_task(), reader):
                other.cancel()
        assert len((await within(asyncio.shield(reader))).token_ids) == 300
        assert task.cancelled()

    def test_nothing_is_started_on_a_loop_that_is_about_to_be_closed(self):
        script = (
            "import asyncio\n"
            "from interactive_infer import Engine\n"
            "from tests.tiny_models import tiny_model\n"
            "async def main():\n"
            "    engine = await Engine.load(tiny_model('llama'), kv_cache_tokens=4096, progress=False)\n"
            "    reader = engine.generate([1, 2, 3], max_tokens=4000, ignore_eos=True).future()\n"
            "    await asyncio.sleep(0.1)\n"
            "asyncio.run(main())\n"
        )
        ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "")
