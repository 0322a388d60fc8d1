"""Weights of linear layers that take the same input, moved into one storage, so that one product does for all of them.

The parameters stay the objects they are and become views of it: the owner's training, `state_dict` and saving see no
difference. While it is made, the weights of one such group exist twice, never more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_holders: weakref.WeakKeyDictionary[nn.Linear, int] = weakref.WeakKeyDictionary()  # by a group's first layer
_holders_lock = threading.Lock()


class JoinedLinears:
    """`weight` `[sum of the layers' outputs, inputs]` and `bias` of layers, whose own are views of these.

    Several engines may hold one model: the first joins, the last to leave separates.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = list(linears)
        with _holders_lock:
            self.weight = _join([linear.weight for linear in linears])
            biases = [linear.bias for linear in linears if linear.bias is not None]
            self.bias = _join(biases) if biases else None
            _holders[linears[0]] = _holders.get(linears[0], 0) + 1

    def separate(self) -> None:
        """Give each layer a storage of its own again, unless another decoder relies on the common one."""
        with _holders_lock:
            # The collector takes engine and model together, and clears weak references first: the count is gone then.
            left = _holders.pop(self._linears[0], 1) - 1
            if left:
                _holders[self._linears[0]] = left
                return
            for linear in self._linears:
                _separate(linear.weight, self.weight)
                if self.bias is not None:
                    _separate(linear.bias, self.bias)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0].data
    rows = sum(parameter.shape[0] for parameter in parameters)
    storage, offset, joined = first.untyped_storage(), first.storage_offset(), True
    for parameter in parameters:
        joined &= parameter.untyped_storage().data_ptr() == storage.data_ptr() and parameter.storage_offset() == offset
        offset += parameter.numel()
    if joined and len(parameters) > 1:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        part = whole[start : start + parameter.shape[0]]
        part.copy_(parameter.data)
        parameter.data = part
        start += parameter.shape[0]
    return whole


def _separate(parameter: Tensor, whole: Tensor) -> None:
    """A weight that somebody replaced meanwhile is left alone."""
    if parameter.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        parameter.data = parameter.data.clone()
