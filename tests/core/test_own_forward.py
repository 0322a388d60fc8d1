"""`evaluating`: whoever is in it finds no dropout, and the owner's mode comes back once."""

from __future__ import annotations

from torch import nn

from interactive_infer.core.own_forward import evaluating


def test_the_mode_comes_back_with_the_last_to_leave() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    model[1].eval()
    first, second = evaluating(model), evaluating(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules()), "the second is still in it"
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_an_owner_who_trains_meanwhile_gets_it_back_too() -> None:
    model = nn.Sequential(nn.Dropout())
    with evaluating(model):
        pass
    model.eval()
    with evaluating(model):
        model.train()
        with evaluating(model):
            assert not model.training
    assert model.training
