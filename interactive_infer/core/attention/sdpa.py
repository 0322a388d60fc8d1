"""Paged attention by gathering pages and calling PyTorch's `scaled_dot_product_attention`.

The kernel for CPUs, and the fallback wherever nothing better is at hand. Rows that decode are gathered together,
in groups of like length, so that a step costs a few calls a layer and little padding; a prefill chunk is a call of
its own. With a sliding window only the window's pages are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Rows decode together while the padded length of all is at most this many times what they really hold, or exceeds it by
# so few keys that another call would cost more.
_MAX_PADDING = 1.2
_FREE_KEYS = 256


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a step as attention sees it: tokens `first .. first + count` of the packed step are tokens
    `start .. start + count` of a sequence whose page table is `pages`."""

    first: int
    count: int
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows attended in one call. `tokens`: their indices in the step (`None`: all, in order); `table`: pages
    `[rows * pages]`; `mask`: `[rows or 1, 1, queries * group, keys]`, added to the scores (0, or -inf where a query
    does not see a key), or None."""

    tokens: Tensor | None
    rows: int
    queries: int
    table: Tensor
    mask: Tensor | None


class PagedSDPA:
    """Attention of one step over per-layer page pools `[pages, page_size, kv_heads, head_dim]`.

    What depends on the step alone is worked out at the first layer of a kind (its window, its queries a key head) and
    holds for all of that kind.
    """

    def __init__(self, spans: Sequence[RowSpan], page_size: int, device: torch.device) -> None:
        self._spans = spans
        self._page_size = page_size
        self._device = device
        self._groups: dict[tuple[int | None, int, torch.dtype], list[_Group]] = {}

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`query` `[tokens, heads, head_dim]` over pools `keys`, `values`; returns the same shape."""
        tokens, heads, head_dim = query.shape
        kv_heads = keys.shape[2]
        share = heads // kv_heads
        kind = sliding_window, share, query.dtype
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = self._group(*kind)
        out = None
        for group in groups:
            q = query if group.tokens is None else query.index_select(0, group.tokens)
            # Grouped queries become more queries of one key head, so that keys are never repeated:
            # [rows, queries, kv_heads, share, dim] -> [rows, kv_heads, queries * share, dim]
            if group.queries == 1:
                q = q.reshape(group.rows, kv_heads, share, head_dim)
            else:
                q = q.reshape(group.rows, group.queries, kv_heads, share, head_dim).transpose(1, 2).flatten(2, 3)
            k = keys.index_select(0, group.table).view(group.rows, -1, kv_heads, head_dim).transpose(1, 2)
            v = values.index_select(0, group.table).view(group.rows, -1, kv_heads, head_dim).transpose(1, 2)
            if softcap is None and sinks is None:
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
            else:
                o = _attention(q, k, v, group.mask, scaling, softcap, sinks, group.queries)
            if group.queries > 1:
                o = o.unflatten(2, (group.queries, share)).transpose(1, 2)
            o = o.reshape(-1, heads, head_dim)
            if group.tokens is None:
                return o
            if out is None:
                out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
            out.index_copy_(0, group.tokens, o)
        assert out is not None, "a step without tokens"
        return out

    def _group(self, window: int | None, share: int, dtype: torch.dtype) -> list[_Group]:
        size = self._page_size
        decoding = [span for span in self._spans if span.count == 1]
        groups = [self._prefill(span, window, share, dtype) for span in self._spans if span.count > 1]

        def first_page(span: RowSpan) -> int:
            return 0 if window is None else max(0, span.start + 1 - window) // size

        def num_pages(span: RowSpan) -> int:
            return len(span.pages) - first_page(span)

        decoding.sort(key=num_pages)
        while decoding:
            held, take = 0, 0
            for span in decoding:
                real = held + num_pages(span)
                if num_pages(span) * (take + 1) > max(_MAX_PADDING * real, real + _FREE_KEYS // size):
                    break
                held, take = real, take + 1
            rows, decoding = decoding[:take], decoding[take:]
            if take == len(self._spans):
                rows.sort(key=lambda span: span.first)  # in the step's order there is nothing to reorder
            width = max(map(num_pages, rows))
            table = np.zeros((take, width), np.int64)
            for r, span in enumerate(rows):
                table[r, : num_pages(span)] = span.pages[first_page(span) :]
            position = np.array([span.start for span in rows])[:, None]
            offset = np.array([first_page(span) * size for span in rows])[:, None]
            groups.append(self._make(rows, table, position, offset, window, 1, share, dtype))
        return groups

    def _prefill(self, span: RowSpan, window: int | None, share: int, dtype: torch.dtype) -> _Group:
        size = self._page_size
        first_page = 0 if window is None else max(0, span.start + 1 - window) // size
        table = np.array(span.pages[first_page:], np.int64)[None]
        position = np.arange(span.start, span.start + span.count)[:, None]
        return self._make([span], table, position, np.array([[first_page * size]]), window, span.count, share, dtype)

    def _make(
        self,
        rows: Sequence[RowSpan],
        table: np.ndarray,
        position: np.ndarray,
        offset: np.ndarray,
        window: int | None,
        queries: int,
        share: int,
        dtype: torch.dtype,
    ) -> _Group:
        key_position = offset + np.arange(table.shape[1] * self._page_size)[None]
        hidden = key_position > position
        if window is not None:
            hidden |= key_position <= position - window
        mask = None
        if hidden.any():
            if queries > 1:
                hidden = hidden.repeat(share, axis=0)
            flags = torch.from_numpy(hidden).view(len(rows), 1, -1, key_position.shape[1]).to(self._device)
            mask = torch.zeros(flags.shape, dtype=dtype, device=self._device).masked_fill_(flags, float("-inf"))
        tokens = None
        if [span.first for span in rows] != [span.first for span in self._spans]:
            index = np.concatenate([np.arange(span.first, span.first + span.count) for span in rows])
            tokens = torch.from_numpy(index).to(self._device)
        return _Group(tokens, len(rows), queries, torch.from_numpy(table.reshape(-1)).to(self._device), mask)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    queries: int,
) -> Tensor:
    """Attention written out, for what `scaled_dot_product_attention` lacks: logit soft caps (Gemma 2) and attention
    sinks (gpt-oss: one more logit a head in the softmax's denominator)."""
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, k.shape[1], 1, -1).expand(q.shape[0], -1, queries, -1)
        scores = torch.cat([scores, sink.reshape(q.shape[0], k.shape[1], -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)
