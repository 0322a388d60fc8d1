"""Probabilities of tokens that are there already, by one forward pass over the text apart from the engine's steps."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from interactive_infer.completion import Alternative, Token
from interactive_infer.core.output import TokenLogprobs
from interactive_infer.core.own_forward import evaluating
from interactive_infer.core.rope import fixed_rope
from interactive_infer.errors import InvalidRequestError
from interactive_infer.prompts import whole_number
from interactive_infer.sampling import MAX_LOGPROBS
from interactive_infer.waiting import run_on_device

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

_SLICE = 64
"""Positions whose logits exist at once: 64 x 151,936 floats are 39 MB."""


async def score(generation: Generation, k: int) -> tuple[Token, ...]:
    """`Generation.score`."""
    number = whole_number(k)
    if number is None or not 0 <= number <= MAX_LOGPROBS:
        raise InvalidRequestError("k", k, f"must be a whole number, 0 to {MAX_LOGPROBS}")
    engine = generation._live_engine()
    count, prompt = generation._output.decode(), generation._prompt_ids
    if not count or prompt is None:
        return ()
    ids = [*prompt, *generation._output.token_ids[:count]]
    work = _Work(generation, engine.model, ids, len(prompt), min(number, engine.vocab_size))
    return await run_on_device(work, device=engine.model.device)


class _Work:
    """What the worker thread does: the pass, and the tokens' texts too, which take long for a long text."""

    def __init__(self, generation: Generation, model: PreTrainedModel, ids: list[int], first: int, k: int) -> None:
        self._generation, self._model, self._ids, self._first, self._k = generation, model, ids, first, k

    def __call__(self) -> tuple[Token, ...]:
        texts: dict[int, str] = {}

        def text_of(token_id: int) -> str:
            if token_id not in texts:
                texts[token_id] = self._generation._text_of(token_id)
            return texts[token_id]

        tokens = []
        for index, scored in enumerate(token_logprobs(self._model, self._ids, self._first, self._k)):
            likely = tuple(Alternative(id, text_of(id), logprob) for id, logprob in scored.alternatives)
            text = self._generation._output.piece(index)
            tokens.append(Token(self._ids[self._first + index], text, index, scored.logprob, scored.rank, likely))
            if index % _SLICE == 0:
                time.sleep(0)  # a turn for the loop's thread
        return tuple(tokens)


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, ids: Sequence[int], first: int, k: int) -> list[TokenLogprobs]:
    """Of `ids[first:]`, each given all before it; `first` is at least 1. The `k` most likely tokens with each.

    From the model's own distribution, as `logprobs_mode="raw_logprobs"`. The model runs as its owner would run it in
    eval mode, once over all of `ids` and without a cache, so nothing of it comes from a reused page; the vocabulary's
    logits are computed for 64 positions at a time.
    """
    text = torch.tensor(ids, device=model.device)
    scored: list[TokenLogprobs] = []
    with fixed_rope(), evaluating(model):
        logits_of = _logits(model, text[None, :-1])
        for start in range(first - 1, len(ids) - 1, _SLICE):
            stop = min(start + _SLICE, len(ids) - 1)
            logprobs = logits_of(start, stop).float().log_softmax(-1)
            chosen = logprobs.gather(1, text[start + 1 : stop + 1, None])
            ranks = (logprobs > chosen).sum(1) + 1
            likely = logprobs.topk(k, dim=-1)
            scored += [
                TokenLogprobs(logprob, rank, tuple(zip(tokens, values, strict=True)))
                for logprob, rank, tokens, values in zip(
                    chosen[:, 0].tolist(), ranks.tolist(), likely.indices.tolist(), likely.values.tolist(), strict=True
                )
            ]
    return scored


def _logits(model: PreTrainedModel, input_ids: Tensor) -> Callable[[int, int], Tensor]:
    """`[stop - start, vocab_size]` of positions start to stop, computed when asked for.

    What a model does between its last hidden states and its logits (scaling, soft caps) is in its forward, so that is
    called for each slice with `self` standing in, whose layers give what they gave before. Where that cannot be done
    all logits are computed at once.
    """
    prefix = model.base_model_prefix
    forward = inspect.unwrap(type(model).forward)
    try:
        output = getattr(model, prefix)(input_ids=input_ids, use_cache=False)
        hidden = output.last_hidden_state

        def slice_of(start: int, stop: int) -> Tensor:
            part = copy.copy(output)
            part.last_hidden_state = hidden[:, start:stop]
            logits: Tensor = forward(_Headed(model, prefix, part), input_ids=input_ids, use_cache=False).logits
            return logits[0]

        slice_of(0, 1)
        return slice_of
    except (AttributeError, TypeError):  # a forward built differently
        whole = model(input_ids=input_ids, use_cache=False).logits[0]
        return lambda start, stop: whole[start:stop]


class _Headed:
    """A model whose layers have run: called, they give `output`."""

    def __init__(self, model: PreTrainedModel, prefix: str, output: Any) -> None:
        self._model, self._prefix, self._output = model, prefix, output

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: self._output) if name == self._prefix else getattr(self._model, name)
