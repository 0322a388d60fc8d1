"""Paged attention against attention written out densely, one token and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interactive_infer.core.attention.sdpa import PagedSDPA, RowSpan

CPU = torch.device("cpu")


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`query` `[heads, count, dim]` of tokens `start ..` over `keys`, `values` `[length, kv_heads, dim]`, in float64;
    returns `[count, heads, dim]`."""
    heads, count, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(count, heads, dim, dtype=torch.float64)
    for head in range(heads):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        for i in range(count):
            position = start + i
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            seen = range(first, position + 1)
            scores = k[seen] @ query[head, i].double() * (dim**-0.5 if scaling is None else scaling)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[i, head] = (weights / total) @ v[seen]
    return out


class Pool:
    """Texts with random keys and values, on pages handed out in random order. Unused places hold large numbers, which
    would show in any result that they reach."""

    def __init__(self, lengths: list[int], page_size: int, kv_heads: int, dim: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tables = [math.ceil(length / page_size) for length in lengths]
        order = (torch.randperm(sum(tables) + 3, generator=generator) + 1).tolist()
        shape = (sum(tables) + 4, page_size, kv_heads, dim)
        self.pages = [[order.pop() for _ in range(count)] for count in tables]
        self.pool_k, self.pool_v = torch.full(shape, 1e4), torch.full(shape, -1e4)
        self.k = [torch.randn(length, kv_heads, dim, generator=generator) for length in lengths]
        self.v = [torch.randn(length, kv_heads, dim, generator=generator) for length in lengths]
        for pages, k, v in zip(self.pages, self.k, self.v, strict=True):
            for position in range(len(k)):
                self.pool_k[pages[position // page_size], position % page_size] = k[position]
                self.pool_v[pages[position // page_size], position % page_size] = v[position]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Rows as (start, count), decodes of like and unlike length and prefill chunks in any order, and a page size."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    start = st.one_of(st.integers(0, 40), st.sampled_from([0, page_size - 1, page_size, 2 * page_size - 1, 33, 33]))
    count = st.sampled_from([1, 1, 1, 1, 2, 3, page_size, 9])
    return draw(st.lists(st.tuples(start, count), min_size=1, max_size=9)), page_size


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step=steps(),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    scaling=st.sampled_from([None, 0.3]),
    windows=st.lists(st.sampled_from([None, 1, 2, 5, 8, 100]), min_size=1, max_size=2),
    softcap=st.sampled_from([None, None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_paged_attention_is_dense_attention(
    step: tuple[list[tuple[int, int]], int],
    kv_heads: int,
    group: int,
    scaling: float | None,
    windows: list[int | None],
    softcap: float | None,
    with_sinks: bool,
    seed: int,
) -> None:
    rows, page_size = step
    dim, heads = 8, kv_heads * group
    generator = torch.Generator().manual_seed(seed)
    pool = Pool([start + count for start, count in rows], page_size, kv_heads, dim, seed)
    query = torch.randn(sum(count for _, count in rows), heads, dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    spans, first = [], 0
    for (start, count), pages in zip(rows, pool.pages, strict=True):
        spans.append(RowSpan(first, count, start, pages))
        first += count
    attention = PagedSDPA(spans, page_size, CPU)
    before = pool.pool_k.clone(), pool.pool_v.clone()
    for window in windows:  # layers of one model differ in their windows, and share the step's attention
        options = {"scaling": scaling, "sliding_window": window, "softcap": softcap, "sinks": sinks}
        ours = attention(query, pool.pool_k, pool.pool_v, **options)
        assert ours.shape == query.shape
        for span, k, v in zip(spans, pool.k, pool.v, strict=True):
            tokens = slice(span.first, span.first + span.count)
            expected = dense(query[tokens].transpose(0, 1), k, v, span.start, **options)
            torch.testing.assert_close(ours[tokens].double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool.pool_k, before[0])
    assert torch.equal(pool.pool_v, before[1])


def gathered(rows: list[tuple[int, int]], page_size: int, window: int | None) -> int:
    """Pages that one layer gathers for such a step."""
    spans, first = [], 0
    for start, count in rows:
        spans.append(RowSpan(first, count, start, range(1, 1 + math.ceil((start + count) / page_size))))
        first += count
    return sum(group.table.numel() for group in PagedSDPA(spans, page_size, CPU)._group(window, 1, torch.float32))


@pytest.mark.parametrize("page_size", [4, 16])
def test_no_more_is_gathered_than_is_needed(page_size: int) -> None:
    lengths = [300, 500, 3000, 3100, 20_000, 21_000, 100_000]
    needed = sum(math.ceil((length + 1) / page_size) for length in lengths)
    assert gathered([(length, 1) for length in lengths], page_size, None) <= 1.2 * needed
    assert (
        gathered([(length, 1) for length in (1, 20, 60, 130)], page_size, None) <= (2 + 21 + 61 + 131 + 256) / page_size
    )
    window = 8
    most = math.ceil((window - 1) / page_size) + 1
    assert gathered([(1000, 1)] * 5, page_size, window) <= 5 * most
    assert gathered([(1000, page_size)], page_size, window) <= most + 1
    assert gathered([(0, 40)], page_size, None) == math.ceil(40 / page_size)


def test_rows_of_like_length_are_attended_in_one_call() -> None:
    pool = Pool([33] * 8, 16, 1, 4, seed=0)
    spans = [RowSpan(i, 1, 32, pages) for i, pages in enumerate(pool.pages)]
    (group,) = PagedSDPA(spans, 16, CPU)._group(None, 1, torch.float32)
    assert group.rows == 8
    assert group.tokens is None, "in order already: nothing to reorder"


def test_short_rows_are_attended_in_one_call_in_any_order() -> None:
    pool = Pool([40, 3, 25], 16, 1, 4, seed=0)
    spans = [RowSpan(i, 1, length - 1, pool.pages[i]) for i, length in enumerate([40, 3, 25])]
    (group,) = PagedSDPA(spans, 16, CPU)._group(None, 1, torch.float32)
    assert group.tokens is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype) -> None:
    pool = Pool([50, 17, 33], 16, 2, 16, seed=3)
    query = torch.randn(2 + 1 + 1, 4, 16, generator=torch.Generator().manual_seed(3))
    spans = [RowSpan(0, 2, 48, pool.pages[0]), RowSpan(2, 1, 16, pool.pages[1]), RowSpan(3, 1, 32, pool.pages[2])]
    for softcap in (None, 5.0):
        options = {"scaling": None, "sliding_window": 20, "softcap": softcap, "sinks": None}
        exact = PagedSDPA(spans, 16, CPU)(query, pool.pool_k, pool.pool_v, **options)
        half = PagedSDPA(spans, 16, CPU)(query.to(dtype), pool.pool_k.to(dtype), pool.pool_v.to(dtype), **options)
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)
