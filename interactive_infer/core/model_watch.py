"""Whether a model is still what it was: the modules and weights that were looked at, and nobody's hook among them.

Something that runs a model's layers other than by calling them would pass by a hook, a replaced layer or a replaced
weight in silence. This notices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from interactive_infer.core.rope import FixedForward

_CAPTURE = "transformers.utils.output_capturing"
"""transformers leaves its hooks for `output_hidden_states=True` in place; they act only during such a call."""


class ModelWatch:
    """Watches `model` and all below it. What `fix_rope` put in place of a module's forward is part of the model."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name or "the model", module) for name, module in model.named_modules()]
        everywhere = torch.nn.modules.module
        self._hooks = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        self._hooks += [hooks for _, m in named for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooked = ["every module"] * 2 + [name for name, _ in named for _ in range(2)]
        # Where something is kept, under which name, what it was, where its numbers were, and whose it is.
        watched: list[tuple[Mapping[str, Any], str, Any, int | None, str]] = []
        for name, module in named:
            watched.append((vars(module), "forward", None, None, name))
            watched += [(module._modules, key, child, None, name) for key, child in module._modules.items()]
            watched += [
                (module._parameters, key, weight, weight.data_ptr(), name)
                for key, weight in module._parameters.items()
                if weight is not None
            ]
        self._watched = watched
        self._next = 0
        self._changed: dict[int, str] = {}  # by index, as `look` has last seen it

    def hook(self) -> str | None:
        """A forward hook that was not there, in words; None when there is none."""
        if any(self._hooks):
            for hooks, name in zip(self._hooks, self._hooked, strict=True):
                if any(getattr(hook, "__module__", None) != _CAPTURE for hook in list(hooks.values())):
                    return f"a forward hook on {name}"
        return None

    def change(self) -> str | None:
        """What is different now, in words; None when nothing is."""
        return self.hook() or next(iter(self._differences(0, len(self._watched)).values()), None)

    def look(self, share: float) -> str | None:
        """As `change`, but only a `share` of the model is looked at now (all of it from 1 on), by turns; the rest is as
        it was at the last look. For whoever asks often, on a thread that has others to serve."""
        size = len(self._watched)
        left = min(math.ceil(share * size), size)
        while left:
            start, stop = self._next, min(self._next + left, size)
            if self._changed:
                self._changed = {at: what for at, what in self._changed.items() if not start <= at < stop}
            self._changed |= self._differences(start, stop)
            left -= stop - start
            self._next = stop % size
        return self.hook() or next(iter(self._changed.values()), None)

    def _differences(self, start: int, stop: int) -> dict[int, str]:
        found: dict[int, str] = {}
        for index, (where, key, was, address, name) in enumerate(self._watched[start:stop], start):
            now = where.get(key)
            if now is was and (address is None or now.data_ptr() == address):
                continue
            if key != "forward":
                found[index] = f"another {key} in {name}" if address is None else f"another {key} of {name}"
            elif not isinstance(now, FixedForward):
                found[index] = f"a forward of its own on {name}"
        return found
