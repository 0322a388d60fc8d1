"""Logits to token ids on the device: batched, every row with its own parameters.

The order is vLLM's: logit bias and banned stop tokens, repetition penalty, frequency and presence penalty,
temperature, softmax in float32, then min_p, top_k and top_p, then the draw. min_p and top_k are thresholds on
the same probabilities, so their order does not matter; top_p looks at what those two left, renormalised.
(transformers applies min_p after top_p; the two differ only where both are set.)

A filter keeps every token whose float32 probability reaches the smallest probability it keeps:

- min_p: p >= min_p * p_max
- top_k: p >= the k-th largest p
- top_p: p >= the first p, in descending order, at which the running sum reaches top_p of the mass left

so tokens that tie with the last one kept are kept too, and no result depends on how a sort orders equals.

A draw is the inverse of the cumulative distribution in token order, at the row's uniform number.

Sums are taken in an order that does not depend on the batch: softmax works row by row, and rows are summed in
blocks of 128 and then in float64. Equal logits with equal (seed, position) give equal tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from interactive_infer.core.sampling_table import (
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    UNIFORM,
    SamplingInputs,
    SamplingTable,
    penalized,
)

__all__ = ["Sampled", "Sampler", "SamplingInputs", "SamplingTable", "penalized"]

BLOCK = 128
"""Tokens per block of the two-level argmax, sum and draw. A vectorized reduction of blocks is several times
faster than argmax, and no pass over the vocabulary needs a cumulative sum."""

TOP_P_CANDIDATES = 128
"""How many of the largest probabilities are looked at for top_p before the row is sorted."""

SORT_FROM = 384
"""From this many candidates on, a values-only sort of the row is cheaper than topk on the CPU."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's result. Rows that asked for no log-probabilities hold NaN there, and id and rank 0."""

    token_ids: Tensor  # int64 [R], always a valid id
    invalid: Tensor  # bool [R]: the logits hold NaN or +inf, or are all -inf; the token 0 means nothing
    logprobs: Tensor | None = None  # float32 [R], of the chosen tokens
    ranks: Tensor | None = None  # int64 [R], 1 for the most likely token; ties share the better rank
    alternative_ids: Tensor | None = None  # int64 [R, k], most likely first, ties by id
    alternative_logprobs: Tensor | None = None  # float32 [R, k], -inf for what a filter took away


class Sampler:
    """Draws a batch's tokens, and keeps the counts that penalties need, by slot, on the device.

    Calls and `load_history` run in the order of one stream or thread. The host never waits for a CUDA device
    here. Memory: two float32 [max_batch_size, vocabulary] from the first draw that is not greedy, and float32
    and bool [max_batch_size, vocabulary] from the first penalty on.
    """

    def __init__(self, vocab_size: int, max_batch_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.device = device
        self._blocks = -(-vocab_size // BLOCK)
        self._row_starts = torch.arange(max_batch_size, device=device) * self._blocks
        self._workspace: tuple[Tensor, Tensor] | None = None
        self._history: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def load_history(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Rebuilds what the penalties know of a slot: when a penalized sequence gets it or penalties begin."""
        counts, seen = self._token_history()
        counts[slot].zero_()
        seen[slot].zero_()
        output = self._ids(output_ids)
        counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        seen[slot].index_fill_(0, torch.cat((self._ids(prompt_ids), output)), True)

    @torch.no_grad()
    def __call__(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """Token ids for `logits`, [R, vocab_size] of any floating dtype, which are only read.

        Greedy rows take the lowest id among the largest logits, in float32 as `model.generate` does. Rows
        with penalties add their token to the counts of their slot, so that the next call may be launched
        before this one's tokens reach the host.
        """
        rows = logits.shape[0]
        needs_probabilities = not inputs.all_greedy or inputs.processed_logprob_rows is not None
        untouched = inputs.sparse_rows is None and inputs.penalty_rows is None
        blockwise = logits.is_contiguous() and self.vocab_size % BLOCK == 0 and logits.dtype != torch.float64
        as_is = untouched and blockwise and not needs_probabilities
        scores = logits if as_is else self._scores(logits, inputs)
        if inputs.any_greedy:
            token_ids, invalid = self._argmax(scores)
        if needs_probabilities:
            probabilities = torch.softmax(scores, dim=-1, out=self._buffers()[1][:rows])
            if inputs.max_top_k or inputs.any_top_p or inputs.any_min_p:
                threshold = _thresholds(probabilities, inputs)
                probabilities.mul_(probabilities >= threshold[:, None])
            drawn, mass, invalid = self._draw(probabilities, inputs.reals[UNIFORM])
            token_ids = torch.where(inputs.greedy, token_ids, drawn) if inputs.any_greedy else drawn
        token_ids = token_ids.masked_fill(invalid, 0)
        if inputs.penalty_rows is not None:
            counts, seen = self._token_history()
            index = (inputs.slots * counts.shape[1] + token_ids)[inputs.penalty_rows]
            counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.float32))
            seen.view(-1).index_fill_(0, index, True)
        if inputs.raw_logprob_rows is None and inputs.processed_logprob_rows is None:
            return Sampled(token_ids, invalid)
        result = _empty_logprobs(token_ids, invalid, min(inputs.max_logprobs, self.vocab_size))
        if (asked := inputs.raw_logprob_rows) is not None:
            _write_logprobs(result, asked, torch.log_softmax(logits[asked].float(), dim=-1))
        if (asked := inputs.processed_logprob_rows) is not None:
            kept = probabilities[asked, : self.vocab_size].div_(mass.float()[asked, None])
            _write_logprobs(result, asked, kept.log_())
        return result

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Scores and probabilities, [max_batch_size, blocks * BLOCK]; past the vocabulary -inf and 0."""
        if self._workspace is None:
            shape = (self.max_batch_size, self._blocks * BLOCK)
            scores = torch.full(shape, -torch.inf, device=self.device)
            self._workspace = (scores, torch.empty_like(scores))
        return self._workspace

    def _token_history(self) -> tuple[Tensor, Tensor]:
        """How often a token is in the output, and whether it is in prompt or output; wide as `_buffers`."""
        if self._history is None:
            shape = (self.max_batch_size, self._blocks * BLOCK)
            self._history = (
                torch.zeros(shape, device=self.device),  # whole numbers, exact in float32 up to 2**24
                torch.zeros(shape, dtype=torch.bool, device=self.device),
            )
        return self._history

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(np.asarray(ids, dtype=np.int64)).to(self.device, non_blocking=True)

    def _scores(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Logits after bias, penalties and temperature, in the workspace."""
        scores = self._buffers()[0][: logits.shape[0]]
        inside = scores[:, : self.vocab_size]
        temperature = inputs.reals[TEMPERATURE, :, None].float()
        if inputs.sparse_rows is None and inputs.penalty_rows is None and inputs.any_temperature:
            torch.div(logits, temperature, out=inside)
            return scores
        inside.copy_(logits)
        if inputs.sparse_rows is not None:
            assert inputs.sparse_ids is not None and inputs.sparse_values is not None
            index = inputs.sparse_rows * scores.shape[1] + inputs.sparse_ids
            scores.view(-1).index_add_(0, index, inputs.sparse_values)
        if inputs.penalty_rows is not None:
            self._penalize(scores, inputs, inputs.penalty_rows)
        return scores.div_(temperature) if inputs.any_temperature else scores

    def _penalize(self, scores: Tensor, inputs: SamplingInputs, rows: Tensor) -> None:
        """vLLM's penalties: repetition over prompt and output, frequency and presence over the output.

        Repetition: N. S. Keskar et al., "CTRL", 2019, section 4.1. Frequency and presence: the OpenAI API.
        """
        counts, seen = self._token_history()
        slots = inputs.slots[rows]
        presence, frequency, repetition = inputs.reals[PRESENCE : REPETITION + 1, rows, None].float()
        penalized = scores[rows]
        if inputs.any_repetition:
            repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
            penalized = torch.where(seen[slots], repeated, penalized)
        if inputs.any_count_penalty:
            count = counts[slots]
            penalized.addcmul_(count, frequency, value=-1)
            penalized.addcmul_(count.clamp_(max=1.0), presence, value=-1)
        scores[rows] = penalized

    def _argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest index of each row's maximum, and whether that maximum is not finite."""
        blocks = scores.view(scores.shape[0], -1, BLOCK)
        largest, block = blocks.amax(dim=-1).max(dim=-1)
        inner = blocks.flatten(0, 1)[block + self._row_starts[: len(block)]].argmax(dim=-1)
        return block * BLOCK + inner, ~largest.isfinite()

    def _draw(self, probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token, float64 mass and invalidity of each row.

        The token is the first whose cumulative mass exceeds `uniform` times the whole, found in two levels,
        block and token. A token of probability 0 is never the first to exceed anything.
        """
        blocks = probabilities.view(probabilities.shape[0], -1, BLOCK)
        cumulative = blocks.sum(dim=-1).double().cumsum(dim=-1)
        mass = cumulative[:, -1]
        target = torch.minimum(uniform * mass, _just_below(mass))
        block = (cumulative <= target[:, None]).sum(dim=-1)
        inside = blocks.flatten(0, 1)[block + self._row_starts[: len(block)]].double().cumsum(dim=-1)
        before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        rest = torch.minimum((target - before).clamp(min=0.0), _just_below(inside[:, -1]))
        return block * BLOCK + (inside <= rest[:, None]).sum(dim=-1), mass, mass.isnan()


def _just_below(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.zeros_like(values))


def _thresholds(probabilities: Tensor, inputs: SamplingInputs) -> Tensor:
    """The smallest probability that each row's filters keep, float32 [R]."""
    width = probabilities.shape[1]
    count = max(1, inputs.max_top_k)
    if inputs.any_top_p:
        # A row whose top_k ends among its candidates needs to see one that is left out.
        count = max(TOP_P_CANDIDATES, inputs.max_top_k + TOP_P_CANDIDATES // 2)
    on_cpu = probabilities.device.type == "cpu"
    if count == 1:
        largest = probabilities.amax(dim=-1, keepdim=True)
    elif count >= SORT_FROM if on_cpu else inputs.any_top_p:
        # On CUDA the host cannot know whether the candidates suffice, so there top_p always sorts.
        largest = _descending(probabilities)
    else:
        largest = probabilities.topk(min(count, width), dim=-1).values
    top_p, min_p = inputs.reals[TOP_P], inputs.reals[MIN_P]
    any_limit = bool(inputs.max_top_k) or inputs.any_min_p
    threshold, enough = _threshold(largest, inputs.top_k, top_p, min_p, any_limit)
    if on_cpu and largest.shape[1] < width:
        for row in (~enough).nonzero()[:, 0].split(1):
            # One row at a time: it stays in the cache.
            exact = _descending(probabilities[row])
            threshold[row], _ = _threshold(exact, inputs.top_k[row], top_p[row], min_p[row], any_limit)
    return threshold


def _threshold(largest: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, any_limit: bool) -> tuple[Tensor, Tensor]:
    """Thresholds from each row's largest probabilities, descending [R, K], and whether K was enough."""
    threshold = largest[:, 0] * min_p.float()
    kth = largest.gather(1, (top_k - 1).clamp(min=0)[:, None])[:, 0]
    threshold = torch.where(top_k > 0, torch.maximum(threshold, kth), threshold)
    # The mass that min_p and top_k left; without them everything, which is 1 by definition.
    limited = threshold > 0.0
    left = torch.where(largest >= threshold[:, None], largest, 0.0) if any_limit else largest
    cumulative = left.cumsum(dim=-1, dtype=torch.float64)
    target = top_p * torch.where(limited, cumulative[:, -1], 1.0)
    last = torch.searchsorted(cumulative, target[:, None]).clamp(max=largest.shape[1] - 1)
    nucleus = torch.where(top_p < 1.0, largest.gather(1, last)[:, 0], 0.0)
    enough = torch.where(limited, largest[:, -1] < threshold, cumulative[:, -1] >= target)
    return torch.maximum(threshold, nucleus), enough | (top_p >= 1.0)


def _descending(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    # numpy sorts values without their indices, with vector instructions: ten times faster than torch.sort.
    ascending = np.negative(values.numpy())
    ascending.sort(axis=-1)
    return torch.from_numpy(np.negative(ascending, out=ascending))


def _empty_logprobs(token_ids: Tensor, invalid: Tensor, count: int) -> Sampled:
    rows, device = len(token_ids), token_ids.device
    return Sampled(
        token_ids,
        invalid,
        logprobs=torch.full((rows,), torch.nan, device=device),
        ranks=torch.zeros(rows, dtype=torch.int64, device=device),
        alternative_ids=torch.zeros((rows, count), dtype=torch.int64, device=device) if count else None,
        alternative_logprobs=torch.full((rows, count), torch.nan, device=device) if count else None,
    )


def _write_logprobs(result: Sampled, rows: Tensor, logprobs: Tensor) -> None:
    """Fills `rows` of `result` from their log-probabilities, float32 [Q, V]."""
    assert result.logprobs is not None and result.ranks is not None
    chosen = logprobs.gather(1, result.token_ids[rows, None])
    result.logprobs[rows] = chosen[:, 0]
    result.ranks[rows] = (logprobs > chosen).sum(dim=-1) + 1
    if result.alternative_ids is not None and result.alternative_logprobs is not None:
        values, ids = logprobs.topk(result.alternative_ids.shape[1], dim=-1)
        ids, order = ids.sort(dim=-1)
        values, by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        result.alternative_ids[rows] = ids.gather(1, by_value)
        result.alternative_logprobs[rows] = values
