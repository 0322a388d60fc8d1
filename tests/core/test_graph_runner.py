"""`GraphRunner` without a card: the kernels interpreted, graphs simulated (see simulated_card.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from interactive_infer.core.sampling_table import LOGPROBS_ROOMS

MODELS = ("llama", "gemma2")  # one with fused layers; one without, with windows and soft caps
CASES = (
    "hook_at_load",
    "captures_that_fail",
    "one_capture_that_fails",
    "launches_that_fail",
    "fixed_rope",
    "smallest_cache",
)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.core.simulated_card"]
    result: dict[str, dict[str, object]] = {}
    started = [
        subprocess.Popen([*command, *names], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for names in (MODELS, CASES)
    ]
    try:
        for process in started:
            out, error = process.communicate(timeout=600)
            assert process.returncode == 0, error[-4000:]
            result |= json.loads(out.splitlines()[-1])
    finally:
        for process in started:
            process.kill()
            process.communicate()
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
    case = found[name]
    assert case["launched on the loop"] == case["replayed"] == case["steps"]


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_that_sample_say_how_long_they_took(found, name):
    assert 4 < found[name]["told"] == found[name]["sampled"] < found[name]["steps"]


def test_a_launch_that_fails_ends_its_texts_and_spoils_no_others(found):
    case = found["launches_that_fail"]
    assert case["replay"] == ["DeviceError"] * 2
    assert case["_pack_sampling"] == ["ArithmeticError"] * 4
    assert case["replay failed"] > 0
    assert case["_pack_sampling failed"] == 2
    assert case["text after replay"] is case["text after _pack_sampling"] is True


def test_a_hook_at_load_is_captured_nowhere(found):
    case = found["hook_at_load"]
    assert case["captured at load"] == 0
    assert case["text"] is True
    assert case["seen"] == 9 + 3, "the prompt and the tokens that are read, no padding"
    assert "hook on model.layers.0" in case["launches"]
    assert "there was a forward hook on model.layers.0 at load" in case["layers"]


def test_what_is_captured_while_a_hook_comes_is_not_kept(found):
    case = found["hook_at_load"]
    assert case["hooks added meanwhile"] > 0
    assert case["captured meanwhile"] == 0
    assert case["text, hooks added meanwhile"] is True


def test_steps_are_captured_once_hooks_are_gone(found):
    case = found["hook_at_load"]
    assert case["captured without"] > 0
    assert case["replayed"] > 0
    assert case["seen without"] == 0
    assert case["text, first time without"] is case["text, second time without"] is True
    assert "CUDA graphs" in case["launches without"]
    assert "at load" in case["layers without"], "the fused layers do not come back"


def test_a_forward_that_cannot_be_captured_is_warned_of_once_and_runs(found):
    case = found["captures_that_fail"]
    assert len(case["warnings"]) == 1
    assert "cannot be captured in a CUDA graph (AssertionError" in case["warnings"][0]
    assert "slower" in case["warnings"][0]
    assert "cannot be captured: AssertionError" in case["launches"]
    assert case["tokens"] == 2


def test_one_shape_that_cannot_be_captured_leaves_the_others_their_graphs(found):
    case = found["one_capture_that_fails"]
    assert case["forwards"] == case["captures"] - 1 > 2
    assert case["warnings"] == 0, "which says that the model cannot be captured"
    assert "CUDA graphs" in case["launches"]
    assert case["replayed"] > 0
    assert case["texts"] is True


def test_positions_that_the_engine_fixed_do_not_keep_a_model_from_its_graphs(found):
    case = found["fixed_rope"]
    assert "CUDA graphs" in case["launches"]
    assert case["offered"] > 0


def test_a_cache_smaller_than_the_texts_of_the_check(found):
    case = found["smallest_cache"]
    assert (case["kv_cache_tokens"], case["tokens"]) == (16, 4)


def test_log_probabilities_are_compiled_at_load_what_takes_memory_is_not(found):
    case = found["smallest_cache"]
    assert case["room for penalties or bias"] is False
    for filtered in (False, True):
        for room in (None, *LOGPROBS_ROOMS):
            assert [filtered, room] in case["kinds at load"]
