"""Linear layers for very few tokens, where all that counts is how fast the weights come in from memory.

For one to four tokens, products in plain float32 arithmetic over whole rows of the weight; up to sixteen, Triton's
matrix product with the tokens padded to its smallest tile. Anything else is `torch.nn.functional.linear`.

A launch's weights do not depend on the kernel before it, so while that drains, the programs that start first ask the
L2 cache for the first of their weights (see `launch.can_overlap`): memory is busy in the time that a norm or an
attention over a short text leaves it idle. More than it delivers in that time only stands in the way (a 200 MB
product with 4 KiB of every row asked for took 56 µs instead of 49).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interactive_infer.core.kernels.launch import launch, multiprocessors, options, prefetch
from interactive_infer.core.kernels.triton_ops import silu_mul

MAX_TOKENS = 16
_MAX_VECTORS = 4
_PREFETCH_BYTES = 8 << 20
"""Of a launch's weights, at most: what an H200's memory delivers in about 2 µs."""

_LINE = 128
"""Bytes that one prefetch brings."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Weight rows a program computes, columns it takes at once, Triton's two knobs, bytes of each row it prefetches
    (see `_PREFETCH_BYTES`; none, or whole lines). `vectors`: plain arithmetic instead of matrix products."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    vectors: bool
    prefetch: int = 1024


@cache
def plan(tokens: int, out_features: int, in_features: int, device: torch.device) -> MatrixPlan | None:
    """How to multiply `[tokens, in_features]` by a weight `[out_features, in_features]`; None: leave it to cuBLAS.

    Chosen from what benchmarks/gpu_kernels.py measured on an H200: nine weights from 4 MB to 1.2 GB, 1 to 16 tokens.
    Ours also where it is but equal to cuBLAS alone (4096 → 24576): only ours overlaps with the kernels around it.
    """
    if not 0 < tokens <= MAX_TOKENS or in_features % 16:
        return None
    how = _vectors(tokens, out_features, in_features, device) or _matrix(out_features, in_features, device)
    if 2 * out_features * in_features <= _PREFETCH_BYTES:  # all of it
        return replace(how, prefetch=max(_LINE, triton.next_power_of_2(2 * in_features)))
    return how


def _vectors(tokens: int, out_features: int, in_features: int, device: torch.device) -> MatrixPlan | None:
    """For one token nearly always; for two to four where rows are too few to keep a matrix kernel busy."""
    fill = multiprocessors(device)
    if tokens > 1:
        return MatrixPlan(4, 1024, 4, 1, vectors=True) if tokens <= _MAX_VECTORS and out_features < 12 * fill else None
    if out_features >= 64 * in_features:  # a small model's head: 74 µs as a matrix kernel, 85 so (1024 → 151936)
        return None
    elements = out_features * in_features
    if elements <= (1 << 24 if in_features >= 3072 else 1 << 22):
        # What counts is how soon every multiprocessor has loads under way: small programs, of about 8192 weights.
        rows = min(8, max(2, _power_of_2_below(8192 // in_features)))
        while rows > 2 and 2 * (out_features // rows) < 3 * fill:
            rows //= 2
        return MatrixPlan(rows, 1024, 4, 1, vectors=True)
    # About 16384 weights a program.
    rows = min(16, max(4, _power_of_2_below(16384 // in_features)))
    if rows > 4:
        return MatrixPlan(rows, 512, 4, 1, vectors=True)
    # At most eight programs of the first kind fit on a multiprocessor, three of the second.
    if _balance(out_features, 8, 3 * fill) > _balance(out_features, 4, 8 * fill) + 0.05:
        return MatrixPlan(8, 1024, 8, 1, vectors=True, prefetch=2048)
    return MatrixPlan(4, 1024, 4, 1, vectors=True)


def _matrix(out_features: int, in_features: int, device: torch.device) -> MatrixPlan:
    fill = multiprocessors(device)
    if _balance(out_features, 32, fill) + 0.05 > _balance(out_features, 16, fill):
        return MatrixPlan(32, 256, 4, 4, vectors=False, prefetch=2048 if in_features >= 8192 else 1024)
    if out_features <= 16 * fill:  # one program each, so it needs the more warps
        return MatrixPlan(16, 256, 4, 4, vectors=False)
    return MatrixPlan(16, 256, 2, 5, vectors=False)


def _balance(out_features: int, rows: int, at_once: int) -> float:
    """How full the waves are that programs of `rows` come in, `at_once` of them at a time."""
    programs = -(-out_features // rows)
    return programs / (-(-programs // at_once) * at_once)


def _power_of_2_below(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x` `[T, K]`, `weight` `[N, K]`, `bias` `[N]`; returns `[T, N]`."""
    how = _plan_for(x, weight, x.shape[1])
    if how is None:
        return F.linear(x, weight, bias)
    return multiply(x, weight, bias, how)


def silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """`linear(silu_mul(gate_up), weight)` for `gate_up` `[T, 2 K]`, `weight` `[N, K]`, in one launch for one token.

    Every program computes all of the activation anew, hence not for more of them.
    """
    if gate_up.shape[0] == 1:
        how = _plan_for(gate_up, weight, gate_up.shape[1] // 2)
        if how is not None and how.vectors:
            return multiply(gate_up, weight, None, how, silu=True)
    return linear(silu_mul(gate_up), weight)


def _plan_for(x: Tensor, weight: Tensor, in_features: int) -> MatrixPlan | None:
    if x.dtype == torch.float32 or x.dtype != weight.dtype or not (weight.is_contiguous() and x.is_contiguous()):
        return None
    return plan(x.shape[0], weight.shape[0], in_features, weight.device)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, how: MatrixPlan, *, silu: bool = False) -> Tensor:
    """`linear` by plan `how`; with `silu`, of `silu_mul(x)`."""
    tokens = x.shape[0]
    out_features, in_features = weight.shape
    out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    extra = options(x.device, num_warps=how.num_warps, num_stages=how.num_stages)
    kernel = _vectors_kernel if how.vectors else _matrix_kernel
    row_bytes = in_features * weight.element_size()
    early = _PREFETCH_BYTES // (how.rows * max(_LINE, min(how.prefetch, row_bytes)))
    launch(kernel, triton.cdiv(out_features, how.rows))(
        x, weight, weight if bias is None else bias, out, tokens, OUT=out_features, IN=in_features,
        HAS_BIAS=bias is not None, SILU=silu, ROWS=how.rows, COLUMNS=how.columns,
        TOKENS=triton.next_power_of_2(tokens) if how.vectors else MAX_TOKENS,
        PREFETCH=min(how.prefetch, max(_LINE, triton.next_power_of_2(row_bytes))) if extra["OVERLAP"] else 0,
        EARLY=early,
        STAGES=how.num_stages, **extra,
    )  # fmt: skip
    return out


@triton.jit
def _ask_for(weight, row, IN: tl.constexpr, OUT: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr):
    """Prefetch the first PREFETCH bytes of rows `row` `[ROWS]`, in the first EARLY programs."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    if tl.program_id(0) < EARLY:
        column = tl.arange(0, PREFETCH // 128) * LINE
        at = tl.minimum(row, OUT - 1).to(tl.int64)[:, None] * IN + tl.minimum(column, IN - 1)[None, :]
        prefetch(weight + at)


@triton.jit
def _inputs(x, token, column, tokens, IN: tl.constexpr, SILU: tl.constexpr):
    """`x[token, column]`, or SwiGLU of a gate and an up half."""
    inside = (token < tokens) & (column < IN)
    if SILU:
        gate = tl.load(x + token * (2 * IN) + column, mask=inside, other=0.0)
        up = tl.load(x + token * (2 * IN) + IN + column, mask=inside, other=0.0)
        wide = gate.to(tl.float32)
        active = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
        return (active * up.to(tl.float32)).to(gate.dtype)
    else:
        return tl.load(x + token * IN + column, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _vectors_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PREFETCH > 0:
        _ask_for(weight, row, IN, OUT, PREFETCH, EARLY)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    at = row.to(tl.int64)[None, :, None] * IN
    token = tl.arange(0, TOKENS)[:, None, None]
    acc = tl.zeros([TOKENS, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, IN, COLUMNS, num_stages=STAGES):
        column = (start + tl.arange(0, COLUMNS))[None, None, :]
        inside = (row < OUT)[None, :, None] & (column < IN)
        w = tl.load(weight + at + column, mask=inside, other=0.0, eviction_policy="evict_first")
        acc += _inputs(x, token, column, tokens, IN, SILU).to(tl.float32) * w.to(tl.float32)
    result = tl.sum(acc, 2)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)[None, :]
    token_row = tl.arange(0, TOKENS)[:, None]
    tl.store(
        out + token_row * OUT + row[None, :],
        result.to(out.dtype.element_ty),
        mask=(token_row < tokens) & (row < OUT)[None, :],
    )


@triton.jit(do_not_specialize=["tokens"])
def _matrix_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PREFETCH > 0:
        _ask_for(weight, row, IN, OUT, PREFETCH, EARLY)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.arange(0, TOKENS)[:, None]
    at = row.to(tl.int64)[None, :] * IN
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(0, IN, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < OUT)[None, :] & (column < IN)[:, None]
        w = tl.load(weight + at + column[:, None], mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(_inputs(x, token, column[None, :], tokens, IN, SILU), w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + token * OUT + row[None, :],
        acc.to(out.dtype.element_ty),
        mask=(token < tokens) & (row < OUT)[None, :],
    )
