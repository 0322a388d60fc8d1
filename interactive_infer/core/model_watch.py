"""Whether a model is still what it was: the modules and weights that were looked at, and nobody's hook among them.

Something that runs a model's layers other than by calling them would pass by a hook, a replaced layer or a replaced
weight in silence. This notices, in some tens of microseconds for a model of 30 layers.
"""

from __future__ import annotations

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
        self._own = [(name, vars(module)) for name, module in named]
        self._children = [
            (name, module._modules, key, child) for name, module in named for key, child in module._modules.items()
        ]
        self._weights = [
            (name, module._parameters, key, weight, weight.data_ptr())
            for name, module in named
            for key, weight in module._parameters.items()
            if weight is not None
        ]

    def hook(self) -> str | None:
        """A forward hook that was not there, in words; None when there is none. Takes a tenth of `change`."""
        if any(self._hooks):
            for hooks, name in zip(self._hooks, self._hooked, strict=True):
                if any(getattr(hook, "__module__", None) != _CAPTURE for hook in list(hooks.values())):
                    return f"a forward hook on {name}"
        return None

    def change(self) -> str | None:
        """What is different now, in words; None when nothing is."""
        if (hook := self.hook()) is not None:
            return hook
        for name, own in self._own:
            if "forward" in own and not isinstance(own["forward"], FixedForward):
                return f"a forward of its own on {name}"
        for name, children, key, child in self._children:
            if children.get(key) is not child:
                return f"another {key} in {name}"
        for name, parameters, key, weight, address in self._weights:
            if parameters.get(key) is not weight or weight.data_ptr() != address:
                return f"another {key} of {name}"
        return None
