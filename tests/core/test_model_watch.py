"""What an owner does to a model is noticed: at once where all of it is looked at, within a round where parts are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from interactive_infer.core.model_watch import ModelWatch
from tests.tiny_models import tiny_model


def _hook(model: nn.Module) -> Callable[[], object]:
    return model.model.layers[1].mlp.register_forward_hook(lambda *_: None).remove


def _layer(model: nn.Module) -> Callable[[], object]:
    usual = model.model.layers[1].mlp
    model.model.layers[1].mlp = nn.Identity()
    return lambda: setattr(model.model.layers[1], "mlp", usual)


def _weight(model: nn.Module) -> Callable[[], object]:
    usual = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.zeros_like(usual))
    return lambda: setattr(model.lm_head, "weight", usual)


def _storage(model: nn.Module) -> Callable[[], object]:
    weight = model.model.norm.weight
    usual = weight.data
    weight.data = usual.clone()
    return lambda: setattr(weight, "data", usual)


def _forward(model: nn.Module) -> Callable[[], object]:
    module = model.model.layers[0]
    module.forward = lambda *_, **__: None
    return lambda: delattr(module, "forward")


CHANGES = {
    _hook: "a forward hook on model.layers.1.mlp",
    _layer: "another mlp in model.layers.1",
    _weight: "another weight of lm_head",
    _storage: "another weight of model.norm",
    _forward: "a forward of its own on model.layers.0",
}


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize("make", CHANGES)
def test_a_change_is_named_and_its_end_is_seen(model: nn.Module, make: Callable[..., Callable[[], object]]) -> None:
    watch = ModelWatch(model)
    assert watch.change() is None
    assert watch.look(1.0) is None
    undo = make(model)
    assert watch.change() == watch.look(1.0) == watch.look(20.0) == CHANGES[make]
    undo()
    assert watch.change() is None
    assert watch.look(1.0) is None


@pytest.mark.parametrize("share", [0.5, 0.013, 1e-9])
@pytest.mark.parametrize("make", CHANGES)
def test_looking_at_parts_finds_it_within_a_round(
    model: nn.Module, make: Callable[..., Callable[[], object]], share: float
) -> None:
    watch = ModelWatch(model)
    entries = len(watch._watched)
    round_ = math.ceil(entries / math.ceil(share * entries))
    for _ in range(round_ // 3):  # it may come in the middle of one
        assert watch.look(share) is None
    undo = make(model)
    found = [watch.look(share) for _ in range(round_)]
    assert found[-1] == CHANGES[make]
    assert set(found) <= {None, CHANGES[make]}
    assert watch.look(share) == CHANGES[make], "what is not looked at is as it was"
    undo()
    assert [watch.look(share) for _ in range(round_)][-1] is None


def test_a_part_costs_no_more_than_its_share(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ModelWatch(model)
    seen: list[int] = []
    monkeypatch.setattr(watch, "_differences", lambda start, stop: seen.extend(range(start, stop)) or {})
    for _ in range(10):
        watch.look(0.1)
    assert len(seen) <= len(watch._watched) + 10
    assert set(seen) == set(range(len(watch._watched)))
