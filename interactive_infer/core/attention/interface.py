"""How a transformers model comes to call our attention, and only while it runs a step of ours.

A model's configuration names its attention function. `attach` renames it to a function of ours that remembers the
one it replaces: inside a step it attends over the paged cache, outside (the owner's own `model.generate`, training)
it hands the call to the original, and so does the mask function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    and_masks,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PREFIX = "interactive_infer_over_"


class StepAttention(Protocol):
    """What a running step does with a layer's queries, keys and values."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Store keys and values, attend, return `[1, tokens, heads, head_dim]`.

        `query` is `[1, heads, tokens, head_dim]`, `key` and `value` are `[1, kv_heads, tokens, head_dim]`. `kwargs`
        are the attention function's: scaling, sliding_window, softcap, s_aux and what else the model passes.
        """
        ...


class _Current(threading.local):
    """The step that this thread is running. Per thread: the owner may use the model on another one meanwhile."""

    step: StepAttention | None = None
    modules: frozenset[nn.Module] | None = None
    longest_window: int | None = None


_current = _Current()


@contextmanager
def running(step: StepAttention, modules: frozenset[nn.Module] | None = None) -> Iterator[None]:
    """Within the block, on this thread, attention calls go to `step`: all of them, or those of `modules` alone."""
    before = _current.step, _current.modules
    _current.step, _current.modules = step, modules
    try:
        yield
    finally:
        _current.step, _current.modules = before


@contextmanager
def windows_up_to(tokens: int) -> Iterator[None]:
    """Within the block, on this thread, sliding windows are no longer than `tokens`, inside a step and outside.

    The model stays as it is: what is cut is the window that it passes to attention and mask functions.
    """
    before, _current.longest_window = _current.longest_window, tokens
    try:
        yield
    finally:
        _current.longest_window = before


def in_step() -> bool:
    """Whether this thread is running a step."""
    return _current.step is not None


_holders: dict[int, int] = {}  # engines that hold a configuration, by its id, while there are any
_holders_lock = threading.Lock()


def attach(model: PreTrainedModel) -> Callable[[], None]:
    """Route the model's attention through ours; returns the function that undoes it.

    Several engines may hold one model: the first renames, the last to leave restores.
    """
    configs = list(
        {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    )
    with _holders_lock:
        for config in configs:
            name = getattr(config, "_attn_implementation", None) or "eager"
            if not name.startswith(_PREFIX):
                _register(name)
                config._attn_implementation = _PREFIX + name
            _holders[id(config)] = _holders.get(id(config), 0) + 1

    def detach() -> None:  # refers to the configurations, so their ids stay theirs
        with _holders_lock:
            while configs:
                config = configs.pop()
                left = _holders.pop(id(config)) - 1
                if left:
                    _holders[id(config)] = left
                else:
                    config._attn_implementation = config._attn_implementation.removeprefix(_PREFIX)

    return detach


def _register(original: str) -> None:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        step, modules, longest = _current.step, _current.modules, _current.longest_window
        if longest is not None and kwargs.get("sliding_window") is not None:
            kwargs["sliding_window"] = min(kwargs["sliding_window"], longest)
        if step is not None and (modules is None or module in modules):
            return step.attend(module, query, key, value, **kwargs), None
        if original == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = ALL_ATTENTION_FUNCTIONS[original]
        result: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, attention_mask, **kwargs)
        return result

    def mask(*args: Any, **kwargs: Any) -> Any:
        if _current.step is not None or original not in ALL_MASK_ATTENTION_FUNCTIONS:
            return None
        longest = _current.longest_window
        if longest is not None and (kwargs.get("local_size") or 0) > longest:
            kwargs["local_size"] = longest
            kwargs["mask_function"] = and_masks(kwargs["mask_function"], sliding_window_overlay(longest))
        return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)

    AttentionInterface.register(_PREFIX + original, attention)
    AttentionMaskInterface.register(_PREFIX + original, mask)
