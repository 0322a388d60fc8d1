"""The engine from outside: reading, steering, references, loops, bad input, closing."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from interactive_infer import (
    DeviceError,
    Engine,
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    ReentrantStepError,
    WrongLoopError,
    assembly,
)
from interactive_infer.progress import ProgressBar
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPT = [5, 9, 2, 7, 11, 3]


async def load(**options):
    options = {"kv_cache_tokens": 1024, "page_size": 4, **options}
    return await Engine.load(tiny_model("llama"), progress=False, freeze_gc=False, **options)


@pytest.fixture
async def engine():
    async with await load() as engine:
        yield engine
        await settled(engine)
        engine._parts.cache.check(held=[])


async def settled(engine):
    """Wait until nothing is in flight and nothing unfinished but what is paused."""
    while len(engine._parts.flights) or engine._parts.scheduler.num_runnable:
        await asyncio.sleep(0.001)


async def _ended(gen):
    await gen
    return gen


def ask(engine, prompt=PROMPT, **sampling):
    sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **sampling}
    return engine.generate(prompt, **sampling)


class TestReading:
    async def test_await_gives_the_completion(self, engine):
        done = await ask(engine, max_tokens=7)
        assert len(done.token_ids) == 7
        assert done.finish_reason == "length"
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 7)
        assert 0 <= done.timing.time_to_first_token <= done.timing.total

    async def test_every_reader_sees_every_token_from_the_start(self, engine):
        gen = ask(engine)

        async def read():
            return [token.id async for token in gen]

        first, second = await asyncio.gather(read(), read())
        late = await read()
        assert first == second == late == list(gen.token_ids)
        assert [token.index for token in gen.tokens] == list(range(20))

    async def test_several_generations_advance_in_turn(self, engine):
        order = []

        async def read(name, gen):
            async for _ in gen:
                order.append(name)

        await asyncio.gather(*(read(i, ask(engine, [i + 1, 2, 3])) for i in range(4)))
        middle = order[8:-8]
        assert all(middle.count(name) > 5 for name in range(4))
        assert any(a != b for a, b in itertools.pairwise(middle))

    async def test_break_does_not_cancel(self, engine):
        gen = ask(engine)
        async for _ in gen:
            break
        assert (await gen).finish_reason == "length"

    async def test_an_exception_in_the_body_does_not_cancel(self, engine):
        gen = ask(engine)
        with pytest.raises(ZeroDivisionError):
            async for _ in gen:
                _ = 1 / 0
        assert (await gen).finish_reason == "length"

    async def test_a_generation_once_read_is_held_until_it_ends(self, engine):
        gen = ask(engine, max_tokens=200)
        async for _ in gen:
            break
        output, alive = gen._output, weakref.ref(gen)
        del gen
        while output.finish_reason is None:
            await asyncio.sleep(0.001)
        assert output.finish_reason == "length"
        await asyncio.sleep(0)
        gc.collect()
        assert alive() is None

    async def test_future_works_with_asyncio_wait(self, engine):
        futures = [ask(engine, max_tokens=n).future() for n in (3, 5)]
        done, pending = await asyncio.wait(futures)
        assert not pending
        assert sorted(len(future.result().token_ids) for future in done) == [3, 5]

    async def test_a_reader_of_what_has_ended_gives_the_loop_turns(self, engine):
        gen = ask(engine, max_tokens=400)
        await gen
        turns = 0

        async def tick():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        ticking = asyncio.ensure_future(tick())
        await asyncio.sleep(0)
        before = turns
        await gen
        assert turns > before
        before = turns
        assert len([token async for token in gen]) == 400
        assert turns - before >= 400 // 64
        ticking.cancel()

    async def test_tokens_may_be_read_from_any_thread(self, engine):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(5):
                gen = ask(engine, max_tokens=200)
                gate = threading.Barrier(4)
                reads = [asyncio.to_thread(lambda gen=gen, gate=gate: (gate.wait(), gen.tokens)) for _ in range(4)]
                await gen._finished()
                gen._tokens.clear()
                await asyncio.gather(*reads)
                assert [token.index for token in gen.tokens] == list(range(200))
        finally:
            sys.setswitchinterval(interval)

    async def test_logprobs_0_gives_the_chosen_token_alone(self, engine):
        beside = ask(engine)
        done = await ask(engine, logprobs=0, max_tokens=3)
        assert all(token.logprob is not None and token.alternatives == () for token in done.tokens)
        assert (await beside).finish_reason == "length"

    async def test_logprobs_are_those_of_the_model(self, engine):
        done = await ask(engine, logprobs=3, max_tokens=4)
        ids = torch.tensor([PROMPT + list(done.token_ids)])
        with torch.no_grad():
            logprobs = engine.model(ids).logits[0].float().log_softmax(-1)
        for token in done.tokens:
            expected = logprobs[len(PROMPT) + token.index - 1]
            assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-4)
            assert token.rank == 1
            assert [a.id for a in token.alternatives] == expected.topk(3).indices.tolist()


class TestSteering:
    async def test_cancel_ends_every_reader_and_raises_nothing(self, engine):
        gen = ask(engine, max_tokens=500)
        seen = []

        async def read():
            async for token in gen:
                seen.append(token.id)
                if len(seen) == 3:
                    gen.cancel()

        _, done = await asyncio.gather(read(), gen)
        assert done.finish_reason == "cancelled"
        assert list(done.token_ids) == seen
        await settled(engine)
        assert list(gen.token_ids) == seen, "nothing is published after cancel()"

    @pytest.mark.parametrize("after", [0, 1, 2, 5])
    async def test_cancelled_reader_cancels_and_is_raised_to_it_alone(self, engine, after):
        gen, other = ask(engine, max_tokens=500), ask(engine, [1, 2, 3])
        reader = asyncio.ensure_future(gen._finished())
        bystander = asyncio.ensure_future(gen._finished())
        while len(gen.token_ids) < after:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await bystander).finish_reason == "cancelled"
        assert (await other).finish_reason == "length"

    async def test_shield_protects(self, engine):
        gen = ask(engine)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(gen), 0)
        assert (await gen).finish_reason == "length"

    async def test_wait_for_cancels(self, engine):
        gen = ask(engine, max_tokens=500)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(gen, 0.001)
        assert gen.finish_reason == "cancelled"

    async def test_pause_stops_planning_and_resume_goes_on_with_the_same_tokens(self, engine):
        expected = (await ask(engine, max_tokens=60)).token_ids
        gen = ask(engine, max_tokens=60)
        async for _ in gen:
            break
        before = len(gen.token_ids)
        gen.pause()
        await settled(engine)
        assert gen.state == "paused"
        assert len(gen.token_ids) <= before + 2
        held = gen.token_ids
        await ask(engine, [4, 4, 4])
        assert gen.token_ids == held
        gen.resume()
        assert (await gen).token_ids == expected

    async def test_update_holds_from_the_next_planned_step(self, engine):
        gen = ask(engine, max_tokens=400)
        async for token in gen:
            if token.index == 4:
                gen.update(max_tokens=12)
        assert gen.finish_reason == "length"
        assert 12 <= len(gen.token_ids) <= 12 + 2

    async def test_update_of_what_has_ended_changes_nothing(self, engine):
        gen = ask(engine, max_tokens=3)
        await gen
        gen.update(temperature=1.5)
        assert gen.params.temperature == 0
        with pytest.raises(InvalidRequestError, match="temperature"):
            gen.update(temperature=-1)

    async def test_penalties_can_be_switched_on_while_it_runs(self, engine):
        gen = ask(engine, max_tokens=80)
        async for token in gen:
            if token.index == 10:
                gen.update(frequency_penalty=2.0, presence_penalty=2.0)
        assert gen.finish_reason == "length"
        assert len(set(gen.token_ids[40:])) > 1

    async def test_branch_without_a_token_writes_the_same_text(self, engine):
        gen = ask(engine)
        await gen
        branch = gen.branch(at=13)
        done = await branch
        assert done.token_ids == gen.token_ids
        recomputed = len(PROMPT) + 13 - branch._sequence.num_reused
        assert 0 < recomputed < 4

    async def test_branch_with_a_token_is_what_that_text_would_have_become(self, engine):
        gen = ask(engine)
        await gen
        branch = await gen.branch(at=6, token=17)
        fresh = await ask(engine, [*PROMPT, *gen.token_ids[:6], 17], max_tokens=13)
        assert branch.token_ids == (*gen.token_ids[:6], 17, *fresh.token_ids)

    async def test_branch_at_its_very_end_ends_at_once(self, engine):
        gen = ask(engine, max_tokens=10)
        await gen
        steps = engine.timeline.summary().steps
        done = await gen.branch(at=10)
        assert (done.token_ids, done.finish_reason) == (gen.token_ids, "length")
        done = await gen.branch(at=9, token=17)
        assert (done.token_ids, done.finish_reason) == ((*gen.token_ids[:9], 17), "length")
        assert engine.timeline.summary().steps == steps, "without a step"
        with pytest.raises(InvalidRequestError, match="max_tokens=10"):
            gen.branch(at=10, token=17)
        assert len((await gen.branch(at=10, token=17, max_tokens=13)).token_ids) == 13

    async def test_branch_and_continue_make_one(self, engine):
        gen = ask(engine, n=2, max_tokens=4)[1]
        await gen
        assert (gen.branch(at=3).params.n, gen.continue_().params.n) == (1, 1)
        for make in (lambda: gen.branch(at=3, n=3), lambda: gen.continue_(n=3)):
            with pytest.raises(InvalidRequestError, match="n=3"):
                make()

    async def test_branch_of_a_running_generation(self, engine):
        gen = ask(engine, max_tokens=60)
        async for token in gen:
            if token.index == 9:
                branch = gen.branch(at=5)
                break
        assert (await branch).token_ids[:60] == (await gen).token_ids

    async def test_continue_goes_on(self, engine):
        long = await ask(engine, max_tokens=30)
        gen = ask(engine, max_tokens=10)
        await gen
        assert (await gen.continue_(20)).token_ids == long.token_ids

    async def test_continue_goes_on_for_what_was_asked_for_last(self, engine):
        gen, lengths = ask(engine, max_tokens=10), []
        for _ in range(4):
            lengths.append(len((await gen).token_ids))
            gen = gen.continue_()
        assert lengths == [10, 20, 30, 40]
        await gen
        assert len((await (await _ended(gen.continue_(3))).continue_()).token_ids) == 56

    async def test_steering_from_another_thread(self, engine):
        gens = []

        def steer():
            gens.append(ask(engine, max_tokens=500))
            gens.append(ask(engine, max_tokens=5))
            gens[0].pause()
            gens[0].resume()
            gens[0].cancel()

        thread = threading.Thread(target=steer)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert (await gens[0]).finish_reason == "cancelled"
        assert (await gens[1]).finish_reason == "length"


async def test_loading_is_off_the_loop_and_its_progress_on_it(monkeypatch):
    """The loader waits for a turn of the loop, which a load on the loop could never give it."""
    turned, here, drawn = threading.Event(), threading.get_ident(), []
    real = assembly.load_model

    def waits(*args, **options):
        assert threading.get_ident() != here
        assert turned.wait(20), "the loop had no turn while a model was loaded"
        return real(*args, **options)

    monkeypatch.setattr(assembly, "load_model", waits)
    monkeypatch.setattr(
        ProgressBar, "update", lambda bar, stage, done: drawn.append((threading.get_ident(), stage, done))
    )
    loading = asyncio.ensure_future(Engine.load(tiny_model("llama"), kv_cache_tokens=256, freeze_gc=False))
    await asyncio.sleep(0.01)
    turned.set()
    engine = await loading
    await asyncio.sleep(0)
    assert {thread for thread, _, _ in drawn} == {here}
    assert drawn[-1][1:] == ("checking", 1.0)
    await engine.close()


class TestReferences:
    async def test_unread_and_unreferenced_is_cancelled(self, engine):
        gen = ask(engine, max_tokens=900)
        output = gen._output
        del gen
        gc.collect()
        await settled(engine)
        assert output.finish_reason == "cancelled"

    async def test_idle_engine_that_nothing_refers_to_is_closed(self):
        gc.collect()
        gc.disable()
        try:
            engine = await load()
            gen = ask(engine)
            await gen
            await settled(engine)
            await asyncio.sleep(0.05)
            parts, alive = engine._parts, weakref.ref(engine)
            del engine
            await asyncio.sleep(0)
            assert alive() is None, "no reference cycle, and the finished generation does not hold it"
            assert not parts.device._thread.is_alive()
            with pytest.raises(EngineClosedError):
                gen.branch(at=3)
        finally:
            gc.enable()

    async def test_loading_three_times_does_not_keep_three(self):
        engines = []
        for _ in range(3):
            engine = await load()
            await ask(engine, max_tokens=3)
            await settled(engine)
            await asyncio.sleep(0.05)
            engines.append(weakref.ref(engine))
        await asyncio.sleep(0)
        assert [e() is not None for e in engines] == [False, False, True]
        await engine.close()

    async def test_paused_and_unreferenced_is_cancelled(self, engine):
        gen = ask(engine, max_tokens=900)
        async for _ in gen:
            break
        gen.pause()
        output = gen._output
        del gen
        await settled(engine)
        gc.collect()
        await asyncio.sleep(0.05)
        assert output.finish_reason == "cancelled"

    async def test_displayed_paused_and_unreferenced_is_cancelled_and_its_view_is_told(self):
        engine = await load()
        seen = []

        def displayed(engine):
            gen = ask(engine, max_tokens=900)
            engine._steps.hold(gen)
            gen._output.listeners.append(lambda: seen.append(gen.finish_reason))
            return gen

        gen = displayed(engine)
        while len(gen.token_ids) < 3:
            await asyncio.sleep(0.001)
        gen.pause()
        await settled(engine)
        alive = weakref.ref(gen), weakref.ref(engine)
        del gen
        gc.collect()
        await asyncio.sleep(0.05)
        assert seen[-1] == "cancelled"
        engine._parts.cache.check(held=[])
        del engine
        gc.collect()
        await asyncio.sleep(0.05)
        gc.collect()
        assert [reference() for reference in alive] == [None, None]

    async def test_paused_read_and_resumed_is_held_again(self, engine):
        gen = ask(engine, max_tokens=60)
        async for _ in gen:
            break
        gen.pause()
        gen.resume()
        output = gen._output
        del gen
        gc.collect()
        await settled(engine)
        assert output.finish_reason == "length"

    async def test_an_unfinished_generation_keeps_its_engine(self):
        gen = ask(await load(), max_tokens=100)
        await asyncio.sleep(0)
        gc.collect()
        assert len((await gen).token_ids) == 100


class TestLoops:
    def test_a_second_loop_after_the_first(self):
        engine = asyncio.run(load())

        async def use():
            return (await ask(engine)).token_ids

        assert asyncio.run(use()) == asyncio.run(use())
        assert engine.close_sync() > 0

    def test_another_loop_while_generations_are_unfinished_is_an_error(self):
        async def main():
            async with await load() as engine:
                gen = ask(engine, max_tokens=900)
                errors = []

                def elsewhere():
                    async def use():
                        await gen

                    try:
                        asyncio.run(use())
                    except WrongLoopError as error:
                        errors.append(error)

                async for _ in gen:
                    break
                await asyncio.to_thread(elsewhere)
                assert len(errors) == 1
                assert gen.finish_reason is None, "the running generation is not touched"
                gen.cancel()

        asyncio.run(main())

    def test_uvloop(self):
        uvloop = pytest.importorskip("uvloop")

        async def main():
            async with await load() as engine:
                return (await ask(engine)).finish_reason

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(main()) == "length"

    def test_script_without_a_loop(self):
        with Engine.load_sync(
            tiny_model("llama"), kv_cache_tokens=256, page_size=4, progress=False, freeze_gc=False
        ) as engine:
            assert len(engine.generate_sync(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5

    async def test_generate_sync_on_a_running_loop_moves_others_on(self, engine):
        other = ask(engine, [1, 2, 3], max_tokens=60)
        await asyncio.sleep(0)
        done = engine.generate_sync(PROMPT, max_tokens=30, ignore_eos=True, temperature=0)
        assert len(done.token_ids) == 30
        assert len(other.token_ids) >= 25
        assert done.token_ids == (await ask(engine, max_tokens=30)).token_ids
        assert (await other).finish_reason == "length"

    async def test_the_loop_turns_while_the_device_works(self, engine):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        await ask(engine, max_tokens=100)
        ticking.cancel()
        assert ticks > 100

    @pytest.mark.parametrize("waiting", ["spin", "block"])
    async def test_other_ways_of_waiting(self, waiting):
        async with await load(waiting=waiting, steps_in_flight=1) as engine:
            assert len((await ask(engine)).token_ids) == 20

    def test_interrupting_generate_sync_at_random_moments_loses_no_page(self):
        with Engine.load_sync(
            tiny_model("llama"), kv_cache_tokens=256, page_size=4, progress=False, freeze_gc=False
        ) as engine:
            interrupted = 0
            for attempt in range(300):
                timer = threading.Timer((attempt % 50) * 0.0002, os.kill, (os.getpid(), signal.SIGINT))
                try:
                    timer.start()
                    engine.generate_sync(PROMPT, max_tokens=200, ignore_eos=True)
                    timer.join()
                except KeyboardInterrupt:
                    interrupted += 1
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                while (flight := engine._parts.flights.oldest) is not None:
                    flight.completion.wait()
                    engine._steps.settle(flight)
                engine._parts.cache.check(held=[])
            assert interrupted > 200
            assert len(engine.generate_sync(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5

    def test_leaving_the_process_with_steps_in_flight(self):
        script = (
            "import asyncio\n"
            "from interactive_infer import Engine\n"
            "from tests.tiny_models import tiny_model\n"
            "async def main():\n"
            "    engine = await Engine.load(tiny_model('llama'), kv_cache_tokens=4096, progress=False)\n"
            "    async for _ in engine.generate([1, 2, 3], max_tokens=4000, ignore_eos=True):\n"
            "        raise SystemExit(7)\n"
            "asyncio.run(main())\n"
        )
        root = Path(__file__).parents[1]
        ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 7, ended.stderr


class TestOtherHands:
    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    async def test_engine_and_generation_cannot_be_duplicated(self, engine, duplicate):
        gen = ask(engine, max_tokens=30)
        for what in (engine, gen):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                duplicate(what)
        assert (await gen).finish_reason == "length"
        assert (await ask(engine)).finish_reason == "length"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
    async def test_a_forked_child_is_told_that_the_engine_is_not_its_own(self, engine):
        unfinished = ask(engine, max_tokens=200)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in (lambda: ask(engine), unfinished.result_sync, engine.info):
                try:
                    call()
                except EngineClosedError as error:
                    told.append(f"belongs to process {os.getppid()}" in str(error))
            os.write(write, repr(told).encode())
            os._exit(0)
        os.close(write)
        assert await asyncio.to_thread(os.read, read, 100) == b"[True, True, True]"
        os.close(read)
        os.waitpid(child, 0)
        assert (await unfinished).finish_reason == "length"


class TestFailures:
    async def test_a_failing_forward_reaches_every_reader_and_nobody_else(self, engine):
        fail = True

        def hook(module, args):
            if fail:
                raise ValueError("planted")

        first = await ask(engine, max_tokens=3)
        handle = engine.model.register_forward_pre_hook(hook)
        gen = ask(engine)
        results = await asyncio.gather(gen, gen.future(), return_exceptions=True)
        handle.remove()
        assert [type(result) for result in results] == [DeviceError, DeviceError]
        assert gen.finish_reason == "error"
        with pytest.raises(DeviceError, match="planted"):
            async for _ in gen:
                pass
        assert (await ask(engine, max_tokens=3)).token_ids == first.token_ids

    async def test_each_reader_of_a_failure_gets_an_exception_of_its_own(self, engine):
        def hook(module, args):
            raise ValueError("planted")

        with engine.model.register_forward_pre_hook(hook):
            gens = [ask(engine), ask(engine)]
            errors = await asyncio.gather(*(gen._finished() for gen in gens * 2), return_exceptions=True)
        assert len({id(error) for error in (*errors, gens[0].error, gens[1].error)}) == 6
        assert all(isinstance(error.__cause__, ValueError) for error in errors)
        assert gens[0].error.__traceback__ is None, "no reader's frame is kept alive by the generation"

    async def test_reentrant_use_raises(self, engine):
        gen = ask(engine)
        caught = []

        def listener():
            try:
                engine.generate_sync(PROMPT, max_tokens=2)
            except ReentrantStepError as error:
                caught.append(error)

        gen._output.listeners.append(listener)
        await gen
        assert caught

    async def test_a_whole_generation_inside_a_forward_hook_raises(self, engine):
        caught = []

        def hook(module, args):
            if not caught:
                try:
                    engine.generate_sync(PROMPT, max_tokens=2)
                except ReentrantStepError as error:
                    caught.append(error)

        handle = engine.model.register_forward_pre_hook(hook)
        assert (await ask(engine)).finish_reason == "length"
        handle.remove()
        assert caught

    async def test_nan_pages_of_a_cancelled_text_harm_nobody(self, engine):
        poison, inside, gate = 77, threading.Event(), threading.Event()

        def hook(module, args, output):
            inside.set()
            gate.wait(10)
            return output.masked_fill((args[0] == poison)[..., None], float("nan"))

        handle = engine.model.get_input_embeddings().register_forward_hook(hook)
        bad = ask(engine, [1, poison, 3])
        while not inside.is_set():
            await asyncio.sleep(0.001)
        bad.cancel()
        gate.set()
        assert (await bad).finish_reason == "cancelled"
        handle.remove()
        sampling = {"logit_bias": {poison: -100}, "max_tokens": 3}
        # As many as have every page of the cache in turn.
        for first in range(2, 2 + engine.info().kv_cache_tokens // engine.info().page_size):
            assert (await ask(engine, [first % 60 + 2, 5, 9], **sampling)).finish_reason == "length"

    async def test_nan_logits_fail_that_text_alone(self, engine):
        poison = 77
        embedding = engine.model.get_input_embeddings()

        def hook(module, args, output):
            return output.masked_fill((args[0] == poison)[..., None], float("nan"))

        handle = embedding.register_forward_hook(hook)
        bad, good = ask(engine, [1, poison, 3]), ask(engine, [1, 2, 3], logit_bias={poison: -100})
        with pytest.raises(DeviceError, match="not numbers"):
            await bad
        assert (await good).finish_reason == "length"
        again = await ask(engine, [1, 2, 3, 4, 5, 6, 7, 8], logit_bias={poison: -100})
        assert again.finish_reason == "length"
        handle.remove()


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "sampling", "argument"),
        [
            ([], {}, "prompt"),
            ([[]], {}, "prompt"),
            (None, {}, "prompt"),
            ([1.5], {}, "prompt"),
            ([-1], {}, "prompt"),
            ([10**6], {}, "prompt"),
            ({"role": "user"}, {}, "prompt"),
            ({5, 6}, {}, "prompt"),
            (np.array(5), {}, "prompt"),
            (PROMPT, {"n": 10**6}, "n"),
            (PROMPT, {"temperature": float("nan")}, "temperature"),
            (PROMPT, {"temperature": -1}, "temperature"),
            (PROMPT, {"top_p": 0}, "top_p"),
            (PROMPT, {"max_tokens": 0}, "max_tokens"),
            (PROMPT, {"temprature": 1}, "temprature"),
            (PROMPT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
            (PROMPT, {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ],
    )
    async def test_answered_at_the_call(self, engine, prompt, sampling, argument):
        running = ask(engine)
        with pytest.raises(InvalidRequestError, match=argument) as caught:
            engine.generate(prompt, **sampling)
        assert caught.value.argument == argument
        assert (await running).finish_reason == "length"

    @pytest.mark.parametrize("bad", [True, np.True_, 1.0, np.float64(1), "a", None, -1, 10**30, [1]])
    @pytest.mark.parametrize("at", [2, 20])
    async def test_what_is_no_token_id_is_named(self, engine, bad, at):
        for prompt in ([1] * at + [bad, 2, 3, bad], [PROMPT, [1] * at + [bad]]):
            with pytest.raises(InvalidRequestError, match="token id") as caught:
                engine.generate(prompt)
            assert caught.value.value is bad

    async def test_prompt_longer_than_the_cache(self):
        async with await load(kv_cache_tokens=64) as engine:
            with pytest.raises(PromptTooLongError, match="kv_cache_tokens"):
                engine.generate([1] * 64)

    async def test_text_without_tokenizer(self, engine):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            engine.generate("text")

    async def test_closed_engine(self):
        engine = await load()
        gen = ask(engine, max_tokens=500)
        assert await engine.close() > 0
        assert await engine.close() == 0
        assert gen.finish_reason == "cancelled"
        assert (await gen).finish_reason == "cancelled"
        with pytest.raises(EngineClosedError):
            engine.generate(PROMPT)

    async def test_an_interrupted_close_is_carried_out_and_the_next_waits_for_it(self):
        engine = await load()
        hook = engine.model.register_forward_hook(lambda *_: time.sleep(0.1))
        gen = ask(engine)
        future = gen.future()
        while not len(engine._parts.flights):
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not engine.closed
        with pytest.raises(EngineClosedError):
            ask(engine)
        assert (await future).finish_reason == "cancelled"
        freed = await asyncio.gather(engine.close(), engine.close())
        assert engine.closed and not engine._parts.device._thread.is_alive()
        assert 0 in freed, "one of the three calls has the bytes"
        hook.remove()

    async def test_close_on_a_thread_beside_close_on_the_loop(self):
        engine = await load()
        gens = [ask(engine, max_tokens=500) for _ in range(3)]
        await asyncio.sleep(0.01)
        freed = await asyncio.gather(engine.close(), asyncio.to_thread(engine.close_sync), engine.close())
        assert sum(size > 0 for size in freed) == 1
        assert {gen.finish_reason for gen in gens} == {"cancelled"}

    @pytest.mark.parametrize(
        "options",
        [
            {"page_size": 0},
            {"page_size": 10**9},
            {"kv_cache_tokens": -5},
            {"max_batch_size": 10**9},
            {"steps_in_flight": 0},
            {"waiting": "never"},
            {"max_step_tokens": True},
        ],
    )
    async def test_options(self, options):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            await load(**options)

    async def test_branch_beyond_the_text(self, engine):
        gen = ask(engine)
        await gen
        with pytest.raises(InvalidRequestError, match="at="):
            gen.branch(at=21)
        with pytest.raises(InvalidRequestError, match="token="):
            gen.branch(at=2, token=10**6)


class TestText:
    @pytest.fixture
    async def engine(self):
        model = tiny_model("llama")
        tokenizer = tiny_tokenizer()
        async with await Engine.load(
            model, tokenizer=tokenizer, kv_cache_tokens=8192, progress=False, freeze_gc=False
        ) as engine:
            yield engine

    @pytest.fixture
    def all_texts_are_long(self, monkeypatch):
        monkeypatch.setattr("interactive_infer.prompts.SHORT_TEXT", 10)
        monkeypatch.setattr("interactive_infer.engine.SHORT_TEXT", 10)

    async def test_token_texts_joined_are_the_text(self, engine):
        done = await ask(engine, "hello")
        assert "".join(token.text for token in done.tokens) == done.text

    async def test_long_text_is_tokenized_elsewhere_and_its_error_comes_at_the_reader(self, engine):
        gen = engine.generate("word " * 20_000, max_tokens=3)
        with pytest.raises(PromptTooLongError):
            await gen
        with pytest.raises(PromptTooLongError):
            async for _ in gen:
                pass

    async def test_stop_string_is_never_shown(self, engine):
        whole = await ask(engine, "hello", max_tokens=40)
        middle = whole.text[len(whole.text) // 2 :][:3]
        shown = []
        gen = ask(engine, "hello", max_tokens=40, stop=middle)
        async for _ in gen:
            shown.append(gen.text)
        assert gen.text == whole.text[: whole.text.index(middle)]
        assert gen.finish_reason == "stop"
        assert all(gen.text.startswith(text) for text in shown)

    @pytest.mark.parametrize("held", [1, 2, 3])
    async def test_text_that_only_begins_a_stop_string_is_kept(self, engine, held):
        whole = await ask(engine, "hello", max_tokens=20)
        seen = []
        gen = ask(engine, "hello", max_tokens=20, stop=whole.text[-held:] + "\x00")
        async for token in gen:
            seen.append(token.text)
        assert "".join(seen) == gen.text == whole.text
        assert gen.finish_reason == "length"

    @pytest.mark.parametrize("steered", ["pause", "cancel", "update", "close"])
    async def test_a_long_prompt_is_steered_before_it_is_tokenized(
        self, engine, all_texts_are_long, monkeypatch, steered
    ):
        gate, tokenize = threading.Event(), engine._prompts.tokenize
        monkeypatch.setattr(engine._prompts, "tokenize", lambda texts: (gate.wait(), tokenize(texts))[1])
        gen = ask(engine, "hello there, " * 5, max_tokens=50)
        if steered == "pause":
            gen.pause()
            assert gen.state == "paused"
            gate.set()
            while gen._sequence is None:
                await asyncio.sleep(0.001)
            await settled(engine)
            assert (gen.state, gen.token_ids) == ("paused", ())
            gen.resume()
            assert len((await gen).token_ids) == 50
        elif steered == "update":
            gen.update(max_tokens=7)
            gate.set()
            assert len((await gen).token_ids) == 7
        else:
            gen.cancel() if steered == "cancel" else await engine.close()
            assert gen.finish_reason == "cancelled"
            gate.set()
            assert (await gen).token_ids == ()

    async def test_cancel_between_tokenizing_and_queueing(self, engine, all_texts_are_long, monkeypatch):
        tokenized, gate, post = threading.Event(), threading.Event(), engine._steps.post

        def held_up(what):
            if threading.current_thread() is not threading.main_thread():
                tokenized.set()
                gate.wait()
            post(what)

        monkeypatch.setattr(engine._steps, "post", held_up)
        gen = ask(engine, "hello there, " * 5)
        await asyncio.to_thread(tokenized.wait)
        gen.cancel()
        gate.set()
        assert (await gen).finish_reason == "cancelled"
        monkeypatch.undo()
        assert len((await ask(engine, "hello")).token_ids) == 20
        engine._parts.cache.check(held=[])

    async def test_many_texts_are_tokenized_on_one_thread(self, engine, monkeypatch):
        tokenize, threads = engine._prompts.tokenize, []
        monkeypatch.setattr(
            engine._prompts,
            "tokenize",
            lambda *a, **k: (threads.append(threading.current_thread()), tokenize(*a, **k))[1],
        )
        group = engine.generate([f"number {i} " * 3 for i in range(100)], max_tokens=2, ignore_eos=True)
        assert [len(done.token_ids) for done in await group] == [2] * 100
        assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()

    async def test_stop_strings_can_be_given_while_it_runs(self, engine):
        whole = await ask(engine, "hello", max_tokens=40)
        tail = "".join(token.text for token in whole.tokens[12:])
        stop = tail[len(tail) // 2 :][:2]
        gen = ask(engine, "hello", max_tokens=40)
        async for token in gen:
            if token.index == 5:
                gen.update(stop=stop)
        assert gen.finish_reason == "stop"
        assert len(gen.token_ids) < 40
        assert whole.text.startswith(gen.text + stop)

    async def test_min_tokens_of_stop_strings_can_be_changed(self, engine):
        whole = await ask(engine, "hello", max_tokens=40)
        stop = whole.text[:1]
        assert len((await ask(engine, "hello", max_tokens=40, stop=stop)).token_ids) < 16
        gen = ask(engine, "hello", max_tokens=40, stop=stop)
        gen.update(min_tokens=16)
        assert len((await gen).token_ids) > 16
        assert gen.text.startswith(stop)

    async def test_text_that_a_former_stop_string_held_back_is_not_lost(self, engine):
        whole = await ask(engine, "hello", max_tokens=40)
        gen = ask(
            engine, "hello", max_tokens=40, stop=[text + "\x00" for text in set(whole.text)]
        )  # holds back each end
        seen = []
        async for token in gen:
            seen.append(token.text)
            if token.index == 10:
                gen.update(stop=[])
        assert "".join(seen) == gen.text == whole.text

    async def test_a_long_conversation_is_rendered_elsewhere(self, engine, all_texts_are_long):
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        short = engine.chat([{"role": "user", "content": "hello"}], max_tokens=2, ignore_eos=True)
        assert short.prompt == "hello"
        threads = []
        render = engine._prompts.render_chat
        engine._prompts.render_chat = lambda m: (threads.append(threading.current_thread()), render(m))[1]
        long = engine.chat([{"role": "user", "content": "hello there, " * 5}], n=2, max_tokens=2, ignore_eos=True)
        assert [len(done.token_ids) for done in await long] == [2, 2]
        assert long[0].prompt == "hello there, " * 5
        assert threads[0] is not threading.main_thread()
        refused = engine.chat([{"role": "user", "content": "hello " * 40_000}])
        with pytest.raises(PromptTooLongError, match="messages"):
            await refused

    async def test_empty_text(self, engine):
        with pytest.raises(InvalidRequestError, match="prompt"):
            engine.generate("")

    async def test_half_a_character(self, engine):
        with pytest.raises(InvalidRequestError, match="prompt"):
            engine.generate(["a", "\ud800"])
        gen = ask(engine, "hello")
        await gen
        with pytest.raises(InvalidRequestError, match="token"):
            gen.branch(at=1, token="\ud800")
        with pytest.raises(InvalidRequestError, match="max_tokens=0"):
            gen.continue_(0)

    async def test_numpy_integers_are_token_ids(self, engine):
        gen = engine.generate([np.int64(5), np.int64(6)], temperature=0, max_tokens=5, ignore_eos=True)
        await gen
        assert (await gen.branch(np.int64(2), token=np.int64(9))).token_ids[2] == 9

    async def test_chat_messages_are_checked(self, engine):
        with pytest.raises(InvalidRequestError, match="messages"):
            engine.chat([{"role": "user"}])

    async def test_owner_keeps_the_model(self):
        model = tiny_model("llama")
        model.model.layers[0].train()
        ids = torch.tensor([PROMPT])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        before = model.generate(ids, **options)
        implementation = model.config._attn_implementation
        engine = await Engine.load(model, kv_cache_tokens=256, progress=False, freeze_gc=False)
        assert engine.model is model
        gen = ask(engine, max_tokens=60)
        await asyncio.sleep(0)
        assert torch.equal(await asyncio.to_thread(lambda: model.generate(ids, **options)), before)
        await gen
        model(ids, labels=ids).loss.backward()
        assert model.get_input_embeddings().weight.grad is not None
        await engine.close()
        assert model.config._attn_implementation == implementation
        assert model.model.layers[0].mlp.training, "the owner's training mode is put back"
        assert not model.model.layers[1].training
        assert torch.equal(model.generate(ids, **options), before)


async def test_heartbeat_measures_lag(engine):
    gen = ask(engine, max_tokens=800)
    async for token in gen:
        if token.index == 5:
            time.sleep(0.2)  # a cell that blocks
        if token.index == 50:
            gen.cancel()
    assert engine.timeline.recorder.snapshot().lags["lag"].max() > 100e6
