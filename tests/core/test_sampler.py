from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.sampler import Sampled, Sampler, SamplingInputs, SamplingTable, penalized
from interactive_infer.core.sampling_table import UNIFORM, philox4x32, uniforms
from interactive_infer.sampling import SamplingParams

CPU = torch.device("cpu")
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": -0.3,
    "temperature": 0.7,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def inputs_for(params: list[SamplingParams], vocab_size: int, *, positions: list[int] | None = None) -> SamplingInputs:
    table = SamplingTable(len(params), vocab_size)
    for slot, param in enumerate(params):
        table.assign(slot, param.with_seed())
    slots = np.arange(len(params))
    return table.rows(slots, slots if positions is None else np.array(positions))


def sample(logits: torch.Tensor, params: list[SamplingParams], **options: Any) -> Sampled:
    inputs = inputs_for(params, logits.shape[1], **options).to(logits.device)
    return Sampler(logits.shape[1], len(params), logits.device)(logits, inputs)


def kept_by_definition(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[np.ndarray, bool]:
    """Probabilities after everything, by full sorts in float64; and whether a threshold is a matter of rounding."""
    z = logits.astype(np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        z[token_id] += bias
    for token_id in set(prompt) | set(output):
        r = params.repetition_penalty
        z[token_id] = z[token_id] / r if z[token_id] > 0 else z[token_id] * r
    for token_id in set(output):
        z[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    z = z / params.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    close = False

    def keep_from(threshold: float) -> None:
        nonlocal p, close
        close |= bool(((np.abs(p - threshold) < 1e-6 * threshold) & (p != threshold)).any())
        p = np.where(p >= threshold, p, 0.0)

    if params.min_p > 0:
        close |= bool((np.abs(p / (params.min_p * p.max()) - 1) < 1e-5).any())
        keep_from(params.min_p * p.max())
    if 0 < params.top_k < len(p):
        keep_from(np.sort(p)[-params.top_k])
    p /= p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        running = np.cumsum(descending)
        close |= bool((np.abs(running - params.top_p) < 1e-6).any())
        keep_from(descending[min(int((running < params.top_p).sum()), len(p) - 1)])
    return p / p.sum(), close


def all_probabilities(result: Sampled, vocab_size: int) -> np.ndarray:
    assert result.alternative_ids is not None and result.alternative_logprobs is not None
    out = np.full((len(result.token_ids), vocab_size), np.nan)
    logprobs = result.alternative_logprobs.double().exp().cpu().numpy()
    np.put_along_axis(out, result.alternative_ids.cpu().numpy(), logprobs, axis=1)
    assert not np.isnan(out).any()
    return out


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square below the quantile of 4.5 sigma (Wilson and Hilferty); nothing where nothing may be."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    order = np.argsort(expected)[::-1]
    counts, expected = counts[order], expected[order]
    large = max(int((expected >= 8).sum()), 1)  # the rare ones together
    cells = np.append(counts[:large], counts[large:].sum())
    wanted = np.append(expected[:large], expected[large:].sum())
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    if len(cells) == 1:
        return
    chi_square = ((cells - wanted) ** 2 / wanted).sum()
    k = len(cells) - 1
    assert chi_square < k * (1 - 2 / (9 * k) + 4.5 * np.sqrt(2 / (9 * k))) ** 3


def test_philox_known_answers() -> None:
    """tests/kat_vectors of Random123 1.14: counter, key, result."""
    counters = [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]
    keys = [[0] * 2, [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]]
    wanted = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    got = philox4x32(np.array(counters, np.uint64).T, np.array(keys, np.uint64).T)
    np.testing.assert_array_equal(got.T, np.array(wanted, np.uint64))


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniforms_are_uniform_and_neighbours_independent(along: str) -> None:
    run, other = np.arange(100_000), np.full(100_000, 3)
    here = uniforms(other, run) if along == "positions" else uniforms(run, other)
    assert here.min() > 0 and here.max() < 1
    cell = (here * 16).astype(int)
    assert_distributed(np.bincount(cell, minlength=16), np.full(16, 1 / 16))
    pairs = cell[:-1:2] * 16 + cell[1::2]
    assert_distributed(np.bincount(pairs, minlength=256), np.full(256, 1 / 256))
    low_bits = (here * 2.0**40).astype(np.int64) % 16
    assert_distributed(np.bincount(low_bits, minlength=16), np.full(16, 1 / 16))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.01, "temperature": 1.3},
        {"logit_bias": {0: 3.0, 9: -100.0}},
        PENALTIES,
        {**PENALTIES, "top_p": 0.9, "top_k": 20},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any], device: torch.device) -> None:
    vocab_size, rows, calls = 200, 512, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    param = SamplingParams(**params)
    prompt, output = [1, 2, 3, 3], [5, 6, 6, 7, 7, 7]
    table, sampler = SamplingTable(rows, vocab_size), Sampler(vocab_size, rows, device)
    for slot in range(rows):
        table.assign(slot, param.replace(seed=slot))
    counts, slots = np.zeros(vocab_size, np.int64), np.arange(rows)
    batch = logits.to(device).expand(rows, -1)
    for call in range(calls):
        if penalized(param):
            for slot in range(rows):
                sampler.load_history(slot, prompt, output)
        result = sampler(batch, table.rows(slots, np.full(rows, call)).to(device))
        counts += np.bincount(result.token_ids.cpu().numpy(), minlength=vocab_size)
    wanted, close = kept_by_definition(logits.numpy(), param, prompt, output)
    assert not close
    assert_distributed(counts, wanted)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingParams]]:
    vocab_size = draw(st.sampled_from([1, 5, 130, 700]))
    rows = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.01, 1.0, 4.0]))
    grid = draw(st.sampled_from([0.0, 0.25, 1.0]))  # a coarse grid makes many ties
    logits = rng.standard_normal((rows, vocab_size)) * spread
    logits = (np.round(logits / grid) * grid if grid else logits).astype(np.float32)
    number = st.floats(0.05, 1.0)
    params = [
        SamplingParams(
            temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
            top_k=draw(st.sampled_from([0, 1, 3, 50, 200, 500])),
            top_p=draw(st.one_of(st.just(1.0), number)),
            min_p=draw(st.one_of(st.just(0.0), number)),
            seed=draw(st.integers(0, 2**63 - 1)),
            logprobs=20,
            logprobs_mode="processed_logprobs",
        )
        for _ in range(rows)
    ]
    return logits, params


@given(problems())
def test_kept_tokens_and_probabilities_are_those_of_a_full_sort(
    problem: tuple[np.ndarray, list[SamplingParams]],
) -> None:
    logits, params = problem
    rows, vocab_size = logits.shape
    inputs = replace(inputs_for(params, vocab_size), max_logprobs=vocab_size)
    result = Sampler(vocab_size, rows, CPU)(torch.from_numpy(logits), inputs)
    got = all_probabilities(result, vocab_size)
    for row in range(rows):
        wanted, close = kept_by_definition(logits[row], params[row], [], [])
        assert got[row, result.token_ids[row]] > 0
        if not close:
            np.testing.assert_array_equal(got[row] > 0, wanted > 0)
            np.testing.assert_allclose(got[row], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("top_k", [0, 40, 500])
def test_wide_nuclei_need_more_than_the_candidates(top_k: int, device: torch.device) -> None:
    """Flat rows, whose nucleus is wider than what topk looks at, beside a peaked one."""
    vocab_size = 3000
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)) * 0.2
    logits[3, :3] += 20
    param = SamplingParams(
        top_p=0.77, top_k=top_k, seed=0, logprobs=0, logprobs_mode="processed_logprobs", max_tokens=9
    )
    inputs = replace(inputs_for([param] * 4, vocab_size), max_logprobs=vocab_size).to(device)
    got = all_probabilities(Sampler(vocab_size, 4, device)(logits.to(device), inputs), vocab_size)
    for row in range(4):
        wanted, close = kept_by_definition(logits[row].numpy(), param, [], [])
        assert not close
        np.testing.assert_array_equal(got[row] > 0, wanted > 0)


def test_ties_at_a_threshold_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in ({"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.1}):
        param = SamplingParams(**params, logprobs=5, logprobs_mode="processed_logprobs")
        got = all_probabilities(sample(logits, [param]), 5)
        assert (got[0] > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("vocab_size", [777, 50257])
def test_a_draw_depends_on_logits_seed_and_position_alone(vocab_size: int, device: torch.device) -> None:
    """The same row in other batches, slots, places, neighbours, dtypes and thread counts."""
    generator = torch.Generator().manual_seed(3)
    row = (torch.randn(vocab_size, generator=generator) * 3).bfloat16().float()
    others = torch.randn(6, vocab_size, generator=generator) * 2
    mixed = [{}, {"temperature": 0}, {"top_k": 300}, {"top_p": 0.99}, {"min_p": 0.3}, PENALTIES]
    for params in ({}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.02}):
        seen: dict[int, set[int]] = {}
        param = SamplingParams(**params, seed=11)
        for size, place, dtype, threads in itertools.chain(
            [(1, 0, torch.float32, 1), (1, 0, torch.bfloat16, 2), (1, 0, torch.float64, 1)],
            [(4, 3, torch.float32, 2), (7, 2, torch.float32, 1), (7, 0, torch.bfloat16, 2)],
        ):
            neighbours = [SamplingParams(**kind, seed=size) for kind in mixed[: size - 1]]
            batch = torch.cat((others[:place], row[None], others[place : size - 1])).to(device, dtype)
            table, sampler = SamplingTable(9, vocab_size), Sampler(vocab_size, 9, device)
            slots = np.random.default_rng(size).permutation(9)[:size]
            order = [*neighbours[:place], param, *neighbours[place:]]
            for slot, each in zip(slots, order, strict=True):
                table.assign(int(slot), each)
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                for position in range(5):
                    inputs = table.rows(slots, np.full(size, position))
                    token_id = int(sampler(batch, inputs.to(device)).token_ids[place])
                    seen.setdefault(position, set()).add(token_id)
            finally:
                torch.set_num_threads(before)
        assert all(len(tokens) == 1 for tokens in seen.values())
        assert len(set.union(*seen.values())) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 100, 256, 1000])
def test_greedy_is_argmax_and_the_lowest_id_of_ties(dtype: torch.dtype, vocab_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(8, vocab_size, generator=generator).to(dtype)
    logits[0] = 0.0
    logits[1, vocab_size // 2 :] = 9.0
    logits[2] = -torch.inf
    logits[2, -1] = -5.0
    wanted = logits.float().numpy().argmax(axis=1).tolist()
    for params in ({}, {"top_k": 3, "top_p": 0.1, "min_p": 0.5}, {"logprobs": 1}):
        greedy = [SamplingParams(temperature=0, **params)] * 8
        assert sample(logits.to(device), greedy).token_ids.tolist() == wanted
        mixed = [*greedy[:7], SamplingParams(seed=1)]
        assert sample(logits.to(device), mixed).token_ids.tolist()[:7] == wanted[:7]


def test_logits_are_only_read() -> None:
    for params in ({}, {"temperature": 0}, {"top_p": 0.5, **PENALTIES}, {"logit_bias": {1: 5.0}}):
        for dtype, vocab_size in itertools.product((torch.float32, torch.bfloat16), (128, 200)):
            logits = torch.randn(3, vocab_size).to(dtype)
            before = logits.clone()
            sample(logits, [SamplingParams(**params, logprobs=2)] * 3)
            assert torch.equal(logits, before)
            strided = torch.randn(3, 2, vocab_size).to(dtype)[:, 1]
            result = sample(strided, [SamplingParams(temperature=0)] * 3)
            assert result.token_ids.tolist() == strided.float().argmax(-1).tolist()


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, **PENALTIES}], ids=str)
def test_rows_without_an_answer_are_marked_and_disturb_nobody(params: dict[str, Any], device: torch.device) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    alone = sample(logits.to(device), [SamplingParams(**params, seed=1)] * 5).token_ids
    logits[0, 17] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 299] = torch.inf
    result = sample(logits.to(device), [SamplingParams(**params, seed=1, logprobs=2)] * 5)
    assert result.invalid.tolist() == [True, True, True, True, False]
    assert result.token_ids.tolist() == [0, 0, 0, 0, int(alone[4])]


@pytest.mark.parametrize("uniform", [2.0**-53, 0.25, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, device: torch.device) -> None:
    vocab_size = 1000
    for first, last in ((1, 1), (127, 128), (500, 640), (998, 998), (0, 999)):
        logits = torch.full((1, vocab_size), -torch.inf)
        logits[0, first] = logits[0, last] = 1.0
        for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.999)):
            inputs = inputs_for([params], vocab_size)
            inputs.reals[UNIFORM] = uniform
            token_id = int(Sampler(vocab_size, 1, device)(logits.to(device), inputs.to(device)).token_ids[0])
            assert token_id == (first if uniform < 0.5 else last)


def test_penalties_follow_the_history_that_the_sampler_keeps(device: torch.device) -> None:
    """Thirty steps without the host ever telling the sampler what it drew, beside a row that has no penalties."""
    vocab_size, prompt, output = 40, [1, 1, 2], [3]
    table, sampler = SamplingTable(5, vocab_size), Sampler(vocab_size, 5, device)
    param = SamplingParams(**PENALTIES, seed=4, logprobs=20, logprobs_mode="processed_logprobs")
    table.assign(3, param)
    table.assign(1, SamplingParams(seed=4))
    sampler.load_history(3, [9] * 50, [8] * 50)
    sampler.load_history(3, prompt, output)
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        logits = torch.randn(2, vocab_size, generator=generator)
        inputs = replace(table.rows(np.array([1, 3]), np.array([step, step])), max_logprobs=vocab_size)
        result = sampler(logits.to(device), inputs.to(device))
        assert result.alternative_ids is not None and result.alternative_logprobs is not None
        wanted, _ = kept_by_definition(logits[1].numpy(), param, prompt, output)
        got = result.alternative_logprobs[1].exp().cpu().numpy()
        np.testing.assert_allclose(got, wanted[result.alternative_ids[1].cpu().numpy()], rtol=1e-4)
        output = [*output, int(result.token_ids[1])]
    assert len(set(output)) < len(output)


def test_stop_tokens_are_banned_until_they_may_come(device: torch.device) -> None:
    table, sampler = SamplingTable(3, 200), Sampler(200, 3, device)
    table.assign(0, SamplingParams(temperature=0), (7, 150, 7, 5000))
    table.assign(1, SamplingParams(seed=1, logit_bias={7: 100.0, 3: 50.0}), (7,))
    table.assign(2, SamplingParams(temperature=0))
    logits = torch.zeros(3, 200)
    logits[0, 7], logits[0, 150], logits[0, 9], logits[2, 7] = 9.0, 8.0, 7.0, 9.0
    slots, positions = np.arange(3), np.arange(3)
    banned = table.rows(slots, positions, np.array([True, True, True]))
    assert sampler(logits.to(device), banned.to(device)).token_ids.tolist() == [9, 3, 7]
    free = table.rows(slots, positions, np.array([False, False, False]))
    assert sampler(logits.to(device), free.to(device)).token_ids.tolist() == [7, 7, 7]


def test_logprobs_before_and_after(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 300, generator=generator) * 2
    common: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "logit_bias": {5: 1.0}}
    params = [
        SamplingParams(**common, seed=1, logprobs=4),
        SamplingParams(**common, seed=2, logprobs=5, logprobs_mode="processed_logprobs"),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(seed=3),
    ]
    result = sample(logits.to(device), params)
    assert result.logprobs is not None and result.ranks is not None
    assert result.alternative_ids is not None and result.alternative_logprobs is not None
    tokens = result.token_ids.cpu()
    raw = torch.log_softmax(logits, -1)
    for row in (0, 2):
        assert result.logprobs[row].item() == pytest.approx(raw[row, tokens[row]].item(), abs=1e-5)
        assert result.ranks[row].item() == 1 + (raw[row] > raw[row, tokens[row]]).sum().item()
    top = raw[0].topk(5)
    assert result.alternative_ids[0].tolist() == top.indices.tolist()
    torch.testing.assert_close(result.alternative_logprobs[0].cpu(), top.values)
    wanted, _ = kept_by_definition(logits[1].numpy(), params[1], [], [])
    got = result.alternative_logprobs[1].exp().cpu().numpy()
    np.testing.assert_allclose(got[:3], np.sort(wanted)[:-4:-1], rtol=1e-4)
    assert got[3:].tolist() == [0.0, 0.0]
    assert result.logprobs[1].exp().item() == pytest.approx(wanted[tokens[1]], rel=1e-4)
    assert result.logprobs[3].isnan() and result.ranks[3] == 0


def test_alternatives_that_tie_come_by_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 5.0, 9.0]])
    result = sample(logits, [SamplingParams(temperature=0, logprobs=4)])
    assert result.alternative_ids is not None
    assert result.alternative_ids.tolist() == [[4, 1, 2, 3]]


def test_a_snapshot_is_not_touched_by_later_changes_and_a_slot_has_one_owner() -> None:
    table = SamplingTable(2, 10)
    table.assign(0, SamplingParams(temperature=0))
    inputs = table.rows(np.array([0]), np.array([0]))
    table.update(0, SamplingParams(seed=1, temperature=2.0))
    assert inputs.all_greedy and inputs.reals[0].tolist() == [1.0]
    assert not table.rows(np.array([0]), np.array([0])).all_greedy
    with pytest.raises(ValueError, match="taken"):
        table.assign(0, SamplingParams(seed=1))
    with pytest.raises(ValueError, match="free"):
        table.update(1, SamplingParams(seed=1))
    with pytest.raises(ValueError, match="seed"):
        table.update(0, SamplingParams())
    table.release(0)
    table.assign(0, SamplingParams(seed=1), (3,))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits_for_the_device() -> None:
    device = torch.device("cuda")
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_p": 0.5, "top_k": 9}, {"min_p": 0.1}, PENALTIES]
    params = [SamplingParams(**kind, logprobs=3, logit_bias={1: 1.0}) for kind in kinds]
    logits = torch.randn(len(params), 500, device=device)
    inputs = inputs_for(params, 500).to(device)
    sampler = Sampler(500, len(params), device)
    sampler(logits, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
