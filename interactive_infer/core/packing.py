"""Linear layers on a CPU, with their weights laid out once as oneDNN's kernels want them.

`torch.nn.functional.linear` hands oneDNN a plain bfloat16 weight, which it lays out anew at every call: at one token a
step that takes longer than the product. float32 it hands to MKL, which is several times slower than oneDNN for the few
rows of a step where the processor is not Intel's. torch's own inductor freezes weights with the same operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import in_step

_LIMIT_BYTES = 2 << 30
"""Packed weights are a second copy, so larger models go without."""


def can_pack(linears: Iterable[nn.Linear]) -> bool:
    """Whether these layers can be packed, all of them, and a second copy of their weights is affordable."""
    linears = list(linears)
    dtypes = {linear.weight.dtype for linear in linears}
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
        and all(linear.weight.device.type == "cpu" for linear in linears)
        and sum(linear.weight.nbytes for linear in linears) <= _LIMIT_BYTES
    )


class PackedLinear:
    """Linear layers of one input, one below the other, as a single packed layer: `[T, in]` to `[T, out]`.

    Weight and bias are copies: `refresh` makes them anew once a layer's were written to. All layers have a bias, or
    none has.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._weights: list[Tensor] = [linear.weight for linear in linears]
        self._versions: list[int] = []
        self._biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._parameters = (*self._weights, *self._biases)
        self._pack()

    def refresh(self) -> None:
        if [parameter._version for parameter in self._parameters] != self._versions:
            self._pack()

    def forget(self) -> None:
        """Make it anew at the next `refresh`, whatever the versions say: `weight.data` is written to in silence."""
        self._versions = []

    @torch.no_grad()
    def _pack(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]
        weight = self._weights[0].detach() if len(self._weights) == 1 else torch.cat(self._weights)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias: Tensor | None = torch.cat(self._biases) if self._biases else None

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


def pack_linears(model: PreTrainedModel) -> Callable[[], None]:
    """Pack the linear layers of a model on the CPU, for use inside steps; returns the function that undoes it.

    Does nothing where `can_pack` says no. Outside steps, and once a weight was written to, a layer computes as ever.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not can_pack(linears):
        return lambda: None
    for linear in linears:
        linear.forward = _Packed(linear)  # type: ignore[method-assign]

    def undo() -> None:
        for linear in linears:
            del linear.__dict__["forward"]
        linears.clear()

    return undo


def forget_packed(model: PreTrainedModel) -> None:
    """Have layers packed by `pack_linears` compute by their own weights from now on: those were written to."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _Packed):
            forward.forget()


class _Packed:
    """The forward of one linear layer."""

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        self._linear = weakref.ref(linear)  # which refers to this: a reference would be a cycle
        self._version = linear.weight._version
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forget(self) -> None:
        self._version = -1

    def __call__(self, input: Tensor) -> Tensor:
        linear = self._linear()
        assert linear is not None, "forward of a module that is gone"
        if in_step() and linear.weight._version == self._version:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._weight, linear.bias, "none", [], "")
            return result
        return F.linear(input, linear.weight, linear.bias)
