"""What a generation tells those who wait for it, and those who still steer it at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from interactive_infer import Engine, InvalidRequestError
from tests.tiny_models import tiny_model


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with await Engine.load(
        tiny_model("llama"), kv_cache_tokens=256, page_size=4, progress=False, freeze_gc=False
    ) as engine:
        yield engine


@pytest.mark.parametrize("end", ["length", "cancelled"])
async def test_steering_after_the_end_does_nothing(engine: Engine, end: str) -> None:
    group = engine.generate([[5, 9, 2], [7, 1]], max_tokens=4, temperature=0, ignore_eos=True)
    if end == "cancelled":
        group.cancel()
    done = await group
    params = [generation.params for generation in group]
    for generation in group:
        generation.pause()
        generation.resume()
        generation.cancel()
        assert generation.update(temperature=1.5) is False
    group.pause()
    group.resume()
    group.cancel()
    assert group.update(max_tokens=50) is False
    assert [generation.state for generation in group] == ["finished", "finished"]
    assert [generation.finish_reason for generation in group] == [end, end]
    assert [generation.params for generation in group] == params, "those that it ended with"
    assert [again.token_ids for again in await group] == [once.token_ids for once in done]
    with pytest.raises(InvalidRequestError, match="temprature"):
        group[0].update(temprature=1.5)


async def test_update_says_that_it_came_in_time(engine: Engine) -> None:
    group = engine.generate([[5, 9, 2], [7, 1]], max_tokens=4, temperature=0, ignore_eos=True)
    group[0].cancel()
    assert group[1].update(max_tokens=9) is True
    assert group.update(presence_penalty=0.5) is True, "one of the two is unfinished"
    assert [len(done.token_ids) for done in await group] == [0, 9]


async def test_who_awaits_the_completion_is_woken_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[asyncio.Future[None]] = []
    monkeypatch.setattr("interactive_infer.readers._set", woken.append)
    gen = engine.generate([5, 9, 2], max_tokens=9, temperature=0, ignore_eos=True)
    reading = gen.future()
    while gen.finish_reason is None:
        await asyncio.sleep(0.001)
    assert len(gen.token_ids) == 9
    (future,) = woken
    future.set_result(None)
    assert (await reading).token_ids == gen.token_ids
