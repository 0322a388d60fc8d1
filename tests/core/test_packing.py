"""Packed linear layers compute what the plain ones do, inside steps, while their weights are as they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from interactive_infer.core.attention.interface import running
from interactive_infer.core.packing import pack_linears
from tests.tiny_models import tiny_model


class NoAttention:
    def attend(self, *args, **kwargs):
        raise AssertionError("a linear layer does not attend")


@pytest.fixture
def model():
    return tiny_model("llama").to(torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_same_numbers_in_a_step(tokens, bias):
    holder = nn.Module()
    holder.linear = nn.Linear(64, 96, bias=bias).to(torch.bfloat16)
    x = torch.randn(1, tokens, 64).to(torch.bfloat16)
    with torch.no_grad():
        plain = holder.linear(x)
        undo = pack_linears(holder)
        with running(NoAttention()):
            packed = holder.linear(x)
    undo()
    assert torch.allclose(packed.float(), plain.float(), rtol=2e-2, atol=2e-2)


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
    model = tiny_model("llama")
    pack_linears(model)()
    assert "forward" not in model.lm_head.__dict__


def test_no_cycle_keeps_a_packed_model(model):
    pack_linears(model)
    gone = weakref.ref(model.lm_head)
    gc.disable()
    try:
        del model.lm_head
        assert gone() is None
    finally:
        gc.enable()
