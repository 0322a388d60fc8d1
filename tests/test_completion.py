"""A completion: made at the end for nothing, read later, kept as plain data."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import AsyncIterator

import pytest

from interactive_infer import Engine
from tests.tiny_models import tiny_model, tiny_tokenizer

ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with await Engine.load(
        tiny_model("llama"),
        tokenizer=tiny_tokenizer(),
        kv_cache_tokens=256,
        page_size=4,
        progress=False,
        freeze_gc=False,
    ) as engine:
        yield engine


async def test_text_and_tokens_are_made_when_they_are_read(engine: Engine) -> None:
    gen = engine.generate([5, 9, 2], **ASKED)
    done = await gen
    assert gen._tokens == []
    assert gen._output._pieces == []
    assert len(done.token_ids) == done.usage.completion_tokens == 12
    assert gen._output._pieces == []
    assert "".join(token.text for token in done.tokens) == done.text == gen.text
    assert [token.id for token in done.tokens] == list(done.token_ids)


async def test_an_unfinished_ones_stays_as_it_was(engine: Engine) -> None:
    gen = engine.generate([5, 9, 2], **ASKED | {"max_tokens": 100})
    async for token in gen:
        if token.index == 3:
            break
    so_far = gen.completion
    text, tokens = gen.text, gen.tokens
    done = await gen
    assert so_far.finish_reason is None
    assert (so_far.text, so_far.tokens) == (text, tokens)
    assert len(done.token_ids) == 100
    assert done.text.startswith(so_far.text)


@pytest.mark.parametrize("kept", [lambda done: pickle.loads(pickle.dumps(done)), copy.deepcopy], ids=["pickle", "copy"])
async def test_kept_it_needs_no_generation(engine: Engine, kept) -> None:
    gen = engine.generate([5, 9, 2], **ASKED, logprobs=2)
    done = await gen
    text, tokens, gone = gen.text, gen.tokens, weakref.ref(gen)
    again = kept(done)
    assert again == done
    assert hash(again) == hash(done)
    del gen, done
    gc.collect()
    assert gone() is None
    assert (again.text, again.tokens) == (text, tokens)
    assert len(again.tokens[3].alternatives) == 2


async def test_equal_are_the_same_tokens_that_ended_alike(engine: Engine) -> None:
    gen = engine.generate([5, 9, 2], **ASKED)
    done = await gen
    assert done == await gen
    other = await engine.generate([5, 9, 2], **ASKED | {"max_tokens": 11})
    assert done != other
    assert done != done.text
