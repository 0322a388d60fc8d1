"""What an engine tells its timeline, and what a generation knows of its time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import astuple

import numpy as np
import pytest

from interactive_infer import Engine
from interactive_infer.core.scheduler import Plan
from interactive_infer.core.step import StepResult
from interactive_infer.timeline import Phase
from interactive_infer.timeline.recorder import CPU
from interactive_infer.waiting import Completion
from tests.tiny_models import tiny_model


async def load(**options: object) -> Engine:
    return await Engine.load(tiny_model("llama"), progress=False, freeze_gc=False, page_size=4, **options)  # type: ignore[arg-type]


def ids(length: int, first: int = 2) -> list[int]:
    return [first + i % 20 for i in range(length)]


async def test_every_token_has_its_step_and_every_step_its_tokens() -> None:
    async with await load(max_batch_size=3, max_step_tokens=8) as engine:
        group = engine.generate([ids(17), ids(3, 5), ids(9, 7), ids(2, 9)], max_tokens=6, ignore_eos=True)
        await group
        branch = group[1].branch(at=3, max_tokens=6)
        await branch
        timeline = engine.timeline
        for generation in (*group, branch):
            for index in range(3 if generation is branch else 0, 6):
                step = timeline.step_of(generation, index)
                assert step is not None and step.drawn[generation.number] == index
                assert timeline.step(step.step_id) == step
        assert timeline.step_of(branch, 2) is None, "it was given, not drawn"
        chunked = [step for number in range(1, 40) if (step := timeline.step(number)) and group[0].number in step.drawn]
        assert [step.drawn[group[0].number] for step in chunked[:3]].count(None) >= 2, "17 tokens, 8 a step"
        summary = timeline.summary()
        assert summary.first_token is not None and summary.first_token.count == 5
        assert summary.between_tokens is not None and summary.between_tokens.count == 4 * 5 + 2


async def test_a_launch_left_to_a_thread_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await load() as engine:
        runner = engine._parts.runner
        usual, launched = runner.launch, []

        def launch(plan: Plan) -> Completion[StepResult]:
            completion = usual(plan)
            now = time.perf_counter_ns()
            completion.launched_ns = now, now + 1_000
            launched.append(completion.launched_ns)
            return completion

        monkeypatch.setattr(runner, "launch", launch)
        await engine.generate(ids(5), max_tokens=3, ignore_eos=True)
        recording = engine.timeline.recording()
    spans = recording.spans[recording.spans["phase"] == Phase.LAUNCH]
    for step_id in recording.steps["step_id"].tolist():
        of_step = spans[spans["ref"] == step_id][["start", "end"]].tolist()
        assert len(of_step) == 2 and of_step[1] in launched


async def test_timing_adds_up_and_knows_pauses() -> None:
    async with await load() as engine:
        generation = engine.generate(ids(5), max_tokens=400, ignore_eos=True)
        async for token in generation:
            if token.index == 3:
                break
        generation.pause()
        before = generation.timing
        await asyncio.sleep(0.03)
        meanwhile = generation.timing
        assert meanwhile.paused >= before.paused + 0.02 and meanwhile.decode == before.decode
        generation.resume()
        await generation
        timing = generation.timing
        assert timing.total is not None and timing.time_to_first_token is not None
        parts = astuple(timing)[:5]
        assert sum(parts) == pytest.approx(timing.total)
        assert timing.prefill > 0 and timing.decode > 0 and timing.preempted == 0
        assert timing.queue + timing.prefill <= timing.total
        early = engine.generate(ids(4), max_tokens=2)
        early.pause()
        early.cancel()
        await early
        assert early.timing.decode == 0


async def test_timing_knows_preemptions() -> None:
    async with await load(kv_cache_tokens=64) as engine:
        group = engine.generate([ids(8), ids(8, 9), ids(8, 17)], max_tokens=40, ignore_eos=True)
        await group
        assert any(generation._sequence.num_preemptions for generation in group)  # type: ignore[union-attr]
        for generation in group:
            timing = generation.timing
            assert (timing.preempted > 0) == (generation._sequence.num_preemptions > 0)  # type: ignore[union-attr]
            assert sum(astuple(timing)[:5]) == pytest.approx(timing.total)


async def test_loading_is_recorded_and_the_device_is_the_cpu() -> None:
    async with await load() as engine:
        await engine.generate(ids(4), max_tokens=3)
        held = engine.timeline.recording()
        loads = held.spans["phase"] == Phase.LOAD
        assert held.names[loads].tolist() == [engine.name]
        assert (held.steps["device"] == CPU).all() and held.clock_error_ns == 0
        assert set(np.unique(held.spans["phase"]).tolist()) >= {Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.AWAIT}
        assert list(engine.timeline.summary().devices) == [CPU]


async def test_a_profiled_window_has_the_engines_operators_in_its_steps() -> None:
    async with await load() as engine:
        generation = engine.generate(ids(4), max_tokens=400, ignore_eos=True)
        async with engine.timeline.profile(steps=10) as profile:
            while not profile.done:
                await asyncio.sleep(0.005)
        generation.cancel()
        await generation
        assert profile.num_kernels > 10 and profile.window is not None
        summary = engine.timeline.summary(window=profile.window)
        assert summary.profiled is not None and summary.steps >= 9
        assert summary.profiled.busy > 0
        figure = engine.timeline.figure(window=profile.window)
        assert "operators" in [label.get_text() for label in figure.axes[0].get_yticklabels()]


async def test_timing_adds_up_however_a_text_ends() -> None:
    async with await load(max_batch_size=2, steps_in_flight=2) as engine:
        first = engine.generate([ids(3), ids(4)], max_tokens=300, ignore_eos=True)
        queued = engine.generate(ids(5), max_tokens=300, ignore_eos=True)
        sync = engine.generate(ids(6), max_tokens=300, ignore_eos=True)
        async for token in first[0]:
            if token.index == 3:
                break
        for generation in (first[0], queued):
            generation.cancel()  # one in flight, one in the queue
        first[1].pause()
        await asyncio.sleep(0.02)
        first[1].cancel()  # one while it is paused
        engine.generate_sync(ids(7), max_tokens=3)
        sync.update(max_tokens=len(sync.token_ids) + 1)
        await sync
        branch = sync.branch(at=1, max_tokens=3)
        await asyncio.gather(*(generation.future() for generation in (*first, queued, branch)))
        for generation in (*first, queued, sync, branch):
            timing = generation.timing
            assert timing.total is not None and min(astuple(timing)[:5]) >= 0
            assert sum(astuple(timing)[:5]) == pytest.approx(timing.total)
        assert queued.timing.queue == queued.timing.total and queued.timing.decode == 0
        assert first[1].timing.paused > 0.015 and sync.timing.queue > 0 and branch.timing.prefill > 0
