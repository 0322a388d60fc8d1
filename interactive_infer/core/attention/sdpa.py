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

# Rows decode together while the padded length of all is at most this many times what they really hold.
_MAX_PADDING = 1.2


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
    `[rows * pages]`; `mask`: boolean `[rows or 1, 1, queries, keys]`, True where a query sees a key, or None."""

    tokens: torch.Tensor | None
    rows: int
    queries: int
    table: torch.Tensor
    mask: torch.Tensor | None


class PagedSDPA:
    """Attention of one step over per-layer page pools `[pages, page_size, kv_heads, head_dim]`."""

    def __init__(self, spans: Sequence[RowSpan], page_size: int, device: torch.device) -> None:
        self._spans = spans
        self._page_size = page_size
        self._device = device
        self._groups: dict[int | None, list[_Group]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`query` `[heads, tokens, head_dim]` over pools `keys`, `values`; returns `[tokens, heads, head_dim]`."""
        heads, tokens, head_dim = query.shape
        kv_heads = keys.shape[2]
        by_token = query.transpose(0, 1)
        groups = self._groups.get(sliding_window)
        if groups is None:
            groups = self._groups[sliding_window] = self._group(sliding_window)
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
        for group in groups:
            q = by_token if group.tokens is None else by_token.index_select(0, group.tokens)
            # Grouped queries become more queries of one key head, so that keys are never repeated:
            # [rows, queries, kv_heads, group, dim] -> [rows, kv_heads, queries * group, dim]
            q = q.reshape(group.rows, group.queries, kv_heads, heads // kv_heads, head_dim)
            q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)
            k = keys.index_select(0, group.table).view(group.rows, -1, kv_heads, head_dim).transpose(1, 2)
            v = values.index_select(0, group.table).view(group.rows, -1, kv_heads, head_dim).transpose(1, 2)
            mask = group.mask
            if mask is not None and group.queries > 1:
                mask = mask.repeat_interleave(heads // kv_heads, dim=2)
            if softcap is None and sinks is None:
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
            else:
                o = _attention(q, k, v, mask, scaling, softcap, sinks, group.queries)
            o = o.view(group.rows, kv_heads, group.queries, heads // kv_heads, head_dim)
            o = o.permute(0, 2, 1, 3, 4).reshape(-1, heads, head_dim)
            if group.tokens is None:
                out = o
            else:
                out.index_copy_(0, group.tokens, o)
        return out

    def _group(self, window: int | None) -> list[_Group]:
        size = self._page_size
        decoding = [span for span in self._spans if span.count == 1]
        groups = [self._prefill(span, window) for span in self._spans if span.count > 1]

        def first_page(span: RowSpan) -> int:
            return 0 if window is None else max(0, span.start + 1 - window) // size

        def num_pages(span: RowSpan) -> int:
            return len(span.pages) - first_page(span)

        decoding.sort(key=num_pages)
        while decoding:
            held, take = 0, 0
            for span in decoding:
                if num_pages(span) * (take + 1) > _MAX_PADDING * (held + num_pages(span)):
                    break
                held += num_pages(span)
                take += 1
            rows, decoding = decoding[:take], decoding[take:]
            width = num_pages(rows[-1])
            table = np.zeros((take, width), np.int64)
            for r, span in enumerate(rows):
                table[r, : num_pages(span)] = span.pages[first_page(span) :]
            position = np.array([span.start for span in rows])[:, None]
            offset = np.array([first_page(span) * size for span in rows])[:, None]
            groups.append(self._make(rows, table, position, offset, window, queries=1))
        return groups

    def _prefill(self, span: RowSpan, window: int | None) -> _Group:
        size = self._page_size
        first_page = 0 if window is None else max(0, span.start + 1 - window) // size
        table = np.array(span.pages[first_page:], np.int64)[None]
        position = np.arange(span.start, span.start + span.count)[:, None]
        return self._make([span], table, position, np.array([[first_page * size]]), window, queries=span.count)

    def _make(
        self,
        rows: Sequence[RowSpan],
        table: np.ndarray,
        position: np.ndarray,
        offset: np.ndarray,
        window: int | None,
        *,
        queries: int,
    ) -> _Group:
        key_position = offset + np.arange(table.shape[1] * self._page_size)[None]
        seen = key_position <= position
        if window is not None:
            seen &= key_position > position - window
        mask = None
        if not seen.all():
            mask = torch.from_numpy(seen).view(len(rows), 1, queries, -1).to(self._device)
        tokens = None
        if not (len(rows) == len(self._spans) and [span.first for span in rows] == sorted(s.first for s in rows)):
            index = np.concatenate([np.arange(span.first, span.first + span.count) for span in rows])
            tokens = torch.from_numpy(index).to(self._device)
        return _Group(tokens, len(rows), queries, torch.from_numpy(table.reshape(-1)).to(self._device), mask)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    queries: int,
) -> torch.Tensor:
    """Attention written out, for what `scaled_dot_product_attention` lacks: logit soft caps (Gemma 2) and attention
    sinks (gpt-oss: one more logit a head in the softmax's denominator)."""
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, k.shape[1], 1, -1).expand(q.shape[0], -1, queries, -1)
        scores = torch.cat([scores, sink.reshape(q.shape[0], k.shape[1], -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)
