"""`token_logprobs` against the model's own logits, and `Generation.score` against what the engine gave."""

from __future__ import annotations

import pytest
import torch

import interactive_infer.scoring as scoring
from interactive_infer import Engine
from interactive_infer.core.rope import fixed_rope
from interactive_infer.errors import EngineClosedError, InvalidRequestError
from interactive_infer.scoring import token_logprobs
from tests.tiny_models import TINY, VOCAB_SIZE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("name", TINY)
def test_it_is_the_models_own_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_SLICE", 4)  # several slices, the last one short
    model = tiny_model(name)
    ids = torch.randint(VOCAB_SIZE, (27,), generator=torch.Generator().manual_seed(1)).tolist()
    scored = token_logprobs(model, ids, 9, 3)
    with torch.no_grad(), fixed_rope():
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    assert len(scored) == 18
    for index, at in enumerate(scored):
        row, token = logprobs[8 + index], ids[9 + index]
        assert at.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert at.rank == int((row > row[token]).sum()) + 1
        values, tokens = row.topk(3)
        assert [token for token, _ in at.alternatives] == tokens.tolist()
        assert [value for _, value in at.alternatives] == pytest.approx(values.tolist(), abs=1e-4)


def test_logits_exist_for_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_SLICE", 5)
    model = tiny_model("llama")
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    token_logprobs(model, list(range(31)), 1, 0)
    assert max(rows) <= 5 and sum(rows) >= 30


async def test_a_generation_made_without_logprobs_gets_those_it_would_have_had() -> None:
    async with await Engine.load(tiny_model("qwen3"), tokenizer=tiny_tokenizer(), progress=False) as engine:
        asked = dict(max_tokens=12, temperature=0.9, seed=7)
        with_them = await engine.generate("a cat", logprobs=4, **asked)
        plain = engine.generate("a cat", **asked)
        await plain
        assert plain.tokens[0].logprob is None
        scored = await plain.score(k=4)
        assert [token.id for token in scored] == [token.id for token in with_them.tokens]
        for ours, theirs in zip(scored, with_them.tokens, strict=True):
            assert (ours.text, ours.index, ours.rank) == (theirs.text, theirs.index, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [a.id for a in ours.alternatives] == [a.id for a in theirs.alternatives]


async def test_it_can_be_asked_of_an_unfinished_text_and_of_one_without_tokens() -> None:
    async with await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False) as engine:
        generation = engine.generate("a cat", max_tokens=400, ignore_eos=True)
        assert await generation.score() == ()
        async for token in generation:
            if token.index == 3:
                break
        generation.pause()
        assert len(await generation.score(k=0)) >= 4
        generation.cancel()


def test_an_owner_who_trains_gets_no_dropout() -> None:
    model = tiny_model("gpt2")
    ids = list(range(5, 25))
    expected = token_logprobs(model, ids, 4, 2)
    model.train()
    assert token_logprobs(model, ids, 4, 2) == expected
    assert all(module.training for module in model.modules())


async def test_what_it_refuses() -> None:
    engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
    generation = engine.generate("a cat", max_tokens=2)
    await generation
    for k in (-1, 21, 1.5, True, "5"):
        with pytest.raises(InvalidRequestError, match="k="):
            await generation.score(k=k)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await generation.score()
