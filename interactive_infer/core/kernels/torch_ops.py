"""What a decoder computes between its projections, in plain PyTorch: the ops for CPUs, and the reference of any other.

`T` are the tokens of a step, `D` is the head size. Nothing here waits for the device, and no shape depends on a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` `[..., H]` over its root mean square, times `weight` `[H]`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and `residual + x` itself; both `[T, H]`."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` `[T, I]`, of which `gate_up` `[T, 2 I]` holds gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: `[T, K]`, `[N, K]`, `[N]` to `[T, N]`."""
    return F.linear(x, weight, bias)


def silu_mul_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """`linear(silu_mul(gate_up), weight)`: `[T, 2 I]`, `[N, I]` to `[T, N]`."""
    return F.linear(silu_mul(gate_up), weight)


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, write_to: Tensor) -> None:
    """Put `key` and `value` `[T, kv_heads, D]` into the pools `[pages, page_size, kv_heads, D]`, token t at slot
    `write_to[t]` of the flattened pages."""
    keys.view(-1, *keys.shape[2:]).index_copy_(0, write_to, key)
    values.view(-1, *values.shape[2:]).index_copy_(0, write_to, value)


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
    """Turn queries and keys, put keys and values into their pools; returns the queries `[T, heads, D]`.

    `qkv` `[T, (heads + 2 kv_heads) D]`: queries, keys, values. `cos`, `sin` `[positions, rotated]`: a row for each
    position, both halves of a row alike. The first `rotated` of the `D` dimensions are turned, half against half.
    `keys`, `values`, `write_to`: as for `store`. `q_norm`, `k_norm` `[D]`: weights of an RMS norm of each head before
    it is turned.
    """
    cos, sin = _rows(cos, sin, positions)
    return _rope_store(qkv, cos, sin, write_to, keys, values, heads, kv_heads, q_norm, k_norm, eps)


class StepOps:
    """The same functions for one step, which looks up its positions once rather than at every layer."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_mul = staticmethod(silu_mul)
    linear = staticmethod(linear)
    silu_mul_linear = staticmethod(silu_mul_linear)

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def rope_store(
        self,
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
        """The module's `rope_store`; `positions` must be the same at every call."""
        rows = self._found.get(id(cos))
        if rows is None:
            rows = self._found[id(cos)] = _rows(cos, sin, positions)
        return _rope_store(qkv, *rows, write_to, keys, values, heads, kv_heads, q_norm, k_norm, eps)


def _rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `positions` as `[T, 1, rotated]`, the sine negative in the first half: what x times it is added to."""
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    sin[:, : sin.shape[1] // 2].neg_()
    return cos[:, None], sin[:, None]


def _rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_to: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    if q_norm is None or k_norm is None:
        x = split[:, : heads + kv_heads]
    else:
        x = torch.cat(
            (rms_norm(split[:, :heads], q_norm, eps), rms_norm(split[:, heads : heads + kv_heads], k_norm, eps)), 1
        )
    rotated = cos.shape[2]
    if rotated == x.shape[2]:
        x = torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)
    else:
        turned, kept = x[..., :rotated], x[..., rotated:]
        x = torch.cat((torch.addcmul(turned * cos, turned.roll(rotated // 2, -1), sin), kept), -1)
    store(x[:, heads:], split[:, heads + kv_heads :], keys, values, write_to)
    return x[:, :heads]
