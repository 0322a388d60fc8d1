"""The engine on a CUDA card: graphs, faults, memory, a loop that stays free. (Greedy parity: core/test_parity.py.)"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from interactive_infer import Engine, device_done
from interactive_infer.errors import InferError
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu


def model_on_card(name: str = "llama", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(name).to("cuda", dtype)


async def load(model=None, **options) -> Engine:
    options = {"kv_cache_tokens": 4096, "page_size": 16, "max_batch_size": 16, "max_step_tokens": 64} | options
    return await Engine.load(model or model_on_card(), progress=False, freeze_gc=False, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def settled(engine: Engine) -> None:
    while engine._parts.flights.oldest is not None:
        await asyncio.sleep(0.005)


async def test_steps_are_replayed_from_graphs_and_say_so():
    async with await load() as engine:
        assert "CUDA graph" in engine.info().launches
        await engine.generate(prompt(20), max_tokens=30, ignore_eos=True)
        steps = engine.timeline.recorder.snapshot().steps
        assert steps["graph"].all(), "no step was launched kernel by kernel"


async def test_a_replayed_step_lasts_as_long_as_the_card_says(monkeypatch):
    """From its first kernel on: an event before the launch is reached by an idle card at once."""
    from interactive_infer.core import cuda

    before: list[torch.cuda.Event] = []
    found: list[tuple[int, int]] = []
    usual_submit, usual_interval = cuda.CUDADevice.submit, cuda._interval

    def submit(self, work, **options):
        def noted():
            before.append(torch.cuda.Event(enable_timing=True))
            before[-1].record()
            return work()

        return usual_submit(self, noted, **options)

    def interval(clock, free, events, took):
        found.append((took(), round(before[len(found)].elapsed_time(events[1]) * 1e6)))
        return usual_interval(clock, free, events, took)

    async with await load(steps_in_flight=1) as engine:
        monkeypatch.setattr(cuda.CUDADevice, "submit", submit)
        monkeypatch.setattr(cuda, "_interval", interval)
        await engine.generate(prompt(20), max_tokens=30, ignore_eos=True)
        steps = engine.timeline.recorder.snapshot().steps[-30:]
        assert len(steps) == len(found) == 30
        for step, (took, plain) in zip(steps, found, strict=True):
            assert 0 < took < plain
            assert step["end"] - step["start"] == took
        assert sum(took for took, _ in found) < 0.95 * sum(plain for _, plain in found)


async def test_what_a_load_launches_was_compiled_and_loaded_ahead(monkeypatch):
    import transformers
    import triton

    from interactive_infer.core.graph_runner import GraphRunner

    asked: list[tuple[str, bool]] = []  # kernels that were not there yet, and whether in `compile_ahead`
    ahead = False
    usual = GraphRunner.compile_ahead

    def compile_ahead(self, check, begin):
        nonlocal ahead
        ahead = True
        usual(self, check, begin)
        ahead = False

    monkeypatch.setattr(GraphRunner, "compile_ahead", compile_ahead)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: asked.append((about["fn"].name, ahead)))
    loaded: list[tuple[str, bool]] = []
    hooks = triton.knobs.runtime.kernel_load_start_hook
    monkeypatch.setattr(hooks, "calls", [lambda _module, _function, name, *_: loaded.append((name, ahead))])
    config = tiny_model("qwen3").config
    config.vocab_size += 77  # sizes that no other test has: what has been compiled in this process is not asked for
    config.hidden_size, config.intermediate_size = 80, 208
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    async with await load(model) as engine:
        assert "CUDA graphs" in engine.info().launches
        assert engine.info().parity_error < 0.1
    names = {name.rpartition(".")[2] for name, _ in asked}
    assert {"_norm_kernel", "_scores_kernel", "_draw_kernel"} <= names
    assert [name for name, in_time in asked + loaded if not in_time] == []
    assert names <= {name for name, _ in loaded}


async def test_a_forward_hook_sees_every_step_and_only_real_tokens():
    model = model_on_card()
    async with await load(model) as engine:
        plain = await engine.generate(prompt(20), max_tokens=8, temperature=0, ignore_eos=True)
        seen: list[int] = []
        hook = model.model.layers[0].register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[1]))
        hooked = await engine.generate(prompt(20), max_tokens=8, temperature=0, ignore_eos=True)
        assert "hook" in engine.info().launches
        hook.remove()
        after = await engine.generate(prompt(20), max_tokens=8, temperature=0, ignore_eos=True)
        assert hooked.token_ids == plain.token_ids == after.token_ids
        assert len(seen) >= 8
        assert sum(seen) <= 20 + 8
        assert "hook" not in engine.info().launches


async def test_a_hook_at_load_is_captured_nowhere():
    """Not even one that waits for the card, which a capture cannot."""
    model = model_on_card()
    seen: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].cpu().shape[1]))
    params = dict(max_tokens=8, temperature=0, ignore_eos=True)
    async with await load(model) as engine:
        assert "hook" in engine.info().launches
        seen.clear()
        hooked = await engine.generate(prompt(20), **params)
        assert sum(seen) == 20 + 7, "no padding"
        hook.remove()
        seen.clear()
        for _ in range(100):  # its shapes are captured on a thread meanwhile
            assert (await engine.generate(prompt(20), **params)).token_ids == hooked.token_ids
            if engine.timeline.recorder.snapshot().steps["graph"].any():
                break
        else:
            pytest.fail(f"nothing was replayed: {engine.info().launches}")
        assert not seen
        assert "CUDA graph" in engine.info().launches


async def test_positions_that_the_engine_fixed_do_not_keep_a_model_from_its_graphs():
    async with await load(model_on_card("phi3_longrope")) as engine:
        assert "CUDA graph" in engine.info().launches
        await engine.generate(prompt(20), max_tokens=8, ignore_eos=True)
        assert engine.timeline.recorder.snapshot().steps["graph"].all()


async def test_steps_larger_than_any_usual_are_replayed_too():
    async with await load(max_step_tokens=5000, kv_cache_tokens=8192) as engine:
        asked = [engine.generate(prompt(500, i), max_tokens=2, temperature=0, ignore_eos=True) for i in range(10)]
        assert [len((await generation).token_ids) for generation in asked] == [2] * 10
        assert engine.timeline.recorder.snapshot().steps["graph"].all()


async def test_graphs_and_single_launches_write_the_same_text():
    model = model_on_card()
    texts = []
    for hooked in (False, True):
        hook = model.register_forward_hook(lambda *_: None) if hooked else None
        async with await load(model) as engine:
            done = await asyncio.gather(
                *(
                    engine.generate(prompt(5 + 9 * i, i), max_tokens=24, temperature=0, ignore_eos=True)
                    for i in range(6)
                )
            )
            texts.append([completion.token_ids for completion in done])
        if hook is not None:
            hook.remove()
    assert texts[0] == texts[1]


async def test_seeded_sampling_does_not_depend_on_company():
    async with await load() as engine:
        params = dict(max_tokens=20, temperature=1.0, top_p=0.9, top_k=40, seed=7, ignore_eos=True)
        alone = await engine.generate(prompt(12), **params)
        others = [engine.generate(prompt(9, i), max_tokens=30, seed=i, ignore_eos=True) for i in range(9)]
        again = await engine.generate(prompt(12), **params)
        assert again.token_ids == alone.token_ids
        for other in others:
            await other


async def test_logprobs_are_those_of_the_model():
    model = model_on_card()
    async with await load(model) as engine:
        ids = prompt(11)
        generation = engine.generate(ids, max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
        done = await generation
        with torch.no_grad():
            logits = model(torch.tensor([ids + list(done.token_ids)], device="cuda")).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        for token in generation.tokens:
            row = expected[len(ids) - 1 + token.index]
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            best = row.topk(3)
            assert [a.id for a in token.alternatives] == best.indices.tolist()


async def test_cancel_pause_and_update_at_random_moments_lose_no_page():
    rng = random.Random(3)
    async with await load(kv_cache_tokens=1024) as engine:
        cache = engine._parts.cache
        for _ in range(40):
            generations = [
                engine.generate(prompt(rng.randint(1, 90), i), max_tokens=rng.randint(1, 40), ignore_eos=True)
                for i in range(rng.randint(1, 12))
            ]
            for generation in generations:
                await asyncio.sleep(rng.random() * 0.004)
                action = rng.choice(["cancel", "pause", "update", "none"])
                if action == "cancel":
                    generation.cancel()
                elif action == "pause":
                    generation.pause()
                    await asyncio.sleep(0)
                    generation.resume()
                elif action == "update":
                    generation.update(temperature=0.5, top_p=0.8, repetition_penalty=1.1)
            for generation in generations:
                await generation
            await settled(engine)
            cache.check(held=[])
            assert cache.num_held == 0


async def test_capturing_beside_work_of_others():
    """Allocation, event queries, synchronization and kernels on other threads while graphs are captured.

    Their random numbers come from a generator of their own: torch binds the default one to a capture, whoever's.
    """
    stop, problems = threading.Event(), []

    def others() -> None:
        try:
            stream, generator = torch.cuda.Stream(), torch.Generator("cuda")
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    x = torch.randn(random.randint(1, 1 << 20), device="cuda", generator=generator)
                    event = torch.cuda.Event()
                    (x * 2).sum()
                    event.record()
                event.query()
                event.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=others) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            async with await load() as engine:
                a, b = await asyncio.gather(
                    engine.generate(prompt(40), max_tokens=20, temperature=0, ignore_eos=True),
                    engine.generate(prompt(40), max_tokens=20, temperature=0, ignore_eos=True),
                )
                assert a.token_ids == b.token_ids
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems


async def test_the_loop_ticks_while_the_card_works():
    """A coroutine gets many turns during one long step: the loop is not held until the card is done."""
    async with await load() as engine:
        stream, turns = engine._parts.device.stream, 0
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # about half a second of the card's time
        generation = engine.generate(prompt(8), max_tokens=2, ignore_eos=True)
        reader = asyncio.ensure_future(generation.future())
        while not reader.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 50


async def test_two_engines_on_one_card():
    async with await load() as one, await load() as two:
        a = [one.generate(prompt(10, i), max_tokens=20, temperature=0, ignore_eos=True) for i in range(4)]
        b = [two.generate(prompt(10, i), max_tokens=20, temperature=0, ignore_eos=True) for i in range(4)]
        for first, second in zip(a, b, strict=True):
            assert (await first).token_ids == (await second).token_ids


async def test_close_gives_the_memory_back():
    async with await load():  # what libraries keep for good is there after this
        pass
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    model = model_on_card()
    engine = await load(model, kv_cache_tokens=1 << 20)
    await engine.generate(prompt(30), max_tokens=10, ignore_eos=True)
    during = torch.cuda.mem_get_info()[0]
    pools = engine.info().kv_cache_bytes
    assert before - during >= pools > 50 << 20
    freed = await engine.close()
    assert freed >= pools
    del model
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < 32 << 20


async def test_memory_comes_back_although_a_traceback_is_held():
    async with await load():
        pass
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    held = None
    try:
        engine = await load(kv_cache_tokens=1 << 20)
        generation = engine.generate(prompt(30), max_tokens=1000, ignore_eos=True)
        task = asyncio.ensure_future(generation.future())
        await asyncio.sleep(0.02)
        raise RuntimeError("an interrupted cell")
    except RuntimeError as error:
        held = error
    await engine.close()
    del engine, generation, task
    assert held.__traceback__ is not None
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20


async def test_too_large_a_cache_is_answered_with_numbers():
    async with await load() as alive:
        with pytest.raises(InferError, match="kv_cache_tokens") as caught:
            await load(kv_cache_tokens=1 << 36)
        assert "GiB" in str(caught.value)
        assert alive.name in str(caught.value) or "other engine" in str(caught.value)
        done = await alive.generate(prompt(8), max_tokens=4, ignore_eos=True)
        assert len(done.token_ids) == 4


async def test_device_done_is_not_behind_the_engine():
    async with await load() as engine:
        generation = engine.generate(prompt(8), max_tokens=400, ignore_eos=True)
        for _ in range(10):
            x = torch.randn(1000, device="cuda")
            await device_done(x)
        assert generation.state in ("running", "waiting")
        generation.cancel()
        await generation


def test_a_device_side_assert_ends_every_generation():
    """In a process of its own, whose CUDA context is lost."""
    script = textwrap.dedent(
        """
        import asyncio, os, time, torch
        from interactive_infer import Engine, DeviceError
        from tests.tiny_models import tiny_model

        async def main():
            model = tiny_model("llama").cuda()
            engine = await Engine.load(model, progress=False, kv_cache_tokens=4096, max_batch_size=4)
            generations = [engine.generate([5, 6, 7], max_tokens=3000, ignore_eos=True) for _ in range(10)]
            async for token in generations[0]:
                if token.index == 5:
                    break
            torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]
            start = time.perf_counter()
            async with asyncio.timeout(20):
                ended = await asyncio.gather(*(g.future() for g in generations), return_exceptions=True)
            print("seconds", time.perf_counter() - start)
            assert all(isinstance(e, DeviceError) for e in ended), ended
            assert all("restart the kernel" in str(e) for e in ended), str(ended[0])
            print("ALL ENDED")
            async with asyncio.timeout(20):
                await engine.close()
            assert engine.closed
            print("CLOSED", flush=True)
            os._exit(0)  # torch's own teardown of a lost context is not what is tested

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert "ALL ENDED" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "CLOSED" in done.stdout, done.stdout + done.stderr[-3000:]


async def test_interrupted_reader_leaves_the_others_running():
    async with await load() as engine:
        one, two = (engine.generate(prompt(8, i), max_tokens=200, ignore_eos=True) for i in range(2))
        task = asyncio.ensure_future(two.future())

        async def read():
            await one

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert one.finish_reason == "cancelled"
        assert len((await task).token_ids) == 200


@pytest.mark.timeout(60)
def test_sync_driver_on_the_card():
    engine = Engine.load_sync(model_on_card(), progress=False, kv_cache_tokens=4096, max_batch_size=4)
    with engine:
        done = engine.generate_sync(prompt(8), max_tokens=50, ignore_eos=True)
        assert len(done.token_ids) == 50


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
async def test_experts_are_captured_and_the_owners_way_comes_back(implementation):
    model = tiny_model("qwen3_moe").to("cuda", torch.bfloat16)
    model.config._experts_implementation = implementation
    async with await load(model) as engine:
        assert "CUDA graph" in engine.info().launches, engine.info().launches
        assert len((await engine.generate(prompt(20), max_tokens=8, ignore_eos=True)).token_ids) == 8
    assert model.config._experts_implementation == implementation


async def test_a_model_that_cannot_be_captured_runs_and_says_why():
    model = model_on_card()
    mlp = model.model.layers[0].mlp

    class AsksTheCard(torch.nn.Module):
        def forward(self, x):
            assert float(x.sum()) == float(x.sum())  # waits for the card, which a capture cannot
            return mlp(x)

    model.model.layers[0].mlp = AsksTheCard()
    with pytest.warns(UserWarning, match="cannot be captured.*slower"):
        engine = await load(model)
    async with engine:
        assert "cannot be captured" in engine.info().launches
        done = await engine.generate(prompt(20), max_tokens=8, temperature=0, ignore_eos=True)
    model.model.layers[0].mlp = mlp
    async with await load(model) as engine:
        assert "CUDA graph" in engine.info().launches
        again = await engine.generate(prompt(20), max_tokens=8, temperature=0, ignore_eos=True)
    assert done.token_ids == again.token_ids


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
async def test_bfloat16_logits_are_close_to_the_models_own(name):
    """Mean relative error of packed, paged logits: what bfloat16's rounding makes of a few layers, and no more."""
    async with await load(tiny_model(name).to("cuda", torch.bfloat16)) as engine:
        assert engine.info().parity_error < 0.03


async def test_a_card_without_kernels_gathers_pages_and_says_what_is_lost(monkeypatch):
    from interactive_infer.core import cuda

    model = model_on_card()
    async with await load(model) as engine:
        expected = [(await engine.generate(prompt(20), max_tokens=12, temperature=0, ignore_eos=True)).token_ids]
    monkeypatch.setattr(cuda, "missing_for_kernels", lambda _: "no Triton in this test")
    with pytest.warns(UserWarning, match="no Triton in this test.*slower"):
        engine = await load(model)
    async with engine:
        assert "gathered" in engine.info().attention
        done = await engine.generate(prompt(20), max_tokens=12, temperature=0, ignore_eos=True)
        assert [done.token_ids] == expected


@pytest.mark.parametrize("waiting", ["thread", "spin", "block"])
async def test_every_way_of_waiting_writes_the_same(waiting):
    async with await load(waiting=waiting, steps_in_flight=1 if waiting == "block" else 2) as engine:
        asked = [engine.generate(prompt(9, i), max_tokens=20, temperature=0, ignore_eos=True) for i in range(4)]
        texts = [(await generation).token_ids for generation in asked]
    async with await load() as engine:
        again = [engine.generate(prompt(9, i), max_tokens=20, temperature=0, ignore_eos=True) for i in range(4)]
        assert [(await generation).token_ids for generation in again] == texts


async def test_two_engines_on_two_cards_from_one_loop():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    models = [tiny_model("llama").to(f"cuda:{index}") for index in range(2)]
    async with await load(models[0]) as one, await load(models[1]) as two:
        assert [one.info().device, two.info().device] == ["cuda:0", "cuda:1"]
        asked = [
            engine.generate(prompt(10, i), max_tokens=100, temperature=0, ignore_eos=True)
            for i in range(4)
            for engine in (one, two)
        ]
        texts = [(await generation).token_ids for generation in asked]
        assert texts[0::2] == texts[1::2]
        steps = [engine.timeline.recorder.snapshot().steps for engine in (one, two)]
        # Each card's work overlaps the other's: the loop feeds both.
        together = min(s["end"].max() for s in steps) - max(s["start"].min() for s in steps)
        assert together > 0
