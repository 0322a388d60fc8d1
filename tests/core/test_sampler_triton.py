"""The card's sampler against the definition: on the card where there is one, and in Triton's interpreter on the CPU.

The CPU checks run in one process of their own, this file as a script (see interpreter.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from interactive_infer.core.sampler import Sampled, Sampler, _thresholds
from interactive_infer.core.sampling_packed import Drawn, PackedBuffer, PackedInputs, PackedKey, PackedOutputs
from interactive_infer.core.sampling_table import UNIFORM, SamplingTable, penalized, uniforms
from interactive_infer.sampling import SamplingParams
from tests.core.interpreter import outcome_of, report
from tests.core.test_sampler import PENALTIES, assert_distributed, kept_by_definition

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.5},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.001, "temperature": 0.7},
    {"top_k": 400, "top_p": 0.3},
    {"min_p": 0.01, "top_p": 0.8},
    {},
    {"temperature": 0.3},
    {"temperature": 0},
]


@dataclass
class Card:
    """A table, the sampler under test, and the buffers that a runner would own."""

    vocab_size: int
    device: torch.device
    slots: int = 16
    table: SamplingTable = field(init=False)
    key: PackedKey | None = None

    def __post_init__(self) -> None:
        from interactive_infer.core import sampler_triton

        if INTERPRETED:  # several chunks and several tiles of a small vocabulary
            sampler_triton.CHUNK, sampler_triton.TILE = 128, 64
        self.table = SamplingTable(self.slots, self.vocab_size)
        self.sampler = sampler_triton.TritonSampler(self.vocab_size, self.slots, self.device)
        self.last_token = torch.zeros(self.slots + 1, dtype=torch.int64, device=self.device)

    def assign(self, params: Sequence[SamplingParams], stop: Sequence[int] = ()) -> None:
        for slot, param in enumerate(params):
            self.table.assign(slot, param.with_seed(), stop)

    def draw(
        self,
        logits: torch.Tensor,
        *,
        slots: Sequence[int] | None = None,
        position: int = 0,
        forbid_stop: bool = False,
        padding: int = 0,
        uniform: float | None = None,
    ) -> Drawn:
        """Tokens for `logits`, followed by `padding` rows of NaN."""
        count, vocab_size = logits.shape
        at = np.arange(count) if slots is None else np.array(slots)
        host = np.zeros(self.table.packed_nbytes(count + padding), np.uint8)
        forbid = np.full(count, forbid_stop)
        self.key = self.table.pack(at, np.full(count, position), forbid, count + padding, PackedBuffer(host))
        inputs = PackedInputs.views(torch.from_numpy(host).to(self.device), self.key)
        if uniform is not None:
            inputs.reals[UNIFORM] = uniform
        buffer = torch.full((self.key.output_nbytes,), 77, dtype=torch.uint8, device=self.device)
        garbage = torch.full((padding, vocab_size), torch.nan, dtype=logits.dtype)
        padded = torch.cat((logits, garbage)).to(self.device) if padding else logits.to(self.device)
        self.sampler(padded, inputs, PackedOutputs.views(buffer, self.key), self.last_token)
        drawn = Drawn.read(buffer.cpu().numpy(), self.key, count)
        assert self.last_token.cpu()[at].tolist() == drawn.token_ids.tolist()
        return drawn


def some_logits(rows: int, vocab_size: int, seed: int, spread: float, grid: float = 0.0) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits / grid).round() * grid if grid else logits


def assert_drawn_by_definition(
    logits: torch.Tensor, param: SamplingParams, token_id: int, uniform: float, history: tuple[list[int], list[int]]
) -> None:
    """`token_id` is where the cumulative distribution in token order passes `uniform`."""
    if param.greedy:
        assert token_id == int(logits.float().argmax())
        return
    wanted, close = kept_by_definition(logits.float().numpy(), param, *history)
    if not close:
        assert wanted[token_id] > 0
        until = np.cumsum(wanted)
        assert until[token_id] - wanted[token_id] - 2e-6 <= uniform <= until[token_id] + 2e-6


def assert_threshold_by_definition(weights: np.ndarray, limit: float, param: SamplingParams) -> None:
    """`limit` is the smallest weight that `param` keeps, as far as float32 can tell."""
    margin = 4e-6
    least = max(param.min_p, np.sort(weights)[-param.top_k] if 0 < param.top_k < len(weights) else 0.0)
    left = weights * (weights >= least * (1 - margin))
    if param.top_p < 1:
        target = param.top_p * left.sum()
        assert left[weights > limit * (1 + margin)].sum() < target + 2e-6 * left.sum(), "keeps too much"
        assert left[weights >= limit * (1 - margin)].sum() >= target - 2e-6 * left.sum(), "keeps too little"
        assert limit >= least * (1 - margin)
    else:
        assert limit == pytest.approx(least, rel=margin, abs=1e-40)


def assert_same_thresholds(card: Card, logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """What the card kept is what the definition keeps, and what `core/sampler.py` keeps, ties included."""
    inputs = card.table.rows(np.arange(len(params)), np.zeros(len(params), np.int64))
    temperature = inputs.reals[0, :, None].float()
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    kept = (probabilities >= _thresholds(probabilities, inputs)[:, None]).numpy()
    limits = card.sampler._thresholds[: len(params)].cpu().view(torch.float32).double().numpy()
    weights = ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()).exp().numpy()
    for row, param in enumerate(params):
        filtered = not param.greedy and (0 < param.top_k < logits.shape[1] or param.top_p < 1 or param.min_p)
        assert bool(limits[row]) == bool(filtered)
        if not filtered:
            continue
        assert_threshold_by_definition(weights[row], limits[row], param)
        if not kept_by_definition(logits[row].float().numpy(), param, [], [])[1]:
            at_limit = np.abs(weights[row] / limits[row] - 1) < 4e-6
            assert kept[row][at_limit].all(), "keeps too much"
            above = weights[row] >= limits[row]
            np.testing.assert_array_equal(above[~at_limit], kept[row][~at_limit])


def check_filters(
    device: torch.device, vocab_size: int, spread: float, grid: float, dtype: torch.dtype = torch.float32
) -> None:
    params = [SamplingParams(**kind, seed=i + 1) for i, kind in enumerate(FILTERS)]
    logits = some_logits(len(params), vocab_size, vocab_size, spread, grid).to(dtype)
    card = Card(vocab_size, device)
    card.assign(params)
    drawn = card.draw(logits)
    assert drawn.invalid == []
    assert_same_thresholds(card, logits, params)
    seeds, positions = np.arange(len(params)) + 1, np.zeros(len(params), np.int64)
    uniform = uniforms(seeds, positions)
    for row, param in enumerate(params):
        assert_drawn_by_definition(logits[row], param, int(drawn.token_ids[row]), uniform[row], ([], []))


def check_the_search_does_not_matter(device: torch.device, vocab_size: int = 900) -> None:
    """However an interval is narrowed, or not at all, what the exact masses say is the same to the bit."""
    from interactive_infer.core import sampler_triton

    kinds = [*FILTERS[:-3], {"top_p": 0.99995}, {"top_p": 0.9, "temperature": 50.0}, {"top_k": vocab_size - 1}]
    params = [SamplingParams(**kind, seed=i) for i, kind in enumerate(kinds)]
    logits = some_logits(len(kinds), vocab_size, 9, 3.0)
    logits[::2] = logits[::2].sort(descending=True).values  # the chunks' maxima tell little
    limits, drawn, usual = [], [], (sampler_triton.ROUNDS, sampler_triton.PIVOTS)
    try:
        for sampler_triton.ROUNDS, sampler_triton.PIVOTS in ((0, 2), (1, 4), (2, 16)):
            card = Card(vocab_size, device, slots=len(kinds))
            card.assign(params)
            drawn.append(card.draw(logits).token_ids.tolist())
            limits.append(card.sampler._thresholds.tolist())
    finally:
        sampler_triton.ROUNDS, sampler_triton.PIVOTS = usual
    assert limits[0] == limits[1] == limits[2] and drawn[0] == drawn[1] == drawn[2]


def check_flat_and_empty_rows(device: torch.device) -> None:
    """All equal, one token alone, almost all -inf, one far above the rest."""
    vocab_size = 600
    logits = torch.zeros(5, vocab_size)
    logits[1] = -torch.inf
    logits[1, 300] = 2.0
    logits[2] = -torch.inf
    logits[2, 100] = logits[2, 599] = -1e4
    logits[3, 77] = 1e4
    logits[4] = torch.linspace(-200, 0, vocab_size)
    for kind in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.5, "top_p": 0.9}):
        params = [SamplingParams(**kind, seed=seed) for seed in range(5)]
        card = Card(vocab_size, device)
        card.assign(params)
        drawn = card.draw(logits)
        for row, param in enumerate(params):
            uniform = uniforms(np.array([row]), np.array([0]))[0]
            assert_drawn_by_definition(logits[row], param, int(drawn.token_ids[row]), uniform, ([], []))
        assert drawn.token_ids[1] == 300 and drawn.token_ids[3] == 77 and drawn.token_ids[2] in (100, 599)


def check_a_token_of_probability_zero_is_never_drawn(device: torch.device) -> None:
    vocab_size = 500
    for first, last in ((1, 1), (127, 128), (0, 499), (498, 498)):
        logits = torch.full((3, vocab_size), -torch.inf)
        logits[:, first] = logits[:, last] = 1.0
        card = Card(vocab_size, device)
        card.assign([SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.999)])
        for uniform in (2.0**-53, 0.25, 0.5, 1 - 2.0**-53):
            token_ids = card.draw(logits, uniform=uniform).token_ids
            assert token_ids.tolist() == [first if uniform < 0.5 else last] * 3


def check_greedy(device: torch.device) -> None:
    for vocab_size, dtype in ((1, torch.float32), (300, torch.bfloat16), (1025, torch.float16)):
        logits = some_logits(5, vocab_size, 3, 1.0).to(dtype)
        logits[0] = 0.0
        logits[1, vocab_size // 2 :] = 9.0
        logits[2] = -torch.inf
        logits[2, -1] = -5.0
        wanted = logits.float().argmax(1).tolist()
        for last in (SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.5)):
            card = Card(vocab_size, device)
            card.assign([*[SamplingParams(temperature=0, top_k=3, min_p=0.5)] * 4, last])
            assert card.draw(logits, padding=3).token_ids.tolist()[:4] == wanted[:4]
            assert card.key is not None and card.key.all_greedy == last.greedy


def check_neighbours_do_not_matter(device: torch.device, vocab_size: int = 700) -> None:
    """The same row in other batches, slots, places and padding, beside other kinds of rows."""
    row = some_logits(1, vocab_size, 5, 3.0).bfloat16()
    others = some_logits(6, vocab_size, 6, 2.0).bfloat16()
    mixed = [PENALTIES, {"temperature": 0}, {"top_k": 300}, {"top_p": 0.99}, {"logit_bias": {1: 9.0}, "logprobs": 3}]
    for kind in ({}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 50, "top_p": 0.95, "min_p": 0.02}):
        seen: dict[int, set[int]] = {0: set(), 1: set()}
        for size, place, padding in ((1, 0, 0), (3, 1, 2), (6, 5, 1), (6, 0, 0)):
            card = Card(vocab_size, device, slots=9)
            slots = np.random.default_rng(size).permutation(9)[:size].tolist()
            neighbours = [SamplingParams(**other, seed=size) for other in mixed[: size - 1]]
            order = [*neighbours[:place], SamplingParams(**kind, seed=11), *neighbours[place:]]
            for slot, param in zip(slots, order, strict=True):
                card.table.assign(slot, param)
            batch = torch.cat((others[:place], row, others[place : size - 1]))
            for position in seen:
                drawn = card.draw(batch, slots=slots, position=position, padding=padding)
                seen[position].add(int(drawn.token_ids[place]))
        assert all(len(tokens) == 1 for tokens in seen.values()), seen


def check_rows_without_an_answer(device: torch.device) -> None:
    logits = some_logits(5, 300, 0, 1.0)
    for kind in ({}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, **PENALTIES}):
        params = [SamplingParams(**kind, seed=1, logprobs=2)] * 5
        card = Card(300, device)
        card.assign(params)
        alone = card.draw(logits).token_ids[4]
        broken = logits.clone()
        broken[0, 17] = broken[1] = torch.nan
        broken[2] = -torch.inf
        broken[3, 299] = torch.inf
        drawn = card.draw(broken, position=0, padding=3)
        assert drawn.invalid == [0, 1, 2, 3]
        assert list(drawn.logprobs) == [4]
        if "top_k" not in kind:  # a penalized row has drawn before
            assert drawn.token_ids.tolist() == [0, 0, 0, 0, alone]


def check_penalties_follow_what_was_drawn(device: torch.device) -> None:
    """Steps without the host telling the sampler what it drew; padding changes no counts."""
    vocab_size, prompt, output = 140, [1, 1, 2, 139], [3, 5, 5]
    card = Card(vocab_size, device, slots=5)
    param = SamplingParams(**PENALTIES, seed=4, top_p=0.9)
    card.table.assign(3, param)
    card.table.assign(1, SamplingParams(seed=4))
    card.sampler.load_history(3, [7] * 9, [8] * 50)
    card.sampler.load_history(3, prompt, output)
    for step in range(8):
        logits = some_logits(2, vocab_size, step, 1.0)
        drawn = card.draw(logits, slots=[1, 3], position=step, padding=2)
        uniform = uniforms(np.array([4]), np.array([step]))[0]
        assert_drawn_by_definition(logits[1], param, int(drawn.token_ids[1]), uniform, (prompt, output))
        output = [*output, int(drawn.token_ids[1])]
    history = card.sampler._token_history()[:, :vocab_size].cpu()
    assert (history[3] >> 1).tolist() == np.bincount(output, minlength=vocab_size).tolist()
    assert (history[3] & 1).nonzero()[:, 0].tolist() == sorted({*prompt, *output})
    assert history[[0, 1, 2, 4]].count_nonzero() == 0


def check_bias_and_banned_stop_tokens(device: torch.device) -> None:
    logits = torch.zeros(4, 400)
    logits[0, 7], logits[0, 150], logits[0, 9], logits[2, 7] = 9.0, 8.0, 7.0, 9.0
    bias = {**{i: 1.0 for i in range(0, 400, 2)}, 7: 100.0, 3: 50.0}
    card = Card(400, device)
    card.table.assign(0, SamplingParams(temperature=0), (7, 150, 5000))
    card.table.assign(1, SamplingParams(seed=1, logit_bias=bias), (7,))
    card.table.assign(2, SamplingParams(temperature=0))
    card.table.assign(3, SamplingParams(temperature=0, logit_bias={399: 2.0}))
    assert card.draw(logits, forbid_stop=True, padding=4).token_ids.tolist() == [9, 3, 7, 399]
    assert card.draw(logits).token_ids.tolist() == [7, 7, 7, 399]


def check_logprobs(device: torch.device) -> None:
    vocab_size = 300
    logits = some_logits(6, vocab_size, 0, 2.0)
    logits[2] = logits[2].round()  # ties
    logits[4, 5:] = -torch.inf
    common: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "logit_bias": {5: 1.0}}
    params = [
        SamplingParams(**common, seed=1, logprobs=4),
        SamplingParams(**common, seed=2, logprobs=5, logprobs_mode="processed_logprobs"),
        SamplingParams(temperature=0, logprobs=20),
        SamplingParams(seed=3),
        SamplingParams(seed=4, logprobs=8, logprobs_mode="processed_logprobs"),
        SamplingParams(seed=5, logprobs=0),
    ]
    card = Card(vocab_size, device)
    card.assign(params)
    drawn = card.draw(logits, padding=2)
    slots = np.arange(len(params))
    wanted: Sampled = Sampler(vocab_size, 6, CPU)(logits, card.table.rows(slots, np.zeros(6, np.int64)))
    assert wanted.logprobs is not None and wanted.ranks is not None
    assert wanted.alternative_ids is not None and wanted.alternative_logprobs is not None
    assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
    assert list(drawn.logprobs) == [0, 1, 2, 4, 5]
    by_id = np.lexsort((np.arange(vocab_size), -logits[2].numpy()))
    wanted.alternative_ids[2] = torch.from_numpy(by_id[:20].copy())
    for row, (logprob, rank, ids, values) in drawn.logprobs.items():
        count = params[row].logprobs
        assert logprob == pytest.approx(wanted.logprobs[row].item(), abs=1e-5)
        assert rank == wanted.ranks[row].item()
        assert len(ids) == len(values) == len(set(ids)) == count
        there = sum(value > -torch.inf for value in values)
        assert there == (3 if row == 1 else 5 if row == 4 else count)
        assert ids[:there] == wanted.alternative_ids[row, :there].tolist()
        assert values == pytest.approx(wanted.alternative_logprobs[row, :count].tolist(), abs=1e-5)


def check_few_tokens_have_few_alternatives(device: torch.device) -> None:
    card = Card(3, device)
    card.assign([SamplingParams(temperature=0, logprobs=20)])
    _, rank, ids, values = card.draw(torch.tensor([[1.0, 2.0, 1.0]])).logprobs[0]
    assert (rank, ids) == (1, [1, 0, 2])
    assert values == pytest.approx(torch.log_softmax(torch.tensor([2.0, 1.0, 1.0]), 0).tolist(), abs=1e-6)
    card = Card(3, device)
    card.assign([SamplingParams(temperature=0, logprobs=0)])
    assert card.draw(torch.tensor([[0.0, 0.0, 0.0]]), padding=1).logprobs == {0: (pytest.approx(-np.log(3)), 1, [], [])}


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "filters": lambda device: check_filters(device, 700, 2.0, 0.0),
    "filters, flat": lambda device: check_filters(device, 1023, 0.1, 0.0),
    "filters, many ties": lambda device: check_filters(device, 515, 2.0, 1.0),
    "filters, peaked": lambda device: check_filters(device, 256, 9.0, 0.25),
    "filters, bfloat16": lambda device: check_filters(device, 640, 3.0, 0.0, torch.bfloat16),
    "search": check_the_search_does_not_matter,
    "flat and empty rows": check_flat_and_empty_rows,
    "probability zero": check_a_token_of_probability_zero_is_never_drawn,
    "greedy": check_greedy,
    "neighbours": check_neighbours_do_not_matter,
    "rows without an answer": check_rows_without_an_answer,
    "penalties": check_penalties_follow_what_was_drawn,
    "bias and stop tokens": check_bias_and_banned_stop_tokens,
    "logprobs": check_logprobs,
    "few tokens": check_few_tokens_have_few_alternatives,
}

# ------------------------------------------------------------------------------------------------------ on the CPU


if sys.platform == "linux":  # where Triton has wheels

    @pytest.fixture(scope="module")
    def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
        return outcome_of(__file__, tmp_path_factory.mktemp("interpreted"))

    @pytest.mark.parametrize("name", CHECKS)
    def test_in_the_interpreter(interpreted: dict[str, str | None], name: str) -> None:
        error = interpreted[name]
        assert error is None, error


# ----------------------------------------------------------------------------------------------------- on the card

LARGE = 151_936


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_card(name: str) -> None:
    CHECKS[name](torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("vocab_size", [50_257, LARGE])
def test_filters_of_a_large_vocabulary(vocab_size: int, spread: float) -> None:
    check_filters(torch.device("cuda"), vocab_size, spread, 0.0, torch.bfloat16)


@pytest.mark.gpu
def test_the_search_does_not_matter_in_a_large_vocabulary() -> None:
    check_the_search_does_not_matter(torch.device("cuda"), LARGE)


@pytest.mark.gpu
def test_neighbours_in_a_large_vocabulary() -> None:
    check_neighbours_do_not_matter(torch.device("cuda"), LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, *FILTERS[9:12], PENALTIES, {**PENALTIES, "top_p": 0.9, "top_k": 20}], ids=str)
def test_draws_follow_the_distribution(kind: dict[str, Any]) -> None:
    vocab_size, rows, calls = 200, 512, 40
    logits = some_logits(1, vocab_size, 1, 2.0)
    param, prompt, output = SamplingParams(**kind), [1, 2, 3, 3], [5, 6, 6, 7, 7, 7]
    card = Card(vocab_size, torch.device("cuda"), slots=rows)
    card.assign([param.replace(seed=slot) for slot in range(rows)])
    counts = np.zeros(vocab_size, np.int64)
    for call in range(calls):
        if penalized(param):
            for slot in range(rows):
                card.sampler.load_history(slot, prompt, output)
        counts += np.bincount(card.draw(logits.expand(rows, -1), position=call).token_ids, minlength=vocab_size)
    wanted, close = kept_by_definition(logits[0].numpy(), param, *((prompt, output) if penalized(param) else ([], [])))
    assert not close
    assert_distributed(counts, wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_captured_call_draws_what_a_launched_one_does() -> None:
    """One graph, replayed with other logits, parameters, slots and padding than those of its capture."""
    device = torch.device("cuda")
    card, eager = Card(LARGE, device, slots=40), Card(LARGE, device, slots=40)
    kinds = [*FILTERS, PENALTIES, {"logit_bias": {5: 3.0}, "logprobs": 2}, {"logprobs": 5, "top_p": 0.9}]
    params = [SamplingParams(**kinds[i % len(kinds)], seed=i) for i in range(40)]
    card.assign(params)
    eager.assign(params)
    rows = 32
    host = torch.zeros(card.table.packed_nbytes(rows), dtype=torch.uint8, pin_memory=True)
    packed = PackedBuffer(host.numpy())
    buffer, logits = torch.zeros_like(host, device=device), torch.zeros(rows, LARGE, device=device).bfloat16()

    def pack(slots: np.ndarray, position: int) -> PackedKey:
        key = card.table.pack(slots, np.full(len(slots), position), None, rows, packed)
        buffer.copy_(host)
        return key

    always, others = np.array([15, 16, 17]), np.setdiff1d(np.arange(40), [15, 16, 17])  # what makes the key
    key = pack(np.concatenate((always, others[:27])), 0)
    inputs = PackedInputs.views(buffer, key)
    result = torch.zeros(key.output_nbytes, dtype=torch.uint8, device=device)
    out = PackedOutputs.views(result, key)
    for each in (card, eager):
        for slot in range(40):
            each.sampler.load_history(slot, [], [])
    call: Callable[[], None] = lambda: card.sampler(logits, inputs, out, card.last_token)  # noqa: E731
    call()  # all logits are equal: a warm-up whose draws are forgotten
    for slot in range(40):
        card.sampler.load_history(slot, [], [])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for position in range(4):
        slots = np.roll(np.concatenate((always, np.roll(others, 5 * position)[: 27 - position])), position)
        assert pack(slots, position) == key
        fresh = some_logits(len(slots), LARGE, position, 2.0).bfloat16()
        logits.fill_(torch.nan)
        logits[: len(slots)] = fresh.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        got = Drawn.read(result.cpu().numpy(), key, len(slots))
        wanted = eager.draw(fresh, slots=slots.tolist(), position=position)
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        assert got.logprobs == wanted.logprobs and got.invalid == []


if __name__ == "__main__":
    report({name: partial(check, CPU) for name, check in CHECKS.items()}, sys.argv[1])
