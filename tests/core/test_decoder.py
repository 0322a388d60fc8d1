"""The fused forward computes what the model's own does, takes only models it knows, and leaves the owner's alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from interactive_infer.core import decoder as decoders
from interactive_infer.core import joining
from interactive_infer.core.attention.interface import attach
from interactive_infer.core.attention.sdpa import RowSpan
from interactive_infer.core.decoder import FusedDecoder, WeightLayout, fuse
from interactive_infer.core.device import CPUDevice
from interactive_infer.core.kernels import torch_ops
from interactive_infer.core.kernels.torch_ops import StepOps
from interactive_infer.core.packing import can_pack
from interactive_infer.core.parity import check_parity, find_layers, pages_for_check
from interactive_infer.core.rope import fix_rope
from interactive_infer.core.runner import Runner
from interactive_infer.errors import UnsupportedModelError
from tests.tiny_models import VOCAB_SIZE, WINDOW, tiny_model

LAYOUTS: tuple[WeightLayout, ...] = ("as they are", "joined", "packed")
PAGE = 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama with one key head and wide heads": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 48}),
    "llama with yarn": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "qwen2 with windows": ("Qwen2Config", {"use_sliding_window": True, **WINDOWS}),
    "qwen3 with windows": ("Qwen3Config", {"use_sliding_window": True, "head_dim": 24, **WINDOWS}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True, **WINDOWS}),
    "ministral": ("MinistralConfig", {"head_dim": 16, **WINDOWS}),
    "cwm": ("CwmConfig", {"head_dim": 16, **WINDOWS}),
}
FUSED = ("llama", "llama_dynamic_rope", "mistral", "qwen2", "qwen3", *MADE)
NOT_FUSED = ("gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "olmo2", "mixtral", "gpt_oss", "granite", "starcoder2")


def model_of(name: str) -> Any:
    """A tiny model, its weights random and large enough to show."""
    if name not in MADE:
        return tiny_model(name)
    class_name, own = MADE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = getattr(transformers, class_name)(**{**SHAPE, **own})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
                elif key.endswith("bias"):
                    parameter.normal_(std=0.3)
                else:  # norms
                    parameter.normal_(mean=1.0, std=0.2)
    return model.eval()


@contextmanager
def running(model: Any, layout: WeightLayout, *, max_length: int = 128) -> Iterator[Runner]:
    """A runner over `model`, fused if that is possible; everything is given back at the end."""
    undo = [attach(model), fix_rope(model, max_length)]
    layers, shapes = find_layers(model)
    device = CPUDevice()
    decoder = fuse(model, layers, max_length=max_length, layout=layout)
    if isinstance(decoder, FusedDecoder):
        undo.append(decoder.undo)
    runner = Runner(
        model,
        layers,
        shapes,
        device,
        decoder,
        num_pages=pages_for_check(PAGE),
        page_size=PAGE,
        max_batch_size=4,
        vocab_size=VOCAB_SIZE,
    )
    try:
        yield runner
    finally:
        for step in reversed(undo):
            step()
        runner.close()
        device.close()


def error(model: Any, runner: Runner) -> float:
    """How far the runner's logits of a packed, paged, chunked batch are from the model's own."""
    return check_parity(model, runner, PAGE, VOCAB_SIZE)


def fused(model: Any, layout: WeightLayout = "as they are") -> FusedDecoder | str:
    detach = attach(model)
    attentions, _ = find_layers(model)
    detach()
    return fuse(model, attentions, max_length=64, layout=layout)


# -- the same logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUSED)
def test_logits_are_the_models_own(name: str, layout: WeightLayout) -> None:
    model = model_of(name)
    with running(model, layout) as runner:
        assert runner.layers() == "fused"
        assert error(model, runner) < 1e-5


@pytest.mark.parametrize("name", ["mistral", "qwen3 with windows"])
def test_windows_longer_than_the_checks_texts(name: str) -> None:
    model = model_of(name)
    for holder in (model.config, *(module for module in model.modules() if hasattr(module, "sliding_window"))):
        holder.sliding_window = holder.sliding_window and 200
    with running(model, "as they are") as runner:
        assert error(model, runner) < 1e-5
        without_window(runner.decoder)
        with pytest.raises(UnsupportedModelError):
            error(model, runner)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_in_bfloat16(layout: WeightLayout) -> None:
    model = model_of("qwen3").to(torch.bfloat16)
    with running(model, layout) as runner:
        assert runner.layers() == "fused"
        assert error(model, runner) < 0.05


def without_window(decoder: Any) -> None:
    decoder._window = lambda attention: None


def without_head_norms(decoder: Any) -> None:
    decoder._layers = [dataclasses.replace(layer, q_norm=None, k_norm=None) for layer in decoder._layers]


def turned_the_other_way(decoder: Any) -> None:
    decoder._layers = [dataclasses.replace(layer, sin=-layer.sin) for layer in decoder._layers]


@pytest.mark.parametrize(
    ("name", "change"),
    [("mistral", without_window), ("qwen3", without_head_norms), ("llama", turned_the_other_way)],
)
def test_the_check_at_load_would_find_a_wrong_forward(name: str, change: Callable[[Any], None]) -> None:
    model = model_of(name)
    with running(model, "packed") as runner:
        change(runner.decoder)
        with pytest.raises(UnsupportedModelError):
            error(model, runner)


def test_steps_without_a_sampled_token_have_no_logits() -> None:
    model = model_of("llama")
    for layout in LAYOUTS:
        with running(model, layout) as runner, torch.no_grad():
            logits = runner.forward(
                torch.tensor([5, 6]),
                np.arange(2),
                np.arange(2) + PAGE,
                [RowSpan(0, 2, 0, [1])],
                torch.zeros(0, dtype=torch.int64),
            )
            assert logits.shape == (0, VOCAB_SIZE)


class Asked:
    """Operators that note what each is asked for, tensors by their shapes, before `torch_ops` does it."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(op, *args, **kwargs)
            return getattr(torch_ops, op)(*args, **kwargs)

        return call

    def note(self, op: str, *args: Any, **kwargs: Any) -> None:
        def kind(value: object) -> object:
            return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value

        self.log.append((op, *map(kind, args), *((key, kind(value)) for key, value in sorted(kwargs.items()))))

    def attend(self, _: int, query: torch.Tensor, *caches: torch.Tensor, **how: Any) -> torch.Tensor:
        self.note("attend", query, *caches, **how)
        return query


@pytest.mark.parametrize("name", FUSED)
def test_a_layer_of_each_kind_asks_for_what_all_ask_for(name: str) -> None:
    """So who has compiled for those has compiled for all."""
    model = model_of(name)
    token = torch.tensor([5, 7])
    with running(model, "joined") as runner:
        assert isinstance(runner.decoder, FusedDecoder)
        asked = {}
        for one_of_each in (True, False):
            ops = asked[one_of_each] = Asked()
            runner.decoder.hidden(token, token, token, runner._pools.layers, ops.attend, ops, one_of_each=one_of_each)
    assert set(asked[True].log) == set(asked[False].log)
    windows = {entry for entry in asked[False].log if entry[0] == "attend"}
    attended = sum(entry[0] == "attend" for entry in asked[True].log)
    assert attended == len(windows) < len(model.model.layers)


def test_nothing_depends_on_values() -> None:
    """What could be captured in a CUDA graph: on tensors without values, the forward still runs."""
    model = model_of("smollm3")
    decoder = fused(model)
    assert isinstance(decoder, FusedDecoder)

    def attend(layer: int, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        pools = [(torch.zeros(9, PAGE, 2, 16), torch.zeros(9, PAGE, 2, 16)) for _ in range(4)]
        token, at = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        hidden = decoder.hidden(token, at, at, pools, attend, torch_ops)
        assert decoder.logits(hidden, torch_ops).shape == (5, VOCAB_SIZE)
        with pytest.raises(DataDependentOutputException):  # so that such a step would be found
            hidden[0, 0].item()


# -- which models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_models_run_through_their_own_forward(name: str) -> None:
    model = tiny_model(name)
    reason = fused(model)
    assert isinstance(reason, str)
    assert repr(model.config.model_type) in reason
    with running(model, "as they are") as runner:
        assert reason in runner.layers()
        assert error(model, runner) < 1e-3


class Adapted(nn.Linear):
    """A linear layer with something added, as adapters have it."""


def adapt(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Adapted(linear.in_features, linear.out_features, bias=False)


def share_a_layer(model: Any) -> None:
    model.model.layers[1].self_attn = model.model.layers[0].self_attn


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (adapt, "Adapted"),
        (
            lambda model: model.model.norm.register_forward_hook(lambda *_: None),
            "there was a forward hook on model.norm at load",
        ),
        (lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None), "forward hook on model.norm"),
        (lambda model: setattr(model.model.norm, "forward", lambda x: x), "forward of its own on model.norm at load"),
        (lambda model: setattr(model.model.rotary_emb, "forward", lambda *_: None), "its own on model.rotary_emb"),
        (lambda model: model.model.norm.to(torch.bfloat16), "torch.bfloat16, torch.float32"),
        (lambda model: model.model.norm.to("meta"), "cpu, meta"),
        (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()), "activation"),
        (lambda model: setattr(model.model.layers[1].mlp.up_proj, "bias", nn.Parameter(torch.zeros(96))), "a bias"),
        (lambda model: setattr(model.model.layers[0], "mlp", nn.Identity()), "Identity"),
        (share_a_layer, "one after another"),
        (lambda model: setattr(model.config, "model_type", "new"), "'new'"),
    ],
)
def test_a_model_with_something_unknown_is_not_taken(change: Callable[[Any], None], words: str) -> None:
    model = model_of("llama")
    layers = [layer.self_attn for layer in model.model.layers]
    change(model)
    reason = fuse(model, layers, max_length=64, layout="joined")
    assert isinstance(reason, str)
    assert words in reason


# -- the owner changes something meanwhile -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hook_is_called_and_said(layout: WeightLayout) -> None:
    model = model_of("llama")
    with running(model, layout) as runner:
        seen = []
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
        assert "a forward hook on model.layers.1.mlp" in runner.layers()
        seen.clear()
        error(model, runner)
        assert len(seen) > 3, "in the model's own texts and in each of the steps"
        handle.remove()
        assert runner.layers() == "fused"
        seen.clear()
        everywhere = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
        assert "hook on every module" in runner.layers()
        everywhere.remove()
        assert error(model, runner) < 1e-5


def test_hooks_of_transformers_own_do_not_count() -> None:
    model = model_of("llama")
    with running(model, "as they are") as runner, torch.no_grad():
        model(torch.tensor([[3, 4]]), output_hidden_states=True)
        assert any(module._forward_hooks for module in model.modules()), "they stay"
        assert runner.layers() == "fused"


def test_a_replaced_layer_or_weight_is_noticed() -> None:
    model = model_of("llama")

    def replaced_module() -> None:
        model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)

    def replaced_parameter() -> None:
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 2)

    def replaced_data() -> None:
        weight = model.model.layers[2].self_attn.q_proj.weight
        weight.data = weight.data * 2

    for layout in LAYOUTS:
        for change, words in (
            (replaced_module, "another mlp in model.layers.0"),
            (replaced_parameter, "another weight of model.layers.0.mlp.up_proj"),
            (replaced_data, "another weight of model.layers.2.self_attn.q_proj"),
        ):
            with running(model, layout) as runner:
                assert runner.layers() == "fused"
                change()
                assert words in runner.layers()
                assert error(model, runner) < 1e-5
                assert words in runner.layers()
        assert isinstance(fused(model, layout), FusedDecoder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_to_a_weight_holds_from_the_next_step_on(layout: WeightLayout) -> None:
    model = model_of("llama with biases")
    with running(model, layout) as runner:
        before = error(model, runner)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert runner.layers() == "fused"
        assert error(model, runner) < 10 * before


# -- the owner's model -------------------------------------------------------------------------------------------------


def storages(model: Any) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def total_bytes(model: Any) -> int:
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(found.values())


def test_layers_are_separated_also_when_the_collector_took_the_count_first():
    """It clears weak references before it runs finalizers, if it takes engine and model together."""
    linears = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)]
    weights = [linear.weight.clone() for linear in linears]
    joined = joining.JoinedLinears(linears)
    assert linears[0].weight.untyped_storage().data_ptr() == linears[1].weight.untyped_storage().data_ptr()
    joining._holders.clear()
    joined.separate()
    assert linears[0].weight.untyped_storage().data_ptr() != linears[1].weight.untyped_storage().data_ptr()
    assert all(torch.equal(linear.weight, weight) for linear, weight in zip(linears, weights, strict=True))


@pytest.mark.parametrize("layout", ["as they are", "packed"])
def test_only_joining_moves_weights(layout: WeightLayout) -> None:
    model = model_of("llama")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    decoder = fused(model, layout)
    assert isinstance(decoder, FusedDecoder)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "llama with tied embeddings"])
def test_joined_weights_take_no_more_memory_and_come_apart_again(name: str) -> None:
    model = model_of(name)
    parameters, count, size = list(model.parameters()), len(storages(model)), total_bytes(model)
    values = [parameter.detach().clone() for parameter in parameters]
    attention = model.model.layers[0].self_attn
    decoder = fused(model, "joined")
    assert isinstance(decoder, FusedDecoder)
    assert total_bytes(model) == size
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), "the owner's own objects"
    assert all(torch.equal(a, b) for a, b in zip(parameters, values, strict=True))
    decoder.undo()
    assert (len(storages(model)), total_bytes(model)) == (count, size)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, values, strict=True))


def test_two_decoders_of_one_model() -> None:
    model = model_of("qwen2")
    count = len(storages(model))
    first, second = fused(model, "joined"), fused(model, "joined")
    assert isinstance(first, FusedDecoder)
    assert isinstance(second, FusedDecoder)
    assert first.change() is None
    assert second.change() is None, "the second finds them joined"
    first.undo()
    assert second.change() is None, "the first to leave does not pull them apart"
    second.undo()
    assert len(storages(model)) == count


def test_a_failure_half_way_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    count, joins = len(storages(model)), iter(range(3))
    real = decoders.JoinedLinears

    def scarce(linears: list[nn.Linear]) -> Any:
        if next(joins) == 2:
            raise MemoryError("no more")
        return real(linears)

    monkeypatch.setattr(decoders, "JoinedLinears", scarce)
    with pytest.raises(MemoryError):
        fused(model, "joined")
    assert len(storages(model)) == count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_owner_trains_saves_and_generates(layout: WeightLayout, tmp_path: Path) -> None:
    model, twin = model_of("qwen2"), model_of("qwen2")
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    with running(model, layout) as runner:
        for each in (model, twin):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            for _ in range(2):
                each(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for (key, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), key
        assert runner.layers() == "fused"
        assert error(model, runner) < 1e-5, "the steps see the trained weights"

        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))

        model.save_pretrained(tmp_path / "saved")
        loaded = type(model).from_pretrained(tmp_path / "saved")
        safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
        torch.save(model.state_dict(), tmp_path / "state.pt")
        states = [
            loaded.state_dict(),
            safetensors.torch.load_file(tmp_path / "state.safetensors"),
            torch.load(tmp_path / "state.pt"),
            copy.deepcopy(model).state_dict(),
        ]
        for state in states:
            assert state.keys() == twin.state_dict().keys()
            assert all(torch.equal(state[key], value) for key, value in twin.state_dict().items())

        model.load_state_dict(model_of("qwen2").state_dict())
        assert runner.layers() == "fused"
        assert error(model, runner) < 1e-5, "and loaded ones"


def test_more_weights_than_may_be_copied_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert can_pack(linears)
    monkeypatch.setattr("interactive_infer.core.packing._LIMIT_BYTES", 1000)
    assert not can_pack(linears)
    decoder = fused(model, "packed")
    assert isinstance(decoder, FusedDecoder)
    assert decoder._packed == []


# -- the ops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_store_is_transformers_rotation(rotated: int, norms: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens, heads, kv_heads, dim = 7, 6, 2, 16
    angles = random(30, rotated // 2)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    positions, slots = torch.tensor([4, 0, 29, 7, 7, 1, 2]), torch.tensor([9, 4, 5, 31, 8, 6, 12])
    weights = (random(dim), random(dim)) if norms else (None, None)
    qkv = random(tokens, (heads + 2 * kv_heads) * dim)

    q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms:
        q, k = (torch.nn.functional.rms_norm(x, (dim,), w, 1e-5) for x, w in zip((q, k), weights, strict=True))
    turned = apply_rotary_pos_emb(q[..., :rotated], k[..., :rotated], cos[positions], sin[positions])
    expected_q, expected_k = (torch.cat((new, old[..., rotated:]), -1) for new, old in zip(turned, (q, k), strict=True))
    step = StepOps()
    for rope_store in (torch_ops.rope_store, step.rope_store, step.rope_store):
        keys, values = torch.zeros(8, PAGE, kv_heads, dim), torch.zeros(8, PAGE, kv_heads, dim)
        query = rope_store(
            qkv,
            cos,
            sin,
            positions,
            slots,
            keys,
            values,
            heads=heads,
            kv_heads=kv_heads,
            q_norm=weights[0],
            k_norm=weights[1],
            eps=1e-5,
        )
        torch.testing.assert_close(query, expected_q)
        torch.testing.assert_close(keys.flatten(0, 1)[slots], expected_k)
        assert torch.equal(values.flatten(0, 1)[slots], v)
        assert keys.count_nonzero() == expected_k.numel(), "and nowhere else"


def test_norms_and_silu() -> None:
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    total = x + residual
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, added = torch_ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(torch_ops.rms_norm(total, weight, 1e-5), expected)
    assert torch.equal(added, total)
    gate, up, down = torch.randn(5, 8), torch.randn(5, 8), torch.randn(3, 8)
    gate_up = torch.cat((gate, up), -1)
    torch.testing.assert_close(torch_ops.silu_mul(gate_up), gate * gate.sigmoid() * up)
    torch.testing.assert_close(torch_ops.silu_mul_linear(gate_up, down), gate * gate.sigmoid() * up @ down.T)
