"""bfloat16 linear layers on a CPU, with their weights laid out once as oneDNN's kernels want them.

`torch.nn.functional.linear` hands oneDNN a plain weight, which it lays out anew at every call: at one token a step that
takes longer than the product.
torch's own inductor freezes weights with the same two operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import in_step

_LIMIT_BYTES = 2 << 30
"""Packed weights are a second copy, so larger models go without."""


def pack_linears(model: PreTrainedModel) -> Callable[[], None]:
    """Pack the linear layers of a bfloat16 model on the CPU, for use inside steps; returns the function that undoes it.

    Does nothing for any other model, for one of more than 2 GiB, and where torch was built without oneDNN. Outside
    steps, and once a weight was written to, a layer computes as ever.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    packable = (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and all(linear.weight.device.type == "cpu" and linear.weight.dtype == torch.bfloat16 for linear in linears)
        and sum(linear.weight.nbytes for linear in linears) <= _LIMIT_BYTES
    )
    if not packable:
        return lambda: None
    for linear in linears:
        linear.forward = _Packed(linear)  # type: ignore[method-assign]

    def undo() -> None:
        for linear in linears:
            del linear.__dict__["forward"]
        linears.clear()

    return undo


class _Packed:
    """The forward of one linear layer."""

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        self._linear = weakref.ref(linear)  # which refers to this: a reference would be a cycle
        self._version = linear.weight._version
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear = self._linear()
        assert linear is not None, "forward of a module that is gone"
        if in_step() and linear.weight._version == self._version:
            return torch.ops.mkldnn._linear_pointwise(input, self._weight, linear.bias, "none", [], "")
        return F.linear(input, linear.weight, linear.bias)
