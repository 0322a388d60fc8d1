"""Packed linear layers compute what the plain ones do, inside steps, while their weights are as they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from interactive_infer.core.attention.interface import running
from interactive_infer.core.packing import PackedLinear, pack_linears
from tests.tiny_models import tiny_model


class NoAttention:
    def attend(self, *args, **kwargs):
        raise AssertionError("a linear layer does not attend")


@pytest.fixture
def model():
    return tiny_model("llama").to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_same_numbers_in_a_step(tokens, bias, dtype):
    holder = nn.Module()
    holder.linear = nn.Linear(64, 96, bias=bias).to(dtype)
    x = torch.randn(1, tokens, 64).to(dtype)
    with torch.no_grad():
        plain = holder.linear(x)
        undo = pack_linears(holder)
        with running(NoAttention()):
            packed = holder.linear(x)
    undo()
    close = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(packed.float(), plain.float(), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_layers_of_one_input_are_one(tokens, bias, dtype):
    linears = [nn.Linear(64, out, bias=bias).to(dtype) for out in (96, 32, 32)]
    x = torch.randn(tokens, 64).to(dtype)
    packed = PackedLinear(linears)
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for _ in range(2):
        plain = torch.cat([linear(x) for linear in linears], dim=-1)
        torch.testing.assert_close(packed(x), plain, **close)
        linears[1].weight.neg_()  # seen once it is asked for
        if bias:
            linears[2].bias.add_(1)
        packed.refresh()


def test_what_was_not_written_to_is_not_packed_again(monkeypatch):
    packed = PackedLinear([nn.Linear(8, 8)])
    monkeypatch.setattr(packed, "_pack", lambda: pytest.fail("packed again"))
    packed.refresh()


def test_only_in_a_step_and_only_while_the_weight_is_unchanged(model):
    undo = pack_linears(model)
    linear = model.lm_head
    if "forward" not in linear.__dict__:  # a processor without bfloat16: nothing may have been packed
        assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return
    linear.forward._weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros_like(linear.weight))  # a mark
    x = torch.ones(1, 1, linear.in_features, dtype=torch.bfloat16)
    with torch.no_grad():
        with running(NoAttention()):
            assert not linear(x).any()
        assert linear(x).any()
        linear.weight.mul_(2)
        with running(NoAttention()):
            assert linear(x).any()
    undo()
    assert "forward" not in linear.__dict__


def test_the_owner_can_still_train(model):
    undo = pack_linears(model)
    ids = torch.tensor([[1, 2, 3]])
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None
    undo()


def test_other_dtypes_are_left_alone():
    model = tiny_model("llama").to(torch.float64)
    undo = pack_linears(model)
    assert "forward" not in model.lm_head.__dict__
    undo()


def test_no_cycle_keeps_a_packed_model(model):
    pack_linears(model)
    gone = weakref.ref(model.lm_head)
    gc.disable()
    try:
        del model.lm_head
        assert gone() is None
    finally:
        gc.enable()
