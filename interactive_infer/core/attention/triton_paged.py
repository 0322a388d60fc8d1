"""Paged attention in Triton: a decode kernel split over the keys, and a prefill kernel in blocks of queries.

Both read the page pools in place, group the queries of one key head into the rows of one matrix product, keep the
softmax in float32 and in base 2, and skip what lies outside a sliding window. Grids depend on shapes alone, so both
can be captured in a CUDA graph; how the work is shared out among a grid's programs is computed on the device from
the step's lengths.

Decode is flash-decoding (Dao et al. 2023) with a balanced share: all rows' keys are counted in blocks, a row takes
as many programs as its part of them, and a second kernel joins the parts of the rows that took more than one.
Prefill is FlashAttention-2 (Dao 2023); a program finds its row among the packed ones as vLLM's unified attention
does, by counting blocks of queries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interactive_infer.core.attention.batch import StepBatch
from interactive_infer.core.kernels.launch import launch, multiprocessors, options, prefetch

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tuning:
    """`rows` of the matrix products (decode: at least), `keys` a loop takes at once, and Triton's two knobs.
    `waves`: programs a decode is split into, in multiples of the card's multiprocessors."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    waves: int = 0


def decode_tuning(rows: int, head_dim: int, dtype: torch.dtype) -> Tuning:
    """Measured on an H200 with benchmarks/gpu_kernels.py."""
    if dtype == torch.float32:
        return Tuning(rows=16, keys=16, num_warps=4, num_stages=2, waves=2)
    if head_dim > 128:
        return Tuning(rows=16, keys=32, num_warps=4, num_stages=3, waves=2)
    # As many waves as programs fit on a multiprocessor. Few rows are split anyway, and joined faster in few parts, each
    # with more loads under way; many rows are balanced better in small parts.
    if rows < 4:
        return Tuning(rows=16, keys=64, num_warps=4, num_stages=4, waves=2)
    if rows < 32:
        return Tuning(rows=16, keys=64, num_warps=4, num_stages=3, waves=3)
    return Tuning(rows=16, keys=64, num_warps=4, num_stages=2, waves=4)


def prefill_tuning(head_dim: int, dtype: torch.dtype) -> Tuning:
    """Measured on an H200 with benchmarks/gpu_kernels.py."""
    if dtype == torch.float32:
        return Tuning(rows=16, keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Tuning(rows=128, keys=32, num_warps=8, num_stages=2)
    return Tuning(rows=64, keys=64, num_warps=4, num_stages=3)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: StepBatch,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a step's `query` `[T, heads, head_dim]` over page pools; returns the same shape.

    `keys` and `values` are `[pages, page_size, kv_heads, head_dim]`, contiguous, of the query's dtype (float32,
    bfloat16 or float16), this step's tokens stored already. `heads` is a multiple of `kv_heads`; head sizes need not
    be powers of two. `scaling` is `head_dim ** -0.5` unless given; a query sees the last `sliding_window` keys, its
    own included; `softcap` caps logits (Gemma 2); `sinks` `[heads]` are logits added to the softmax's denominator
    alone (gpt-oss). Rows without keys, and tokens that belong to no row, get zeros.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    head_dim = query.shape[2]
    settings = Settings(
        scaling=head_dim**-0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=sinks,
    )
    if batch.num_decodes:
        tuning = decode_tuning(batch.num_decodes, head_dim, query.dtype)
        decode(query, keys, values, batch, out, settings, tuning)
    if query.shape[0] > batch.num_decodes:
        prefill(query, keys, values, batch, out, settings, prefill_tuning(head_dim, query.dtype))
    return out


@dataclass(frozen=True, slots=True)
class Settings:
    """A layer's constants; 0 stands for no window and no soft cap."""

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


def decode(
    query: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, out: Tensor, settings: Settings, tuning: Tuning
) -> None:
    """Write `out[:num_decodes]`."""
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    rows = batch.num_decodes
    most_splits = max(1, tuning.waves * multiprocessors(query.device) // kv_heads)
    # Each row rounds its part up, once.
    items = rows + most_splits if rows > 1 else most_splits
    partial = torch.empty((kv_heads, items, group, head_dim), dtype=torch.float32, device=query.device)
    log_sum = torch.empty((kv_heads, items, group), dtype=torch.float32, device=query.device)
    shared = {
        "WINDOW": settings.window,
        "HAS_SINKS": settings.sinks is not None,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "N_BLOCK": tuning.keys,
        "ROWS_BLOCK": 1 if rows == 1 else max(32, triton.next_power_of_2(rows)),
    }
    sinks = out if settings.sinks is None else settings.sinks
    # Key heads first: those of a key lie side by side in memory, and are read at about the same time.
    launch(_decode_kernel, kv_heads, items)(
        query, keys, values, out, partial, log_sum, sinks, batch.kv_len, batch.row_slot, batch.page_table,
        rows, most_splits, query.stride(0), query.stride(1), batch.page_table.stride(0),
        KV_HEADS=kv_heads, M_BLOCK=max(tuning.rows, triton.next_power_of_2(group)), PAGE=batch.page_size,
        SCALING=settings.scaling, SOFTCAP=settings.softcap, PRECISION=_precision(query), **shared,
        **options(query.device, num_warps=tuning.num_warps, num_stages=tuning.num_stages),
    )  # fmt: skip
    if most_splits > 1:
        launch(_join_kernel, rows, heads)(
            partial, log_sum, out, sinks, batch.kv_len, rows, most_splits, items,
            SPLITS_BLOCK=min(64 if rows == 1 else 32, triton.next_power_of_2(most_splits)), **shared,
            **options(query.device, num_warps=4),
        )  # fmt: skip


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, out: Tensor, settings: Settings, tuning: Tuning
) -> None:
    """Write `out[num_decodes:]`."""
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    rows = batch.query_start.shape[0] - 1
    m_block = max(tuning.rows, triton.next_power_of_2(group))
    q_block = m_block // group
    # A row's blocks of queries start at (its first token) // q_block + (its number): never fewer than it needs.
    # One more pseudo-row holds the tokens after the last.
    blocks = (tokens - batch.num_decodes) // q_block + rows + 1
    launch(_prefill_kernel, blocks, kv_heads)(
        query, keys, values, out, out if settings.sinks is None else settings.sinks,
        batch.query_start, batch.kv_len, batch.row_slot, batch.page_table,
        tokens, batch.num_decodes, rows, query.stride(0), query.stride(1), batch.page_table.stride(0),
        WINDOW=settings.window, HAS_SINKS=settings.sinks is not None, GROUP=group, HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim), N_BLOCK=tuning.keys,
        ROWS_BLOCK=max(32, triton.next_power_of_2(rows + 1)), KV_HEADS=kv_heads, M_BLOCK=m_block, Q_BLOCK=q_block,
        PAGE=batch.page_size, SCALING=settings.scaling, SOFTCAP=settings.softcap, PRECISION=_precision(query),
        **options(query.device, num_warps=tuning.num_warps, num_stages=tuning.num_stages),
    )  # fmt: skip


def _precision(query: Tensor) -> str:
    # "ieee": float32 products in full, never in TF32. The narrower dtypes take no notice.
    return "ieee" if query.dtype == torch.float32 else "tf32"


@triton.jit
def _logits(q, k, SCALING: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled logits `[M, N]` in units of log 2."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        capped = 2 * tl.sigmoid(scores * (2 * SCALING / SOFTCAP)) - 1
        return capped * (SOFTCAP * _LOG2E)
    else:
        return scores * (SCALING * _LOG2E)


@triton.jit
def _page_of(table, block, high, PAGE: tl.constexpr, N_BLOCK: tl.constexpr):
    """The page of a block of keys that lies within one; loops ask for it an iteration ahead, because loads whose
    address is loaded in the same iteration are pipelined less deeply."""
    if PAGE % N_BLOCK == 0:
        return tl.load(table + block * N_BLOCK // PAGE, mask=block < high, other=0)
    else:
        return block * 0


@triton.jit
def _slots(table, page, block, limit, PAGE: tl.constexpr, N_BLOCK: tl.constexpr):
    """Slots in the flattened pool of a block's keys below `limit`: a base, and an offset for each key."""
    key = block * N_BLOCK + tl.arange(0, N_BLOCK)
    if PAGE % N_BLOCK == 0:
        return page.to(tl.int64) * PAGE + block * N_BLOCK % PAGE, tl.arange(0, N_BLOCK)
    else:
        pages = tl.load(table + key // PAGE, mask=key < limit, other=0).to(tl.int64)
        return page.to(tl.int64), pages * PAGE + key % PAGE


@triton.jit
def _ask_for(keys, values, slot, kv_head, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr):
    """Prefetch the keys and values in slots `slot` `[N]`."""
    LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, (DIM_BLOCK + LINE - 1) // LINE) * LINE, HEAD_DIM - 1)
    at = ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + line[None, :]
    prefetch(keys + at)
    prefetch(values + at)


@triton.jit
def _row_blocks(length, WINDOW: tl.constexpr, N_BLOCK: tl.constexpr):
    """First block of keys that a decoding row of `length` keys looks at, and how many."""
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // N_BLOCK
    else:
        first = length * 0
    return first, tl.cdiv(length, N_BLOCK) - first


@triton.jit
def _splits(blocks, all_blocks, most_splits):
    """Programs for `blocks` of a total: an equal share each, at least one a row."""
    share = tl.maximum(tl.cdiv(all_blocks, most_splits), 1)
    return tl.maximum(tl.cdiv(blocks, share), 1)


@triton.jit(do_not_specialize=["rows", "most_splits"])
def _decode_kernel(
    query,
    keys,
    values,
    out,
    partial,
    log_sum,
    sinks,
    kv_len,
    row_slot,
    page_table,
    rows,
    most_splits,
    query_stride_token,
    query_stride_head,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    M_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (kv_head, item): one part of one row's keys, for all query heads of the key head."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if ROWS_BLOCK == 1:
        row = 0
        first_item = 0
        length = tl.load(kv_len)
        first_block, blocks = _row_blocks(length, WINDOW, N_BLOCK)
        splits = _splits(blocks, blocks, most_splits)
        if item >= splits:
            return
    else:
        index = tl.arange(0, ROWS_BLOCK)
        lengths = tl.load(kv_len + index, mask=index < rows, other=0)
        _, all_blocks = _row_blocks(lengths, WINDOW, N_BLOCK)
        total = tl.sum(all_blocks, 0)
        all_splits = tl.where(index < rows, _splits(all_blocks, total, most_splits), 0)
        ends = tl.cumsum(all_splits, 0)
        row = tl.sum((ends <= item).to(tl.int32), 0)
        if row >= rows:
            return
        first_item = tl.max(tl.where(ends <= item, ends, 0), 0)
        length = tl.load(kv_len + row)
        first_block, blocks = _row_blocks(length, WINDOW, N_BLOCK)
        splits = _splits(blocks, total, most_splits)
    split = item - first_item
    low = first_block + blocks * split // splits
    high = first_block + blocks * (split + 1) // splits

    table = page_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    member = tl.arange(0, M_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    head = kv_head * GROUP + member
    in_group = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    next_page = _page_of(table, low, high, PAGE, N_BLOCK)
    if OVERLAP:
        # What is above was there before this step's layers began.
        base, slot = _slots(table, next_page, low, length, PAGE, N_BLOCK)
        _ask_for(keys, values, base + slot, kv_head, HEAD_DIM, DIM_BLOCK, KV_HEADS)
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(
        query + row * query_stride_token + (head * query_stride_head)[:, None] + dim[None, :], mask=in_group, other=0.0
    )
    top = tl.full([M_BLOCK], float("-inf"), tl.float32)
    norm = tl.zeros([M_BLOCK], tl.float32)
    acc = tl.zeros([M_BLOCK, DIM_BLOCK], tl.float32)
    for block in tl.range(low, high):
        page = next_page
        next_page = _page_of(table, block + 1, high, PAGE, N_BLOCK)
        key = block * N_BLOCK + tl.arange(0, N_BLOCK)
        seen = key < length
        if WINDOW > 0:
            seen = seen & (key >= length - WINDOW)
        base, slot = _slots(table, page, block, length, PAGE, N_BLOCK)
        base = (base * KV_HEADS + kv_head) * HEAD_DIM
        slot = slot * (KV_HEADS * HEAD_DIM)
        k = tl.load(
            keys + base + slot[None, :] + dim[:, None], mask=seen[None, :] & (dim < HEAD_DIM)[:, None], other=0.0
        )
        v = tl.load(
            values + base + slot[:, None] + dim[None, :], mask=seen[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        scores = tl.where(seen[None, :], _logits(q, k, SCALING, SOFTCAP, PRECISION), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every block holds a key that is seen
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        norm = norm * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top

    if splits == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32) * _LOG2E
            new_top = tl.maximum(top, sink)
            fade = tl.exp2(top - new_top)
            norm = norm * fade + tl.exp2(sink - new_top)
            acc = acc * fade[:, None]
        acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        at = (row * KV_HEADS * GROUP + head) * HEAD_DIM
        tl.store(out + at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=in_group)
    else:
        at = (kv_head * tl.num_programs(1) + item) * GROUP + member
        tl.store(log_sum + at, top + tl.log2(norm), mask=member < GROUP)
        tl.store(partial + (at * HEAD_DIM)[:, None] + dim[None, :], acc / norm[:, None], mask=in_group)


@triton.jit(do_not_specialize=["rows", "most_splits", "items"])
def _join_kernel(
    partial,
    log_sum,
    out,
    sinks,
    kv_len,
    rows,
    most_splits,
    items,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, head): the parts of a row that was split, weighted by their softmax sums."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(kv_len + row)
    _, blocks = _row_blocks(length, WINDOW, N_BLOCK)
    if ROWS_BLOCK == 1:
        first_item = 0
        splits = _splits(blocks, blocks, most_splits)
    else:
        index = tl.arange(0, ROWS_BLOCK)
        lengths = tl.load(kv_len + index, mask=index < rows, other=0)
        _, all_blocks = _row_blocks(lengths, WINDOW, N_BLOCK)
        total = tl.sum(all_blocks, 0)
        splits = _splits(blocks, total, most_splits)
        first_item = tl.sum(tl.where(index < row, _splits(all_blocks, total, most_splits), 0), 0)
    if OVERLAP:
        if (splits > 1) | (row + head == 0):
            gdc_wait()
        gdc_launch_dependents()
    if splits == 1:  # written already
        return
    dim = tl.arange(0, DIM_BLOCK)
    part = tl.arange(0, SPLITS_BLOCK)
    first = (head // GROUP * items + first_item) * GROUP + head % GROUP
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * _LOG2E
        norm = top * 0 + 1.0
    else:
        top = tl.full([], float("-inf"), tl.float32)
        norm = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM_BLOCK], tl.float32)
    for start in tl.range(0, splits, SPLITS_BLOCK):
        at = first + (start + part) * GROUP
        here = start + part < splits
        log_sums = tl.load(log_sum + at, mask=here, other=float("-inf"))
        parts = tl.load(
            partial + (at * HEAD_DIM)[:, None] + dim[None, :], mask=here[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_top)
        fade = tl.exp2(top - new_top)
        norm = norm * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * parts, 0)
        top = new_top
    at = (row * tl.num_programs(1) + head) * HEAD_DIM
    tl.store(out + at + dim, (acc / norm).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def _attend(
    acc,
    norm,
    top,
    q,
    keys,
    values,
    table,
    page,
    block,
    position,
    limit,
    kv_head,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys below `limit` for queries at `position` `[M]`."""
    dim = tl.arange(0, DIM_BLOCK)
    key = block * N_BLOCK + tl.arange(0, N_BLOCK)
    base, slot = _slots(table, page, block, limit, PAGE, N_BLOCK)
    base = (base * KV_HEADS + kv_head) * HEAD_DIM
    slot = slot * (KV_HEADS * HEAD_DIM)
    k_at = keys + base + slot[None, :] + dim[:, None]
    v_at = values + base + slot[:, None] + dim[None, :]
    if MASKED:
        k = tl.load(k_at, mask=(key < limit)[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(key < limit)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != DIM_BLOCK:
        k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = _logits(q, k, SCALING, SOFTCAP, PRECISION)
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = new_top
    if MASKED and WINDOW > 0:  # a window's first blocks may hold nothing for some of the queries
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite[:, None])
    fade = tl.exp2(top - finite)
    norm = norm * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, norm, new_top


@triton.jit(do_not_specialize=["tokens", "num_decodes", "rows"])
def _prefill_kernel(
    query,
    keys,
    values,
    out,
    sinks,
    query_start,
    kv_len,
    row_slot,
    page_table,
    tokens,
    num_decodes,
    rows,
    query_stride_token,
    query_stride_head,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    M_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (block of queries, kv_head). Row m of the products is query token m // GROUP, head m % GROUP."""
    # A row's last blocks see the most keys: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    index = tl.arange(0, ROWS_BLOCK)
    starts = tl.load(query_start + index, mask=index <= rows, other=0)
    first_blocks = (starts - num_decodes) // Q_BLOCK + index
    row = tl.sum(((index <= rows) & (first_blocks <= block)).to(tl.int32), 0) - 1
    start = tl.load(query_start + row)
    end = tl.load(query_start + row + 1, mask=row < rows, other=tokens)
    first = start + (block - (start - num_decodes) // Q_BLOCK - row) * Q_BLOCK
    if first >= end:
        return
    length = tl.load(kv_len + num_decodes + row, mask=row < rows, other=0)
    table = page_table + tl.load(row_slot + num_decodes + row, mask=row < rows, other=0).to(tl.int64) * table_stride

    if OVERLAP:  # what is above was there before this step's layers began
        gdc_wait()
        gdc_launch_dependents()
    member = tl.arange(0, M_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    token = first + member // GROUP
    head = kv_head * GROUP + member % GROUP
    ours = ((token < end) & (member < Q_BLOCK * GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        query + (token.to(tl.int64) * query_stride_token + head * query_stride_head)[:, None] + dim[None, :],
        mask=ours,
        other=0.0,
    )
    shift = length - end  # from a token's number to its position
    position = token + shift
    lowest = first + shift
    highest = tl.minimum(first + Q_BLOCK, end) - 1 + shift
    # Blocks of keys: [low, full) and [cut, high) need masks, [full, cut) is seen by every query.
    limit = tl.where(row < rows, highest + 1, 0)
    high = tl.cdiv(limit, N_BLOCK)
    if WINDOW > 0:
        low = tl.minimum(tl.maximum(lowest - WINDOW + 1, 0) // N_BLOCK, high)
        full = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), N_BLOCK), low), high)
    else:
        low = high * 0
        full = low
    cut = tl.minimum(tl.maximum((lowest + 1) // N_BLOCK, full), high)

    top = tl.full([M_BLOCK], float("-inf"), tl.float32)
    norm = tl.zeros([M_BLOCK], tl.float32)
    acc = tl.zeros([M_BLOCK, DIM_BLOCK], tl.float32)
    if WINDOW > 0:
        next_page = _page_of(table, low, high, PAGE, N_BLOCK)
        for b in tl.range(low, full):
            page = next_page
            next_page = _page_of(table, b + 1, high, PAGE, N_BLOCK)
            acc, norm, top = _attend(
                acc, norm, top, q, keys, values, table, page, b, position, limit, kv_head, True,
                WINDOW, HEAD_DIM, DIM_BLOCK, N_BLOCK, KV_HEADS, PAGE, SCALING, SOFTCAP, PRECISION,
            )  # fmt: skip
    next_page = _page_of(table, full, high, PAGE, N_BLOCK)
    for b in tl.range(full, cut):
        page = next_page
        next_page = _page_of(table, b + 1, high, PAGE, N_BLOCK)
        acc, norm, top = _attend(
            acc, norm, top, q, keys, values, table, page, b, position, limit, kv_head, False,
            WINDOW, HEAD_DIM, DIM_BLOCK, N_BLOCK, KV_HEADS, PAGE, SCALING, SOFTCAP, PRECISION,
        )  # fmt: skip
    next_page = _page_of(table, cut, high, PAGE, N_BLOCK)
    for b in tl.range(cut, high):
        page = next_page
        next_page = _page_of(table, b + 1, high, PAGE, N_BLOCK)
        acc, norm, top = _attend(
            acc, norm, top, q, keys, values, table, page, b, position, limit, kv_head, True,
            WINDOW, HEAD_DIM, DIM_BLOCK, N_BLOCK, KV_HEADS, PAGE, SCALING, SOFTCAP, PRECISION,
        )  # fmt: skip

    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        norm = norm * fade + tl.exp2(sink - new_top)
        acc = acc * fade[:, None]
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    at = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=ours)
