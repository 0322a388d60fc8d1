"""The arithmetic between a decoder's projections, in Triton: norms, SwiGLU, rotary positions, the way into the cache.

Arithmetic is float32 inside. Where transformers' modules round to the model's dtype in between (a norm's normalised
value before the weight, SiLU before the product), so do these. Grids depend on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interactive_infer.core.kernels.launch import launch, multiprocessors, options


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension of `x` `[T, H]`, in the dtype of `x`."""
    x = x.contiguous()
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    launch(_norm_kernel, tokens)(
        x, x, weight, out, out, hidden, eps, ADD=False, BLOCK=triton.next_power_of_2(hidden),
        **options(x.device, num_warps=_warps(hidden)),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` of `total = residual + x`, all `[T, H]`."""
    x, residual = x.contiguous(), residual.contiguous()
    tokens, hidden = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    launch(_norm_kernel, tokens)(
        x, residual, weight, out, total, hidden, eps, ADD=True, BLOCK=triton.next_power_of_2(hidden),
        **options(x.device, num_warps=_warps(hidden)),
    )  # fmt: skip
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up` `[T, 2 I]`, whose first half is the gate; returns `[T, I]`."""
    gate_up = gate_up.contiguous()
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    # Few tokens: more, smaller programs, so that every multiprocessor has some.
    block = 512 if tokens <= 16 else 2048
    launch(_silu_mul_kernel, tokens, triton.cdiv(inner, block))(
        gate_up, out, inner, BLOCK=block, **options(gate_up.device, num_warps=4)
    )
    return out


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    write_to: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate the queries and keys of `qkv` `[T, (heads + 2 kv_heads) * head_dim]`; store keys and values.

    Optionally each head of the queries and keys is RMS-normalised first, with weights `q_norm`, `k_norm` `[head_dim]`
    (both or neither). The rotation (half against half, over the first `rot` dimensions) takes row `positions[t]` of
    `cos` and `sin` `[L, rot]`. Keys and values go to slot `write_to[t]` of the pools `[pages, page_size, kv_heads,
    head_dim]`. Returns the queries, `[T, heads, head_dim]`.
    """
    qkv = qkv.contiguous()
    tokens, head_dim, rot = qkv.shape[0], keys.shape[3], cos.shape[1]
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    # A program takes several heads of a token once there are tokens enough to fill the card.
    fill, block = multiprocessors(qkv.device), 1
    while True:
        programs = triton.cdiv(heads, block) + 2 * triton.cdiv(kv_heads, block)
        if tokens * programs <= 4 * fill or block >= min(8, kv_heads):
            break
        block *= 2
    unused = qkv
    launch(_rope_store_kernel, tokens, programs)(
        qkv, cos, sin, positions, write_to, query, keys, values,
        unused if q_norm is None else q_norm, unused if k_norm is None else k_norm, eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROT=rot, NORMS=q_norm is not None,
        HEAD_BLOCK=block, HALF_BLOCK=triton.next_power_of_2(rot // 2),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - rot, 1)), DIM_BLOCK=triton.next_power_of_2(head_dim),
        # Past a wave, waiting programs keep others off the multiprocessors (512 tokens: 4.0 µs instead of 3.0).
        **options(qkv.device, overlap=tokens * programs <= 8 * fill, num_warps=4 if block >= 4 else 1),
    )  # fmt: skip
    return query


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, write_to: Tensor) -> None:
    """Put `key` and `value` `[T, kv_heads, head_dim]` in the pools' slots `write_to` `[T]`."""
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    tokens, kv_heads, head_dim = key.shape
    launch(_store_kernel, tokens)(
        key, value, keys, values, write_to, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEAD_BLOCK=triton.next_power_of_2(kv_heads),
        DIM_BLOCK=triton.next_power_of_2(head_dim), **options(key.device, num_warps=4),
    )  # fmt: skip


def _warps(width: int) -> int:
    # About 16 elements a thread: a row of 4096 takes 8 warps.
    return min(16, max(1, triton.next_power_of_2(width) // 512))


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    hidden,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    w = tl.load(weight + at, mask=inside, other=0.0)  # no step writes it: it may be read before the wait
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    offset = tl.program_id(0).to(tl.int64) * hidden + at
    value = tl.load(x + offset, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + offset, value, mask=inside)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    normed = (wide * inverse).to(value.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + offset, normed.to(value.dtype), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + token * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * inner + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + token * inner + at, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _rotate(
    source,
    goal,
    cos,
    sin,
    norm,
    eps,
    present,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORMS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Heads from `source` `[heads]` (pointers) to `goal`, where `present`, normalised and rotated."""
    HALF: tl.constexpr = ROT // 2
    half = tl.arange(0, HALF_BLOCK)
    inside = present[:, None] & (half < HALF)[None, :]
    first = tl.load(source[:, None] + half[None, :], mask=inside, other=0.0)
    second = tl.load(source[:, None] + HALF + half[None, :], mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    rest = tl.arange(0, REST_BLOCK)
    rest_inside = present[:, None] & (rest < HEAD_DIM - ROT)[None, :]
    if HEAD_DIM > ROT:
        third = tl.load(source[:, None] + ROT + rest[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    if NORMS:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if HEAD_DIM > ROT:
            square += tl.sum(third * third, 1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        first = (first * inverse).to(dtype).to(tl.float32)
        second = (second * inverse).to(dtype).to(tl.float32)
        first = (first * tl.load(norm + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]).to(dtype)
        second = (second * tl.load(norm + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]).to(dtype)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if HEAD_DIM > ROT:
            weight = tl.load(norm + ROT + rest, mask=rest < HEAD_DIM - ROT, other=0.0).to(tl.float32)
            third = (third * inverse).to(dtype).to(tl.float32) * weight[None, :]
    cos_first = tl.load(cos + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    turned_first = first * cos_first - second * sin_first
    turned_second = second * cos_second + first * sin_second
    tl.store(goal[:, None] + half[None, :], turned_first.to(dtype), mask=inside)
    tl.store(goal[:, None] + HALF + half[None, :], turned_second.to(dtype), mask=inside)
    if HEAD_DIM > ROT:
        tl.store(goal[:, None] + ROT + rest[None, :], third.to(dtype), mask=rest_inside)


@triton.jit
def _rope_store_kernel(
    qkv,
    cos,
    sin,
    positions,
    write_to,
    query,
    keys,
    values,
    q_norm,
    k_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORMS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (token, block of heads): query heads first, then key heads, then value heads."""
    Q_PROGRAMS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    K_PROGRAMS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    member = tl.arange(0, HEAD_BLOCK)
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if program < Q_PROGRAMS:
        head = program * HEAD_BLOCK + member
        row = tl.load(positions + token) * ROT
        goal = query + (token * HEADS + head) * HEAD_DIM
        _rotate(
            source + head * HEAD_DIM, goal, cos + row, sin + row, q_norm, eps, head < HEADS,
            HEAD_DIM, ROT, NORMS, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif program < Q_PROGRAMS + K_PROGRAMS:
        head = (program - Q_PROGRAMS) * HEAD_BLOCK + member
        row = tl.load(positions + token) * ROT
        goal = keys + (tl.load(write_to + token) * KV_HEADS + head) * HEAD_DIM
        _rotate(
            source + (HEADS + head) * HEAD_DIM, goal, cos + row, sin + row, k_norm, eps, head < KV_HEADS,
            HEAD_DIM, ROT, NORMS, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        head = (program - Q_PROGRAMS - K_PROGRAMS) * HEAD_BLOCK + member
        dim = tl.arange(0, DIM_BLOCK)
        inside = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        value = tl.load(source + ((HEADS + KV_HEADS + head) * HEAD_DIM)[:, None] + dim[None, :], mask=inside)
        goal = values + (tl.load(write_to + token) * KV_HEADS + head) * HEAD_DIM
        tl.store(goal[:, None] + dim[None, :], value, mask=inside)


@triton.jit
def _store_kernel(
    key,
    value,
    keys,
    values,
    write_to,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    dim = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < KV_HEADS) & (dim < HEAD_DIM)
    goal = (tl.load(write_to + token) * KV_HEADS + head) * HEAD_DIM + dim
    k = tl.load(key + token * key_stride_token + head * key_stride_head + dim, mask=inside)
    v = tl.load(value + token * value_stride_token + head * value_stride_head + dim, mask=inside)
    tl.store(keys + goal, k, mask=inside)
    tl.store(values + goal, v, mask=inside)
