"""Rotary embeddings that look at the longest position of the whole batch, made a function of each position alone.

transformers' "dynamic" and "longrope" types pick their frequencies by the longest position in the call. Packed beside
a longer sequence a short one would get other frequencies than alone, and it would change them half-way through its own
text, over keys that were cached with the old ones. Inside a step they are therefore fixed by the longest text that the
engine admits (as vLLM does from `max_model_len`). Outside steps nothing changes.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from interactive_infer.core.attention.interface import in_step
from interactive_infer.errors import UnsupportedModelError

_LOOK_AT_BATCH = ("dynamic", "longrope")


class _Here(threading.local):
    """Whether this thread wants the fixed embeddings outside of steps too."""

    fixed = False


_here = _Here()


@contextmanager
def fixed_rope() -> Iterator[None]:
    """Within the block, on this thread, embeddings are as in a step: what a step's logits are to be compared with."""
    before, _here.fixed = _here.fixed, True
    try:
        yield
    finally:
        _here.fixed = before


def fix_rope(model: PreTrainedModel, max_length: int) -> Callable[[], None]:
    """Fix such embeddings of `model` for texts of up to `max_length` tokens; returns the function that undoes it.

    Raises UnsupportedModelError where the type is set per kind of layer, whose formula is not known here.
    """
    fixed: list[nn.Module] = []
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            if any(kind in name for name in rope_type.values() for kind in _LOOK_AT_BATCH):
                raise UnsupportedModelError(
                    f"model type {model.config.model_type!r}: its rope types {rope_type} depend on the longest text "
                    "in the batch, per kind of layer; such a model cannot be batched here"
                )
        elif isinstance(rope_type, str) and any(kind in rope_type for kind in _LOOK_AT_BATCH):
            _fix(module, rope_type, max_length)
            fixed.append(module)

    def undo() -> None:
        for module in fixed:
            module.__dict__.pop("forward", None)

    return undo


def _fix(module: nn.Module, rope_type: str, max_length: int) -> None:
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, torch.device("cpu"), seq_len=max_length)
    if rope_type == "longrope":  # its attention factor does not depend on the length
        scaling = module.attention_scaling
    # The undecorated forward reads inv_freq, attention_scaling and config of what it is given, nothing else.
    frozen = SimpleNamespace(config=module.config, attention_scaling=scaling, inv_freq=inv_freq)
    undecorated = inspect.unwrap(type(module).forward)
    owner = weakref.ref(module)  # a bound method kept on the module would be a reference cycle

    def forward(x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if in_step() or _here.fixed:
            frozen.inv_freq = frozen.inv_freq.to(x.device)
            return undecorated(frozen, x, position_ids, **kwargs)
        module = owner()
        assert module is not None, "forward of a module that is gone"
        return type(module).forward(module, x, position_ids, **kwargs)

    module.forward = forward
