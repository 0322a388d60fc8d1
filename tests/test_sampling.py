from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from interactive_infer.errors import InvalidRequestError
from interactive_infer.sampling import RUNNING_FIELDS, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *[("temperature", v, "0") for v in (NAN, INF, -0.1, True, "1", None, [1.0], 10**400, np.float32("nan"))],
        *[("top_p", v, "0 and at most 1") for v in (0.0, 1.01, -1, NAN, "0.9", False)],
        *[("top_k", v, "0 or -1 for no limit") for v in (-2, 1.5, True, "3", NAN, None)],
        *[("min_p", v, "from 0 to 1") for v in (-0.1, 1.1, NAN, True)],
        *[("presence_penalty", v, "from -2 to 2") for v in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", v, "from -2 to 2") for v in (-3, INF, "x")],
        *[("repetition_penalty", v, "from 1e-06 to 1e+06") for v in (0.0, -1.0, NAN, INF, 1e-300)],
        *[("seed", v, "2**63 - 1") for v in (-1, 2**63, 1.0, True, "7")],
        *[("stop", v, "string") for v in ("", ["a", ""], 5, ["a", 5], b"x", {"a"})],
        *[("stop_token_ids", v, "token id") for v in ([-1], [True], [1.5], 5, "12", np.array([0.5]))],
        *[("ignore_eos", v, "True or False") for v in (1, None, "yes")],
        *[("min_tokens", v, "max_tokens") for v in (257,)],
        *[("min_tokens", v, "0 or more") for v in (-1, 0.5)],
        *[("max_tokens", v, "1 or more") for v in (0, -5, 2.0, True, None)],
        *[("n", v, "from 1 to 1024") for v in (0, True, 1.0, 1025)],
        *[("logprobs", v, "20") for v in (-1, 21, True, 2.0)],
        *[("logprobs_mode", v, "raw_logprobs") for v in ("raw", None)],
        *[("logit_bias", v, "number") for v in ({1: NAN}, {1: 101}, {1: "x"}, {1: True}, [(1, 2)], 3)],
        *[("logit_bias", v, "token id") for v in ({-1: 0.0}, {"1": 0.0}, {True: 1.0})],
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(name: str, value: Any, wanted: str) -> None:
    for make in (SamplingParams, SamplingParams.make, SamplingParams().replace, SamplingParams().updated):
        if name == "n" and make == SamplingParams().updated:
            continue
        with pytest.raises(InvalidRequestError) as caught:
            make(**{name: value})
        assert caught.value.argument == name
        assert str(caught.value).startswith(f"{name}=")
        assert wanted in str(caught.value)


def test_defaults_and_limits_are_accepted() -> None:
    SamplingParams()
    SamplingParams(temperature=0, top_p=1e-9, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(repetition_penalty=1e-3, seed=2**63 - 1, min_tokens=7, max_tokens=7, logprobs=20)
    SamplingParams(logit_bias={0: -100, 5: 100}, stop=None, stop_token_ids=None)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=torch.tensor(0.5),  # type: ignore[arg-type]
        top_k=np.int64(5),  # type: ignore[arg-type]
        max_tokens=torch.tensor(9),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float64(1.5)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        max_tokens=9,
        ignore_eos=True,
        stop_token_ids=[3, 4],
        logit_bias={7: 1.5},
    )
    assert type(params.top_k) is int and type(params.top_p) is float and type(params.ignore_eos) is bool
    with pytest.raises(InvalidRequestError):
        SamplingParams(temperature=torch.tensor([0.5]))  # type: ignore[arg-type]


def test_stop_becomes_a_tuple() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_it_cannot_change_and_keeps_no_reference_to_its_arguments() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = NAN
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_make_and_replace() -> None:
    params = SamplingParams(temperature=0.3)
    assert SamplingParams.make(params) is params
    assert SamplingParams.make(params, top_k=4) == SamplingParams(temperature=0.3, top_k=4)
    assert SamplingParams.make(None, top_k=4) == SamplingParams(top_k=4)
    with pytest.raises(InvalidRequestError, match="params"):
        SamplingParams.make({"temperature": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "close"), [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("zzz", "")]
)
def test_an_unknown_name_is_answered_with_the_closest_one(name: str, close: str) -> None:
    for make in (SamplingParams.make, SamplingParams().replace, SamplingParams().updated):
        with pytest.raises(InvalidRequestError, match=f"{name}.*did you mean {close}") as caught:
            make(**{name: 1})
        assert caught.value.argument == name


def test_what_may_change_while_running() -> None:
    params = SamplingParams(seed=5)
    assert params.updated(temperature=0.1, seed=6) == SamplingParams(temperature=0.1, seed=6)
    assert params.updated(seed=None).seed is not None
    assert "n" not in RUNNING_FIELDS and "seed" in RUNNING_FIELDS
    with pytest.raises(InvalidRequestError, match=r"n=2.*while"):
        params.updated(n=2)


def test_a_seed_is_drawn_once_and_tells_several_generations_apart() -> None:
    drawn = {SamplingParams().with_seed().seed for _ in range(20)}
    assert len(drawn) == 20 and all(seed is not None and 0 <= seed < 2**63 for seed in drawn)
    params = SamplingParams(seed=7)
    assert params.with_seed() is params
    assert [params.with_seed(i).seed for i in range(3)] == [7, 8, 9]
    assert SamplingParams(seed=2**63 - 1).with_seed(1).seed == 0


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[99], logit_bias={99: 1.0}).validate_for(100)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids=100: .*below 100"):
        SamplingParams(stop_token_ids=[1, 100]).validate_for(100)
    with pytest.raises(InvalidRequestError, match=r"logit_bias=100: .*below 100"):
        SamplingParams(logit_bias={100: 1.0}).validate_for(100)


def test_a_token_is_left_before_min_tokens() -> None:
    most = {"min_tokens": 1, "stop_token_ids": list(range(99))}
    SamplingParams(**most).validate_for(100)
    SamplingParams(**most, ignore_eos=True).validate_for(100, frozenset({99}))
    SamplingParams(stop_token_ids=list(range(100))).validate_for(100)
    with pytest.raises(InvalidRequestError, match=r"min_tokens=1.*stop_token_ids"):
        SamplingParams(**most).validate_for(100, frozenset({99}))


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
