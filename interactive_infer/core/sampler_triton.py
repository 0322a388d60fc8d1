"""`core/sampler.py` on a card: the same order of steps, the same thresholds, the same draws, without a sort.

    scores    one program a chunk of a row: bias and penalties, then the chunk's maximum and mass
    threshold the smallest weight that min_p, top_k and top_p keep: `kernels/triton_threshold.py`; only with filters
    masses    one program a chunk: its mass without what was filtered away; only with filters
    draw      one program a row: the chunk, then the token in it
    logprobs  two more, for rows that asked

A token's weight is its probability up to a factor that the row shares, exp((x - largest x) / temperature) in float32.
Masses are whole numbers, weights times a power of two. Their sums do not depend on the order, so a row's token depends
on its logits, seed and position alone, whatever batch, padding or graph it is in.

Nothing here waits for the card, shapes and grids depend on the `PackedKey` alone, and after the first call of a key
nothing that outlives a call is allocated: calls can be captured in a CUDA graph.
"""

# ruff: noqa: SIM102 - Triton compiles an `if` on a constant away, and has no short-circuit `and` with a tensor.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from interactive_infer.core import sampling_table as table
from interactive_infer.core.kernels.launch import launch, options
from interactive_infer.core.kernels.triton_threshold import (
    BOUNDS,
    CHUNK_UNIT,
    EXACT,
    bits_of,
    bounds_kernel,
    collect_kernel,
    narrow_kernel,
    overlapped,
    scale_of,
    threshold_kernel,
    weight_of,
)
from interactive_infer.core.sampling_packed import PackedInputs, PackedOutputs

CHUNK = 1024
"""Tokens that one program of a chunk kernel looks at."""

ROUNDS, PIVOTS = 2, 16
"""Of the search for a threshold: passes over the row, and into how many parts each cuts an interval."""

TILE = 2048
"""Tokens that the last stage of that search, one program a row, looks at together."""

_PRESENCE, _FREQUENCY = tl.constexpr(table.PRESENCE), tl.constexpr(table.FREQUENCY)
_REPETITION, _UNIFORM = tl.constexpr(table.REPETITION), tl.constexpr(table.UNIFORM)
_GREEDY, _PENALIZED = tl.constexpr(table.GREEDY), tl.constexpr(table.PENALIZED)
_LOGPROBS, _PROCESSED, _SLOT = (tl.constexpr(i) for i in (table.LOGPROBS, table.PROCESSED, table.SLOT))

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-1.0e30)  # what no token may have, below every logit; -inf means that there is no token
_ROW_UNIT = tl.constexpr(2.0**-8)  # from CHUNK_UNIT to that of a row, whose 2**20 tokens or fewer stay below 2**63


class TritonSampler:
    """Draws a batch's tokens on a card; keeps the history that penalties need, by slot, on the card.

    Calls and `load_history` run in the order of one stream. Memory, from the first call that needs it: float32
    [max_batch_size, vocabulary] for filters, as much for penalties or bias, and int32 of that size for penalties.
    """

    def __init__(self, vocab_size: int, max_batch_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.device = device
        self._chunks = triton.cdiv(vocab_size, CHUNK)
        self._width = max(triton.next_power_of_2(self._chunks), 32)
        self._stride = triton.cdiv(vocab_size, CHUNK) * CHUNK
        shape = (max_batch_size, self._width)
        self._chunk_max = torch.full(shape, -torch.inf, device=device)
        self._chunk_mass = torch.zeros(shape, dtype=torch.int64, device=device)
        self._row_top = torch.zeros(max_batch_size, device=device)
        self._thresholds = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._rounds, self._pivots = ROUNDS, PIVOTS
        self._bounds = torch.zeros((max_batch_size, BOUNDS), dtype=torch.int32, device=device)
        self._sums = torch.zeros((max_batch_size, ROUNDS, PIVOTS), device=device)
        self._exact = torch.zeros((max_batch_size, EXACT), dtype=torch.int64, device=device)
        self._scores: Tensor | None = None
        self._candidates: Tensor | None = None
        self._history: Tensor | None = None
        self._logprobs: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def load_history(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """As `Sampler.load_history`: before the first draw of a slot's penalized sequence."""
        history = self._token_history()[slot]
        output = self._ids(output_ids)
        history.zero_()
        history.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
        seen = torch.cat((self._ids(prompt_ids), output))
        history.index_copy_(0, seen, history.index_select(0, seen) | 1)

    @torch.no_grad()
    def __call__(self, logits: Tensor, inputs: PackedInputs, out: PackedOutputs, last_token: Tensor) -> None:
        """Draws a token for each row of `logits`, [key.rows, vocab_size] of any floating dtype, which are only read.

        Results go to `out`, and the tokens to `last_token` [max_batch_size + 1] by slot. Rows of padding may hold
        anything. The first call of a key compiles kernels and allocates.
        """
        key, rows = inputs.key, inputs.key.rows
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        touched = bool(key.penalized or key.sparse)
        source, stride = logits, logits.stride(0)
        history = inputs.whole  # stands in where nobody has penalties
        if touched:
            self._scores = self._buffer(self._scores)
            source, stride = self._scores, self._stride
        if key.penalized:
            history = self._token_history()
        shared = {"VOCAB": self.vocab_size, "CHUNK": CHUNK, "WIDTH": self._width}
        four_warps = options(self.device, num_warps=4)
        launch(_scores_kernel, self._chunks, rows)(
            logits, logits.stride(0), source, inputs.reals, inputs.whole,
            inputs.sparse_start, inputs.sparse_ids, inputs.sparse_values, history,
            self._chunk_max, self._chunk_mass, rows, **shared, STRIDE=self._stride,
            SPARSE=bool(key.sparse), PENALTIES=key.penalized, MASSES=not key.all_greedy, **four_warps,
        )  # fmt: skip
        if key.filtered:
            self._write_thresholds(source, stride, inputs)
        launch(_draw_kernel, rows)(
            source, stride, inputs.reals, inputs.whole, history, self._chunk_max, self._chunk_mass, self._thresholds,
            out.token_ids, out.invalid, last_token, rows, **shared, STRIDE=self._stride,
            FILTERED=key.filtered, PENALTIES=key.penalized, MASSES=not key.all_greedy, **four_warps,
        )  # fmt: skip
        if key.logprobs is not None:
            self._write_logprobs(logits, source, stride, inputs, out)

    def _write_thresholds(self, source: Tensor, stride: int, inputs: PackedInputs) -> None:
        rows, chunks = inputs.key.rows, (self._chunks, inputs.key.rows)
        self._candidates = self._buffer(self._candidates)
        asked, chunk_max = (inputs.reals, inputs.whole), self._chunk_max
        row_top, thresholds = self._row_top, self._thresholds
        bounds, sums, exact = self._bounds, self._sums, self._exact
        vocab, chunk, width = {"VOCAB": self.vocab_size}, {"CHUNK": CHUNK}, {"WIDTH": self._width}
        search = {"CHUNKS": self._chunks, "ROUNDS": self._rounds, "PIVOTS": self._pivots}
        # A warp's sums need no shared memory, and a chunk's are as many as its pivots.
        narrow, collect = options(self.device, num_warps=1), options(self.device, num_warps=4)
        launch(bounds_kernel, rows)(
            *asked, chunk_max, self._chunk_mass, row_top, thresholds, bounds, sums, exact, rows,
            **vocab, **width, **search, **options(self.device, num_warps=4),
        )  # fmt: skip
        for turn in range(self._rounds):
            launch(narrow_kernel, *chunks)(
                source, stride, *asked, chunk_max, row_top, thresholds, bounds, sums, rows,
                **vocab, **chunk, **width, **search, TURN=turn, **narrow,
            )  # fmt: skip
        launch(collect_kernel, *chunks)(
            source, stride, *asked, chunk_max, row_top, thresholds, bounds, sums, exact, self._candidates, rows,
            **vocab, **chunk, **width, **search, STRIDE=self._stride, **collect,
        )  # fmt: skip
        launch(threshold_kernel, rows)(
            *asked, thresholds, bounds, sums, exact, self._candidates, rows,
            **search, STRIDE=self._stride, TILE=TILE, **options(self.device, num_warps=16),
        )  # fmt: skip
        launch(_masses_kernel, *chunks)(
            source, stride, inputs.reals, chunk_max, self._chunk_mass, row_top, thresholds, rows,
            **vocab, **chunk, **width, **options(self.device, num_warps=4),
        )  # fmt: skip

    def _write_logprobs(
        self, logits: Tensor, source: Tensor, stride: int, inputs: PackedInputs, out: PackedOutputs
    ) -> None:
        key, rows = inputs.key, inputs.key.rows
        if self._logprobs is None:
            low = torch.full_like(self._chunk_max, -torch.inf)
            self._logprobs = (low, torch.zeros_like(low), torch.zeros_like(low, dtype=torch.int32))
        values = (logits, logits.stride(0), source, stride, inputs.reals, inputs.whole, self._row_top, self._thresholds)
        shared = {"VOCAB": self.vocab_size, "CHUNK": CHUNK, "WIDTH": self._width, "FILTERED": key.filtered}
        four_warps = options(self.device, num_warps=4)
        launch(_logprob_chunks_kernel, self._chunks, rows)(
            *values, out.token_ids, out.invalid, *self._logprobs, rows, **shared, **four_warps
        )
        launch(_logprob_rows_kernel, rows)(
            *values, out.token_ids, out.invalid, *self._logprobs,
            out.logprobs, out.ranks, out.counts, out.alternative_ids, out.alternative_logprobs, rows,
            **shared, ROOM=key.logprobs, **four_warps,
        )  # fmt: skip

    def _buffer(self, buffer: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        if buffer is not None:
            return buffer
        return torch.zeros((self.max_batch_size, self._stride), dtype=dtype, device=self.device)

    def _token_history(self) -> Tensor:
        """Twice how often a token is in the output, plus 1 where it is in prompt or output."""
        self._history = self._buffer(self._history, torch.int32)
        return self._history

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(np.asarray(ids, dtype=np.int64)).to(self.device, non_blocking=True)


@triton.jit(do_not_specialize=["rows"])
def _scores_kernel(
    logits, logits_stride, scores, reals, whole, sparse_start, sparse_ids, sparse_values, history,
    chunk_max, chunk_mass, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    SPARSE: tl.constexpr, PENALTIES: tl.constexpr, MASSES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores of a chunk where bias or penalties change them, its maximum, and its mass in units of its maximum."""
    overlapped(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * logits_stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
    if SPARSE:
        for entry in range(tl.load(sparse_start + row), tl.load(sparse_start + row + 1)):
            token = tl.load(sparse_ids + entry)
            if token // CHUNK == chunk:
                x = tl.where(at == token, x + tl.load(sparse_values + entry), x)
    if PENALTIES:
        if tl.load(whole + rows * _PENALIZED + row) != 0:
            slot = tl.load(whole + rows * _SLOT + row).to(tl.int64)
            known = tl.load(history + slot * STRIDE + at)
            repetition = tl.load(reals + rows * _REPETITION + row).to(tl.float32)
            repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where((known & 1) != 0, repeated, x)
            count = (known >> 1).to(tl.float32)
            x -= count * tl.load(reals + rows * _FREQUENCY + row).to(tl.float32)
            x -= tl.minimum(count, 1.0) * tl.load(reals + rows * _PRESENCE + row).to(tl.float32)
    if SPARSE or PENALTIES:
        tl.store(scores + row * STRIDE + at, x)
    x = tl.where(x != x, _INF, x)
    top = tl.max(x, 0)
    tl.store(chunk_max + row * WIDTH + chunk, top)
    if MASSES:
        if tl.load(whole + rows * _GREEDY + row) == 0:
            finite = (top > -_INF) & (top < _INF)
            weight = weight_of(tl.where(finite, x, -_INF), tl.where(finite, top, 0.0), scale_of(reals, row, rows))
            tl.store(chunk_mass + row * WIDTH + chunk, tl.sum((weight * CHUNK_UNIT).to(tl.int64), 0))


@triton.jit
def _kept_mass(x, x_top, top, scale, limit):
    """Weights in units of the chunk's maximum `x_top`, as whole numbers, 0 for what the limit takes away."""
    amount = (weight_of(x, x_top, scale) * CHUNK_UNIT).to(tl.int64)
    return tl.where(bits_of(weight_of(x, top, scale)) >= limit, amount, 0)


@triton.jit(do_not_specialize=["rows"])
def _masses_kernel(
    source, stride, reals, chunk_max, chunk_mass, row_top, thresholds, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A chunk's mass above its row's threshold."""
    overlapped(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit = tl.load(thresholds + row)
    if limit > 0:
        scale = scale_of(reals, row, rows)
        top = tl.load(row_top + row)
        x_top = tl.load(chunk_max + row * WIDTH + chunk)
        mass = tl.zeros((), tl.int64)
        if bits_of(weight_of(x_top, top, scale)) >= limit:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(source + row * stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
            mass = tl.sum(_kept_mass(x, x_top, top, scale, limit), 0)
        tl.store(chunk_mass + row * WIDTH + chunk, mass)


@triton.jit(do_not_specialize=["rows"])
def _draw_kernel(
    source, stride, reals, whole, history, chunk_max, chunk_mass, thresholds, token_ids, invalid, last_token, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    FILTERED: tl.constexpr, PENALTIES: tl.constexpr, MASSES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's token: the lowest id of the maximum, or the first at which the mass so far exceeds the uniform's."""
    overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk, lane = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    largest = tl.load(chunk_max + row * WIDTH + chunk)
    top = tl.max(largest, 0)
    valid = (top > -_INF) & (top < _INF)
    slot = tl.load(whole + rows * _SLOT + row).to(tl.int64)
    token = tl.zeros((), tl.int32)
    if valid:
        drawn = tl.load(whole + rows * _GREEDY + row) == 0
        picked = tl.min(tl.where(largest == top, chunk, WIDTH), 0)
        rest = tl.zeros((), tl.int64)
        if MASSES:
            scale = scale_of(reals, row, rows)
            limit = tl.zeros((), tl.int32)
            if FILTERED:
                limit = tl.load(thresholds + row)
            if drawn:
                masses = tl.load(chunk_mass + row * WIDTH + chunk)
                relative = weight_of(largest, top, scale).to(tl.float64) * _ROW_UNIT
                row_masses = (masses.to(tl.float64) * relative).to(tl.int64)
                total = tl.sum(row_masses, 0)
                target = tl.load(reals + rows * _UNIFORM + row) * total.to(tl.float64)
                reached = tl.cumsum(row_masses, 0)
                picked = tl.sum((reached <= tl.minimum(target.to(tl.int64), total - 1)).to(tl.int32), 0)
                mine = tl.sum(tl.where(chunk == picked, row_masses, 0), 0)
                before = tl.sum(tl.where(chunk == picked, reached, 0), 0) - mine
                inner = tl.sum(tl.where(chunk == picked, masses, 0), 0)
                share = (target - before.to(tl.float64)) / mine.to(tl.float64)
                rest = tl.minimum((share * inner.to(tl.float64)).to(tl.int64), inner - 1)
        at = picked * CHUNK + lane
        x = tl.load(source + row * stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
        inside = tl.min(tl.where(x == top, lane, CHUNK), 0)
        if MASSES:
            if drawn:
                x_top = tl.max(tl.where(chunk == picked, largest, -_INF), 0)
                reached = tl.cumsum(_kept_mass(x, x_top, top, scale, limit), 0)
                inside = tl.sum((reached <= rest).to(tl.int32), 0)
        token = picked * CHUNK + inside
        if PENALTIES:
            if tl.load(whole + rows * _PENALIZED + row) != 0:
                known = history + slot * STRIDE + token
                tl.store(known, (tl.load(known) + 2) | 1)
    tl.store(token_ids + row, token)
    tl.store(invalid + row, 1 - valid.to(tl.int32))
    tl.store(last_token + slot, token.to(last_token.dtype.element_ty))


@triton.jit
def _reported(
    logits, logits_stride, source, stride, row, at, processed, top, scale, limit,
    VOCAB: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """What a row's log-probabilities are of: the model's logits, or the scores that the filters left."""
    if processed:
        x = tl.load(source + row * stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
        if FILTERED:
            x = tl.where(bits_of(weight_of(x, top, scale)) >= limit, x, -_INF)
    else:
        x = tl.load(logits + row * logits_stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
    return tl.where(at < VOCAB, tl.maximum(x, _LOWEST), -_INF)


@triton.jit
def _reporting(reals, whole, row_top, thresholds, row, rows, FILTERED: tl.constexpr):
    """A row's mode, its largest score, the scale of its weights and of what it reports, and its threshold."""
    processed = tl.load(whole + rows * _PROCESSED + row) != 0
    scale = scale_of(reals, row, rows)
    top, limit = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    if FILTERED:
        top, limit = tl.load(row_top + row), tl.load(thresholds + row)
    return processed, top, scale, tl.where(processed, scale, _LOG2E), limit


@triton.jit(do_not_specialize=["rows"])
def _logprob_chunks_kernel(
    logits, logits_stride, source, stride, reals, whole, row_top, thresholds, token_ids, invalid,
    largest, weights, larger, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of a chunk: its largest value, its weight in units of that, and how many values exceed the chosen token's."""
    overlapped(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if (tl.load(whole + rows * _LOGPROBS + row) >= 0) & (tl.load(invalid + row) == 0):
        processed, top, scale, unit, limit = _reporting(reals, whole, row_top, thresholds, row, rows, FILTERED)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _reported(
            logits, logits_stride, source, stride, row, at, processed, top, scale, limit, VOCAB, FILTERED
        )  # fmt: skip
        token = tl.load(token_ids + row)
        chosen = _reported(
            logits, logits_stride, source, stride, row, token, processed, top, scale, limit, VOCAB, FILTERED
        )  # fmt: skip
        x_top = tl.max(x, 0)
        tl.store(largest + row * WIDTH + chunk, x_top)
        tl.store(weights + row * WIDTH + chunk, tl.sum(weight_of(x, x_top, unit), 0))
        tl.store(larger + row * WIDTH + chunk, tl.sum((x > chosen).to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows"])
def _logprob_rows_kernel(
    logits, logits_stride, source, stride, reals, whole, row_top, thresholds, token_ids, invalid,
    largest, weights, larger, logprobs, ranks, counts, alternative_ids, alternative_logprobs, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, FILTERED: tl.constexpr, ROOM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's log-probabilities: of the chosen token, its rank, and the most likely tokens, ties by id."""
    overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(whole + rows * _LOGPROBS + row)
    rank = tl.zeros((), tl.int32)
    if (wanted >= 0) & (tl.load(invalid + row) == 0):
        processed, top, scale, unit, limit = _reporting(reals, whole, row_top, thresholds, row, rows, FILTERED)
        chunk = tl.arange(0, WIDTH)
        tops = tl.load(largest + row * WIDTH + chunk)
        highest = tl.max(tops, 0)
        mass = tl.sum(tl.load(weights + row * WIDTH + chunk) * weight_of(tops, highest, unit), 0)
        rank = 1 + tl.sum(tl.load(larger + row * WIDTH + chunk), 0)
        token = tl.load(token_ids + row)
        chosen = _reported(
            logits, logits_stride, source, stride, row, token, processed, top, scale, limit, VOCAB, FILTERED
        )  # fmt: skip
        log_mass = tl.log(mass)
        tl.store(logprobs + row, (chosen - highest) * (unit * _LN2) - log_mass)
        if ROOM > 0:
            count = tl.minimum(tl.minimum(wanted, VOCAB), ROOM)
            tl.store(counts + row, count)
            # What was reported last of each chunk: what comes next is smaller, or as large with a higher place.
            last = tl.full((WIDTH,), _INF, tl.float32)
            last_lane = tl.full((WIDTH,), -1, tl.int32)
            lane = tl.arange(0, CHUNK)
            for index in range(0, count):
                best = tl.max(tops, 0)
                picked = tl.min(tl.where(tops == best, chunk, WIDTH), 0)
                x = _reported(
                    logits, logits_stride, source, stride, row, picked * CHUNK + lane,
                    processed, top, scale, limit, VOCAB, FILTERED,
                )  # fmt: skip
                bound = tl.min(tl.where(chunk == picked, last, _INF), 0)
                bound_lane = tl.max(tl.where(chunk == picked, last_lane, -1), 0)
                left = (x < bound) | ((x == bound) & (lane > bound_lane))
                inside = tl.min(tl.where(left & (x == best), lane, CHUNK), 0)
                value = (best - highest) * (unit * _LN2) - log_mass
                tl.store(alternative_ids + row * ROOM + index, picked * CHUNK + inside)
                tl.store(alternative_logprobs + row * ROOM + index, tl.where(best <= _LOWEST, -_INF, value))
                following = tl.max(tl.where((x < best) | ((x == best) & (lane > inside)), x, -_INF), 0)
                tops = tl.where(chunk == picked, following, tops)
                last = tl.where(chunk == picked, best, last)
                last_lane = tl.where(chunk == picked, inside, last_lane)
        else:
            tl.store(counts + row, 0)
    tl.store(ranks + row, rank)
