"""The forward of decoders built like Llama, over transformers' own modules: fewer and larger operations for a step.

Embedding; per layer a norm, one product for queries, keys and values, positions and the store into the cache, paged
attention, the output product, residual and norm, one product for gate and up, the way down; a norm and the head. A
model is taken only where every module is exactly of a class whose arithmetic is known here; any other runs through its
own forward. The modules stay as they are, for their owner's use of the model outside steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import _current
from interactive_infer.core.joining import JoinedLinears
from interactive_infer.core.model_watch import ModelWatch
from interactive_infer.core.packing import PackedLinear, can_pack
from interactive_infer.core.rope import fixed_rope

WeightLayout = Literal["as they are", "joined", "packed"]
"""Of weights: untouched; those of one input in one storage, of which the originals become views; packed copies."""

_LEAST_POSITIONS = 64
"""Rows of the position table at least: the check at load time has texts of up to 29 tokens, whatever the limit is."""


class Ops(Protocol):
    """What is computed between a layer's products: `core.kernels.torch_ops`, where each is described, or its like."""

    @property
    def rms_norm(self) -> Callable[[Tensor, Tensor, float], Tensor]: ...
    @property
    def add_rms_norm(self) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]: ...
    @property
    def silu_mul(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]: ...
    @property
    def silu_mul_linear(self) -> Callable[[Tensor, Tensor], Tensor]: ...
    @property
    def rope_store(self) -> Callable[..., Tensor]: ...


class Attend(Protocol):
    """Attention of layer `layer` over its pools: `query` `[T, heads, D]` to the same shape."""

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, /, *, scaling: float, sliding_window: int | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Family:
    """Models of one type. `prefix` begins their classes' names; `window` finds an attention's window."""

    prefix: str
    window: Callable[[Any], int | None] = lambda attention: attention.sliding_window


# Llama's source in transformers, but for windows, biases, Qwen3's norms of each head of queries and keys, and SmolLM3's
# layers without positions.
_FAMILIES = {
    "llama": _Family("Llama", window=lambda attention: None),
    "mistral": _Family("Mistral", window=lambda attention: attention.config.sliding_window),
    "ministral": _Family("Ministral"),
    "cwm": _Family("Cwm"),
    "qwen2": _Family("Qwen2"),
    "qwen3": _Family("Qwen3"),
    "smollm3": _Family("SmolLM3"),
}


def fuse(
    model: PreTrainedModel, attentions: Iterable[nn.Module], *, max_length: int, layout: WeightLayout
) -> FusedDecoder | str:
    """The fused forward of `model` for texts of up to `max_length` tokens; or in words why it has none.

    `attentions`: its attention modules in the order of their pools. "packed" takes a second copy of the weights where
    it can (see `packing.can_pack`), and else leaves them as they are. `undo` of the result gives the model back.
    """
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        return f"layers of model type {model.config.model_type!r} are not known"
    reason = _unknown_module(model, family, list(attentions)) or _unusual_tensor(model)
    if reason is not None:
        return reason
    if (change := ModelWatch(model).change()) is not None:
        return f"there was {change} at load"
    if layout == "packed" and not can_pack(module for module in model.modules() if type(module) is nn.Linear):
        layout = "as they are"
    decoder = FusedDecoder(model, family.window)
    try:
        decoder.prepare(max_length, layout)
    except BaseException:
        decoder.undo()
        raise
    return decoder


class FusedDecoder:
    """A model's forward over packed tokens and paged caches; made by `fuse`.

    Nothing in `hidden` and `logits` waits for the device or depends on a tensor's values, so both can be captured in a
    CUDA graph. Weights are read where they lie: what their owner writes to them holds from the next step on, for packed
    copies after `refresh`.
    """

    def __init__(self, model: PreTrainedModel, window: Callable[[Any], int | None]) -> None:
        self._model: Any = model
        self._window = window
        self._layers: list[_Layer] = []
        self._joined: list[JoinedLinears] = []
        self._packed: list[PackedLinear] = []

    @torch.no_grad()
    def prepare(self, max_length: int, layout: WeightLayout) -> None:
        """Lay the weights out and compute the positions' table."""
        model = self._model
        cos, sin = _positions(model, max(max_length, _LEAST_POSITIONS))
        still = torch.ones_like(cos), torch.zeros_like(sin)
        self._embedding: Tensor = model.model.embed_tokens.weight
        modules = list(model.model.layers)
        norms = [_Norm.of(module.input_layernorm) for module in modules] + [_Norm.of(model.model.norm)]
        self._first_norm = norms[0]
        for module, next_norm in zip(modules, norms[1:], strict=True):
            attention = module.self_attn
            positions = (cos, sin) if getattr(attention, "use_rope", True) else still
            norm = _Norm.of(module.post_attention_layernorm)
            self._layers.append(_Layer.of(attention, *positions, self._products(module, layout), norm, next_norm))
        self._head = self._product([model.lm_head], layout)
        kinds = [(self._window(layer.attention), layer.kind) for layer in self._layers]
        self._one_of_each = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
        self._watch = ModelWatch(model)

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        write_to: Tensor,
        pools: list[tuple[Tensor, Tensor]],
        attend: Attend,
        ops: Ops,
        *,
        one_of_each: bool = False,
    ) -> Tensor:
        """The normed last hidden states `[T, H]` of tokens `input_ids` `[T]` at `positions` `[T]`.

        Their keys and values go to slots `write_to` `[T]` of each layer's pools `[pages, page_size, kv_heads, D]`
        before the layer attends. Positions are below `max_length`. With `one_of_each` only the first of all layers
        that ask the same of `attend` and `ops` runs: what it gives means nothing.
        """
        residual = F.embedding(input_ids, self._embedding)
        x = ops.rms_norm(residual, self._first_norm.weight, self._first_norm.eps)
        for i in self._one_of_each if one_of_each else range(len(self._layers)):
            layer, (keys, values) = self._layers[i], pools[i]
            query = ops.rope_store(
                layer.products.qkv(x, ops),
                layer.cos,
                layer.sin,
                positions,
                write_to,
                keys,
                values,
                heads=layer.heads,
                kv_heads=layer.kv_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=layer.norm.eps,
            )
            window = self._window(layer.attention)
            if window is not None and _current.longest_window is not None:  # the check at load time cuts windows
                window = min(window, _current.longest_window)
            x = attend(i, query, keys, values, scaling=layer.scaling, sliding_window=window)
            x = layer.products.output(x.flatten(1), ops)
            x, residual = ops.add_rms_norm(x, residual, layer.norm.weight, layer.norm.eps)
            x = layer.products.down(layer.products.gate_up(x, ops), ops)
            x, residual = ops.add_rms_norm(x, residual, layer.next_norm.weight, layer.next_norm.eps)
        return x

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """`[rows, H]` of `hidden` to `[rows, vocab_size]`."""
        return self._head(hidden, ops)

    def change(self) -> str | None:
        """What its owner did to the model that this forward would miss (a hook, another layer), in words; or None.

        The model's own forward is right meanwhile, over the same caches.
        """
        return self._watch.change()

    def look(self, share: float) -> str | None:
        """As `change`, a `share` of the model at a time (`ModelWatch.look`)."""
        return self._watch.look(share)

    def refresh(self) -> None:
        """Make packed copies of weights that were written to anew."""
        for packed in self._packed:
            packed.refresh()

    def forget_copies(self) -> None:
        """Make packed copies anew at the next `refresh`, whether weights seem written to or not."""
        for packed in self._packed:
            packed.forget()

    def undo(self) -> None:
        """Give the model back as it was: joined weights are separated, unless another engine's decoder uses them."""
        while self._joined:
            self._joined.pop().separate()
        self.__dict__.clear()

    def _products(self, module: Any, layout: WeightLayout) -> _Products:
        attention, mlp = module.self_attn, module.mlp
        return _Products(
            qkv=self._product([attention.q_proj, attention.k_proj, attention.v_proj], layout),
            output=self._product([attention.o_proj], layout),
            gate_up=self._product([mlp.gate_proj, mlp.up_proj], layout),
            down=self._product([mlp.down_proj], layout, after_silu_mul=True),
        )

    def _product(self, linears: list[nn.Linear], layout: WeightLayout, *, after_silu_mul: bool = False) -> _Product:
        """The function of `linears`, side by side; with `after_silu_mul`, of gate and up."""
        if layout == "packed":
            packed = PackedLinear(linears)
            self._packed.append(packed)
            if after_silu_mul:
                return lambda x, ops: packed(ops.silu_mul(x))
            return lambda x, ops: packed(x)
        parameters: list[tuple[Tensor, Tensor | None]] = [(linear.weight, linear.bias) for linear in linears]
        if layout == "joined" and len(linears) > 1:
            self._joined.append(JoinedLinears(linears))
            parameters = [(self._joined[-1].weight, self._joined[-1].bias)]
        if len(parameters) > 1:
            return lambda x, ops: torch.cat([ops.linear(x, *each) for each in parameters], dim=-1)
        ((weight, bias),) = parameters
        if not after_silu_mul:
            return lambda x, ops: ops.linear(x, weight, bias)
        if bias is not None:
            return lambda x, ops: ops.linear(ops.silu_mul(x), weight, bias)
        return lambda x, ops: ops.silu_mul_linear(x, weight)


_Product = Callable[[Tensor, Ops], Tensor]


@dataclass(frozen=True, slots=True)
class _Products:
    """What a layer multiplies by its weights; `down` takes what `gate_up` gives, and activates it first."""

    qkv: _Product
    output: _Product
    gate_up: _Product
    down: _Product


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @staticmethod
    def of(module: Any) -> _Norm:
        return _Norm(module.weight, module.variance_epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer. `norm` comes after its attention, `next_norm` after all of it."""

    attention: nn.Module
    cos: Tensor
    sin: Tensor
    products: _Products
    norm: _Norm
    next_norm: _Norm
    heads: int
    kv_heads: int
    scaling: float
    q_norm: Tensor | None
    k_norm: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """In what layers of one model may differ, but for their windows and the numbers in their weights."""
        linears = (getattr(self.attention, name) for name in ("q_proj", "o_proj"))
        biases = [linear.bias is not None for linear in linears]
        return self.heads, self.kv_heads, self.scaling, self.q_norm is None, self.norm.eps, self.next_norm.eps, *biases

    @staticmethod
    def of(
        attention: Any,
        cos: Tensor,
        sin: Tensor,
        products: _Products,
        norm: _Norm,
        next_norm: _Norm,
    ) -> _Layer:
        heads, kv_heads = (linear.out_features // attention.head_dim for linear in (attention.q_proj, attention.k_proj))
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
        return _Layer(attention, cos, sin, products, norm, next_norm, heads, kv_heads, attention.scaling, *norms)


def _positions(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[length, rotated]` in the model's dtype, as its own rotary embedding has them in a step."""
    weight = model.model.embed_tokens.weight
    with fixed_rope():
        cos, sin = model.model.rotary_emb(weight[:1, None], torch.arange(length, device=weight.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


def _unknown_module(model: Any, family: _Family, attentions: list[nn.Module]) -> str | None:
    """The first module that is not exactly of the family's class, in words; None when all are."""
    home = f"transformers.models.{model.config.model_type}.modeling_{model.config.model_type}"

    def unlike(module: Any, name: str) -> str | None:
        kind = type(module)
        if kind is {"Linear": nn.Linear, "Embedding": nn.Embedding}.get(name):
            return None
        if kind.__module__ == home and kind.__name__ == family.prefix + name:
            return None
        return f"{kind.__name__} is not the {name} of model type {model.config.model_type!r} that is known"

    expected = [(model, "ForCausalLM"), (getattr(model, "lm_head", None), "Linear"), (model.base_model, "Model")]
    for module, name in expected:
        if (reason := unlike(module, name)) is not None:
            return reason
    body = model.model
    expected = [(body.embed_tokens, "Embedding"), (body.norm, "RMSNorm"), (body.rotary_emb, "RotaryEmbedding")]
    for layer in body.layers:
        if (reason := unlike(layer, "DecoderLayer")) is not None:
            return reason
        attention, mlp = layer.self_attn, layer.mlp
        expected += [(attention, "Attention"), (mlp, "MLP")]
        expected += [(layer.input_layernorm, "RMSNorm"), (layer.post_attention_layernorm, "RMSNorm")]
        linears = [(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        linears += [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
        expected += [(getattr(parent, name, None), "Linear") for parent, name in linears]
        expected += [(getattr(attention, name), "RMSNorm") for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    for module, name in expected:
        if (reason := unlike(module, name)) is not None:
            return reason
    if [layer.self_attn for layer in body.layers] != attentions:
        return "its layers are not run one after another"
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if len({linear.bias is None for linear in group}) > 1:
                return "of linear layers with one input, some have a bias and some have none"
    if any(type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation") for layer in body.layers):
        return f"its activation is {model.config.hidden_act!r}, not 'silu'"
    return None


def _unusual_tensor(model: Any) -> str | None:
    """What keeps the weights from being used as plain tensors, in words; None when nothing does."""
    parameters = list(model.parameters())
    devices = sorted({str(parameter.device) for parameter in parameters})
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(devices) > 1 or "meta" in devices:
        return f"its weights are on {', '.join(devices)}"
    if len(dtypes) > 1:
        return f"its weights are of types {', '.join(dtypes)}"
    kinds = sorted({type(parameter).__name__ for parameter in parameters} - {"Parameter"})
    if kinds:
        return f"its weights are {', '.join(kinds)}"
    return None
