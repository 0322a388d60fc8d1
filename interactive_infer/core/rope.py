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

    Raises UnsupportedModelError where the type is set per kind of layer, whose formula is not known here, and where
    another engine holds the model and fixed it for texts of another length.
    """
    fixed: list[nn.Module] = []

    def undo() -> None:
        while fixed:
            module = fixed.pop()
            forward: FixedForward = module.__dict__["forward"]
            forward.holders -= 1
            if not forward.holders:
                del module.__dict__["forward"]

    try:
        for module in model.modules():
            rope_type = getattr(module, "rope_type", None)
            if isinstance(rope_type, dict):
                if any(kind in name for name in rope_type.values() for kind in _LOOK_AT_BATCH):
                    raise UnsupportedModelError(
                        f"model type {module.config.model_type!r}: its rope types {rope_type} depend on the longest "
                        "text in the batch, per kind of layer; such a model cannot be batched here"
                    )
            elif isinstance(rope_type, str) and any(kind in rope_type for kind in _LOOK_AT_BATCH):
                _fix(module, rope_type, max_length)
                fixed.append(module)
    except BaseException:
        undo()
        raise
    return undo


def _fix(module: nn.Module, rope_type: str, max_length: int) -> None:
    config: Any = module.config
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=max_length)
    if rope_type == "longrope":  # its attention factor does not depend on the length
        scaling = module.attention_scaling
    present = module.__dict__.get("forward")
    if not isinstance(present, FixedForward):
        module.forward = FixedForward(module, inv_freq, scaling)
    elif torch.equal(present.frozen.inv_freq.cpu(), inv_freq) and present.frozen.attention_scaling == scaling:
        present.holders += 1
    else:
        raise UnsupportedModelError(
            f"model type {config.model_type!r}: its rope type {rope_type!r} depends on the longest text, and "
            f"another engine holds this model object for texts of another length than {max_length:,} tokens; load "
            "both with the same kv_cache_tokens=, or close the other one"
        )


class FixedForward:
    """The fixed forward of one module, in place of its own; `holders` counts the engines that want it."""

    def __init__(self, module: nn.Module, inv_freq: torch.Tensor, scaling: float) -> None:
        self.holders = 1
        # The undecorated forward reads these three of what it is given, nothing else.
        self.frozen = SimpleNamespace(config=module.config, attention_scaling=scaling, inv_freq=inv_freq)
        self._undecorated = inspect.unwrap(type(module).forward)
        self._module = weakref.ref(module)  # which refers to this: a reference would be a cycle

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if in_step() or _here.fixed:
            self.frozen.inv_freq = self.frozen.inv_freq.to(x.device)
            return self._undecorated(self.frozen, x, position_ids, **kwargs)
        module = self._module()
        assert module is not None, "forward of a module that is gone"
        return type(module).forward(module, x, position_ids, **kwargs)
