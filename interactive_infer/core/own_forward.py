"""A transformers model's own forward over a packed step, with our attention in it."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import running


class PackedStep:
    """The attention of a running step: stores a layer's keys and values in its pool, then attends.

    `store(keys, values, key_pool, value_pool)` and `attention(query, key_pool, value_pool, **kwargs)` work on
    `[tokens, heads, head_dim]`.
    """

    def __init__(
        self,
        layers: dict[nn.Module, int],
        pools: list[tuple[Tensor, Tensor]],
        store: Callable[[Tensor, Tensor, Tensor, Tensor], None],
        attention: Callable[..., Tensor],
    ) -> None:
        self._layers = layers
        self._pools = pools
        self._store = store
        self._attention = attention

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        keys, values = self._pools[self._layers[module]]
        self._store(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values)
        out = self._attention(
            query[0].transpose(0, 1),
            keys,
            values,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return out[None]


_evaluated: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = weakref.WeakKeyDictionary()
"""How many are in `evaluating`, and whom the first of them found training."""
_evaluated_lock = threading.Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block dropout and the like are off, also where the owner is in the middle of training: until the last
    of those leaves who are in it, on whatever threads."""
    with _evaluated_lock:
        holders, training = _evaluated.get(model, (0, []))
        if model.training:
            training = [*training, *(module for module in model.modules() if module.training)]
        for module in training:
            module.training = False
        _evaluated[model] = holders + 1, training
    try:
        yield
    finally:
        with _evaluated_lock:
            holders, training = _evaluated.pop(model)
            if holders > 1:
                _evaluated[model] = holders - 1, training
            else:
                for module in training:
                    module.training = True


class OwnForward:
    """Logits of a packed step by the model's modules, called one by one as `model.generate` calls them."""

    def __init__(self, model: PreTrainedModel, layers: dict[nn.Module, int]) -> None:
        self._model = model
        self._modules = frozenset(layers)
        self._select_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, step: PackedStep, input_ids: Tensor, positions: Tensor, logits_at: Tensor) -> Tensor:
        """`[len(logits_at), vocab_size]` of tokens `input_ids` at `positions`, both `[tokens]`."""
        select: dict[str, Tensor] = {}
        if self._select_logits:  # 0 would mean all of them: a chunk that samples nothing asks for one
            select["logits_to_keep"] = logits_at if logits_at.numel() else logits_at.new_zeros(1)
        with running(step, self._modules), evaluating(self._model):
            output = self._model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                # A mask of four dimensions is passed through as it is: none is built, and no packing is looked for.
                attention_mask=torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device),
                use_cache=False,
                **select,
            )
        logits: Tensor = output.logits[0]
        return logits if select else logits.index_select(0, logits_at)
