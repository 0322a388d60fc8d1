from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.sampling_packed import Drawn, PackedBuffer, PackedInputs, PackedKey, PackedOutputs, arrays
from interactive_infer.core.sampling_table import (
    GREEDY,
    LOGPROBS,
    PENALIZED,
    PROCESSED,
    SLOT,
    TEMPERATURE,
    TOP_K,
    SamplingTable,
)
from interactive_infer.sampling import SamplingParams


def table_of(params: list[SamplingParams], stop: tuple[int, ...] = ()) -> SamplingTable:
    table = SamplingTable(len(params), 1000)
    for slot, param in enumerate(params):
        table.assign(slot, param.with_seed(), stop)
    return table


def packed(
    table: SamplingTable, slots: list[int], rows: int, forbid_stop: list[bool] | None = None
) -> tuple[PackedKey, PackedInputs]:
    host = np.full(table.packed_nbytes(rows), 255, np.uint8)
    forbid = None if forbid_stop is None else np.array(forbid_stop)
    key = table.pack(np.array(slots), np.arange(len(slots)), forbid, rows, PackedBuffer(host))
    return key, PackedInputs.views(torch.from_numpy(host), key)


def test_a_packed_step_says_what_the_rows_say() -> None:
    params = [
        SamplingParams(seed=1, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=1.0),
        SamplingParams(temperature=0, logprobs=2, logprobs_mode="processed_logprobs"),
        SamplingParams(seed=3, logit_bias={5: 1.5, 9: -2.0}),
        SamplingParams(seed=4, frequency_penalty=0.5, repetition_penalty=1.5, logprobs=0),
    ]
    table = table_of(params, stop=(8,))
    slots = [3, 0, 2, 1]
    key, got = packed(table, slots, 6, [True, False, True, False])
    assert key == PackedKey(6, filtered=True, penalized=True, sparse=64, logprobs=5)
    wanted = table.rows(np.array(slots), np.arange(4), np.array([True, False, True, False]))
    assert torch.equal(got.reals[:, :4], wanted.reals)
    whole = got.whole[:, :4]
    assert torch.equal(whole[SLOT].long(), wanted.slots)
    assert torch.equal(whole[TOP_K].long(), wanted.top_k)
    assert torch.equal(whole[GREEDY].bool(), wanted.greedy)
    assert whole[PENALIZED].nonzero()[:, 0].tolist() == [0, 1]
    assert whole[LOGPROBS].tolist() == [0, -1, -1, 2]
    assert whole[PROCESSED].tolist() == [0, 0, 0, 1]
    starts = got.sparse_start.tolist()
    assert starts == [0, 1, 1, 4, 4, 4, 4]
    entries = sorted(zip(got.sparse_ids[:4].tolist(), got.sparse_values[:4].tolist(), strict=True))
    assert entries == [(5, 1.5), (8, -np.inf), (8, -np.inf), (9, -2.0)]


def test_padding_is_greedy_and_in_the_slot_past_the_last() -> None:
    _, got = packed(table_of([SamplingParams(seed=1, top_p=0.5)] * 3), [2], 4)
    assert got.whole[:, 1:].T.tolist() == [[1, 0, 0, -1, 0, 3]] * 3
    assert got.reals[TEMPERATURE, 1:].tolist() == [1.0] * 3
    assert got.sparse_start.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("params", "key"),
    [
        (SamplingParams(temperature=0, top_p=0.5, min_p=0.1), PackedKey(2, all_greedy=True)),
        (SamplingParams(seed=1), PackedKey(2)),
        (SamplingParams(seed=1, top_k=5000), PackedKey(2)),  # no limit
        (SamplingParams(seed=1, min_p=0.1), PackedKey(2, filtered=True)),
        (SamplingParams(seed=1, logit_bias={i: 1.0 for i in range(100)}), PackedKey(2, sparse=256)),
        (SamplingParams(temperature=0, logprobs=0), PackedKey(2, all_greedy=True, logprobs=0)),
        (SamplingParams(temperature=0, logprobs=6), PackedKey(2, all_greedy=True, logprobs=20)),
    ],
)
def test_a_key_holds_what_a_step_needs_and_no_more(params: SamplingParams, key: PackedKey) -> None:
    table = table_of([params, SamplingParams(seed=1, top_p=0.5, presence_penalty=1, logprobs=20)])
    assert packed(table, [0], 2)[0] == key


def test_a_buffer_that_is_too_short_is_refused() -> None:
    table = table_of([SamplingParams(seed=1)])
    with pytest.raises(ValueError, match="the buffer has 64 bytes"):
        table.pack(np.array([0]), np.array([0]), None, 8, PackedBuffer(np.zeros(64, np.uint8)))


PARAMS = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_k=7, min_p=0.1),
        SamplingParams(seed=5, logit_bias={5: 1.5, 9: -2.0}),
        SamplingParams(seed=6, frequency_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0, logit_bias={7: 1.0}, logprobs=0),
    ]
)
STEPS = st.tuples(
    st.lists(st.tuples(st.integers(0, 3), PARAMS), max_size=2),  # slots whose parameters change before it
    st.permutations(range(4)),
    st.integers(1, 4),  # rows
    st.integers(0, 2),  # rows of padding
    st.one_of(st.none(), st.lists(st.booleans(), min_size=4, max_size=4)),  # whose stop tokens may not come
    st.booleans(),  # as the step before, a token later
)


@given(st.lists(STEPS, min_size=2, max_size=8))
def test_a_buffer_that_is_packed_again_holds_what_a_new_one_would(steps: list[Any]) -> None:
    table, other = (table_of([SamplingParams(seed=1)] * 4, stop=(8,)) for _ in range(2))
    again = np.full(4096, 255, np.uint8)
    buffer, step = PackedBuffer(again), None
    for number, (changes, slots, count, padding, forbid, repeat) in enumerate(steps):
        for slot, params in changes:
            table.update(slot, params, (8,))
            other.update(slot, params, (8,))
        if step is None or not repeat:
            step = np.array(slots[:count]), None if forbid is None else np.array(forbid[:count]), count + padding
        at, banned, rows = step
        positions = np.arange(len(at)) + number
        fresh = np.full(4096, 77, np.uint8)
        key = table.pack(at, positions, banned, rows, buffer)
        assert key == other.pack(at, positions, banned, rows, PackedBuffer(fresh))
        wanted = arrays(fresh, key.input_sections)
        additions = wanted["sparse_start"][-1]
        for name, found in arrays(again, key.input_sections).items():
            most = additions if name in ("sparse_ids", "sparse_values") else None  # behind them lies anything
            assert (found[..., :most] == wanted[name][..., :most]).all(), name


def test_results_are_read_without_padding_and_without_a_view() -> None:
    key = PackedKey(4, logprobs=5)
    host = np.zeros(key.output_nbytes, np.uint8)
    out = PackedOutputs.views(torch.from_numpy(host), key)
    assert out.logprobs is not None and out.ranks is not None and out.counts is not None
    assert out.alternative_ids is not None and out.alternative_logprobs is not None
    out.token_ids[:] = torch.tensor([5, 6, 7, 8])
    out.invalid[:] = torch.tensor([0, 1, 0, 1])
    out.logprobs[2], out.ranks[2], out.counts[2] = -0.5, 3, 2
    out.alternative_ids[2, :2] = torch.tensor([9, 1])
    out.alternative_logprobs[2, :2] = torch.tensor([-0.25, -1.0])
    drawn = Drawn.read(host, key, 3)
    host[:] = 255
    assert drawn.token_ids.tolist() == [5, 6, 7] and drawn.invalid == [1]
    assert drawn.logprobs == {2: (-0.5, 3, [9, 1], [-0.25, -1.0])}
