"""`GraphRunner` without a card: the kernels interpreted, graphs simulated (see simulated_card.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MODELS = ("llama", "gemma2")  # one with fused layers; one without, with windows and soft caps


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.core.simulated_card", *MODELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "what", ["together", "with a hook", "logprobs", "seeded", "much logit bias", "beside much logit bias"]
)
def test_what_a_card_writes(found, name, what):
    assert found[name][what] is True


@pytest.mark.parametrize("name", MODELS)
def test_what_info_says(found, name):
    assert "CUDA graphs" in found[name]["launches"]
    assert "hook" in found[name]["launches with a hook"]


def test_which_layers_are_fused(found):
    assert found["llama"]["layers"] == "fused"
    assert "own" in found["gemma2"]["layers"]


@pytest.mark.parametrize("name", MODELS)
def test_steps_that_are_replayed_are_launched_by_the_caller(found, name):
    assert found[name]["launched on the loop"] > 4
