"""From tokens to steps and back, and how long tokens took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Recorder, Timeline
from interactive_infer.timeline.tokens import between_tokens_ns, first_token_ns, tokens_of


def step(recorder: Recorder, number: int, drawn: dict[int, int], end: int) -> None:
    recorder.step(
        end - 5,
        end,
        step_id=number,
        batch_size=len(drawn),
        tokens=len(drawn),
        prefill_tokens=sum(index < 0 for index in drawn.values()),
        generations=list(drawn),
        drawn=list(drawn.values()),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[dict[int, int]]:
    """Steps of up to four generations: which are in each, and what each drew."""
    counts: dict[int, int] = {}
    steps = []
    for _ in range(draw(st.integers(0, 12))):
        chosen = draw(st.lists(st.integers(1, 4), unique=True, min_size=1, max_size=4))
        drawn = {}
        for generation in chosen:
            if draw(st.booleans()):
                drawn[generation] = counts[generation] = counts.get(generation, -1) + 1
            else:
                drawn[generation] = -1
        steps.append(drawn)
    return steps


@given(histories())
def test_every_token_leads_to_its_step_and_back(steps: list[dict[int, int]]) -> None:
    timeline = Timeline()
    for number, drawn in enumerate(steps, start=1):
        step(timeline.recorder, number, drawn, 10 * number)
    for number, drawn in enumerate(steps, start=1):
        found = timeline.step(number)
        assert found is not None
        assert found.drawn == {generation: None if at < 0 else at for generation, at in drawn.items()}
        for generation, index in drawn.items():
            if index >= 0:
                assert timeline.step_of(generation, index) == found
    tokens = tokens_of(timeline.recorder.snapshot())
    assert len(tokens.at) == sum(index >= 0 for drawn in steps for index in drawn.values())


@given(histories(), st.integers(0, 130), st.integers(0, 130))
def test_times_of_tokens_as_counted_one_by_one(steps: list[dict[int, int]], t0: int, t1: int) -> None:
    recorder = Recorder()
    for generation in range(1, 5):
        recorder.asked(-generation, generation)
    at: dict[tuple[int, int], int] = {}
    for number, drawn in enumerate(steps, start=1):
        step(recorder, number, drawn, 10 * number)
        recorder.record(Phase.COMMIT, 10 * number, 10 * number + number % 3, number)
        at |= {(generation, index): 10 * number + number % 3 for generation, index in drawn.items() if index >= 0}
    held, window = recorder.snapshot(), (min(t0, t1), max(t0, t1))
    seen = {key: moment for key, moment in at.items() if window[0] < moment <= window[1]}
    first = sorted(moment + generation for (generation, index), moment in seen.items() if index == 0)
    gaps = sorted(moment - at[g, index - 1] for (g, index), moment in seen.items() if index > 0)
    assert sorted(first_token_ns(held, window).tolist()) == first
    assert sorted(between_tokens_ns(held, window).tolist()) == gaps


def test_the_same_generations_share_an_entry() -> None:
    recorder = Recorder()
    for number in range(1, 1_000):
        step(recorder, number, {7: number + 3, 9: number + 90}, number)
    step(recorder, 1_000, {7: 1_003}, 1_000)
    batches = recorder.snapshot().batches
    assert len({id(batch) for batch in batches.tolist()}) == 2
    assert len(batches[0]) == 32


def test_what_is_unknown_or_gone_is_none() -> None:
    timeline = Timeline(Recorder(steps=2))
    for number in range(1, 5):
        step(timeline.recorder, number, {1: number - 1}, 10 * number)
    assert timeline.step_of(1, 0) is None and timeline.step(1) is None
    assert timeline.step_of(2, 3) is None
    newest = timeline.step_of(1, 3)
    assert newest is not None and newest.step_id == 4 and newest.kind == "decode"
    assert str(newest) == "step 4: decode of 1 token in 1 text, eager, 0.0 µs"
    assert newest.around(1e-8) == (newest.start_ns - 10, newest.end_ns + 10)
    for seconds in (float("nan"), float("inf"), "a", None, -1, 1e30, True):
        with pytest.raises(InvalidRequestError, match="seconds"):
            newest.around(seconds)  # type: ignore[arg-type]


def test_objects_with_numbers_are_understood_and_others_refused() -> None:
    class Generation:
        number = 1

    class Token:
        index = 0

    timeline = Timeline()
    step(timeline.recorder, 1, {1: 0}, 10)
    assert timeline.step_of(Generation(), Token()) == timeline.step_of(1, 0) is not None
    for generation, token, argument in (("a", 0, "generation"), (1, (1, 2), "token"), (1, "0", "token")):
        with pytest.raises(InvalidRequestError, match=argument):
            timeline.step_of(generation, token)


def test_steps_without_generations_have_no_tokens() -> None:
    recorder = Recorder()
    recorder.step(0, 5, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    held = recorder.snapshot()
    assert len(tokens_of(held).at) == 0 and held.batches.tolist() == [b""]
    assert Timeline(recorder).summary().between_tokens is None
    assert np.array_equal(first_token_ns(held, (0, 9)), [])
