"""A load on a card compiles its kernels side by side, before they are needed. (On a card itself: test_gpu.py.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FUSED = ("llama", "qwen3", "mistral")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def load(name: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.core.compiling_card", name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", FUSED)
def test_check_and_capture_find_every_kernel_compiled_and_loaded(name: str, cache: Path) -> None:
    found = load(name, cache)
    assert "CUDA graphs" in found["launches"]
    assert found["late"] == found["loaded late"] == []
    assert set(found["loaded"]) == set(found["ahead"])
    kernels = {"_norm_kernel", "_rope_store_kernel", "_prefill_kernel", "_decode_kernel", "_draw_kernel"}
    kernels |= {"_clock_kernel", "_reply_kernel"}
    assert kernels <= set(found["ahead"])
    assert list(dict.fromkeys(found["stages"]))[-3:] == ["checking", "compiling kernels", "capturing"]
    assert any(cache.iterdir()), "they are kept"


def test_a_models_own_forward_is_not_run_for_it(cache: Path) -> None:
    """It might look at what kernels that did not run have left."""
    found = load("gemma2", cache)
    assert found["ahead"] == []
    assert "_decode_kernel" in found["late"]
    assert "compiling kernels" not in found["stages"]


def test_an_interrupt_leaves_nothing_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's mode either, in which nothing is compiled but by threads that are gone."""
    from triton.runtime import _async_compile

    from interactive_infer.core.kernels.launch import compile_ahead, is_compiling_ahead

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    inside: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(_async_compile, "as_completed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compile_ahead(torch.device("cpu"), lambda: inside.append(is_compiling_ahead()))
    assert inside == [True]
    assert _async_compile.active_mode.get() is None
    assert not is_compiling_ahead()
    compile_ahead(torch.device("cpu"), lambda: inside.append(is_compiling_ahead()))
    assert inside == [True, True]


def test_a_call_is_asked_for_once_by_what_it_is_compiled_for() -> None:
    from interactive_infer.core.kernels.launch import _compile

    calls: list[tuple[object, ...]] = []

    class Kernel:
        def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> None:
            calls.append((*args, grid, constants))

    kernel, asked = Kernel(), set[object]()
    aligned = torch.zeros(64)
    ways: list[tuple[tuple[object, ...], dict[str, object]]] = [
        ((aligned, 5), {"BLOCK": 16}),
        ((aligned[1:], 5), {"BLOCK": 16}),  # not aligned to 16 bytes
        ((aligned.half(), 5), {"BLOCK": 16}),
        ((aligned, 1), {"BLOCK": 16}),  # 1 and multiples of 16 are told apart
        ((aligned, 32), {"BLOCK": 16}),
        ((aligned, 2**31), {"BLOCK": 16}),  # needs 64 bits
        ((aligned, True), {"BLOCK": 16}),
        ((aligned, 5.0), {"BLOCK": 16}),
        ((aligned, None), {"BLOCK": 16}),
        ((aligned, 5), {"BLOCK": 32}),
        ((aligned, 5), {"BLOCK": 16, "num_warps": 8}),
    ]
    for args, constants in ways:
        _compile(asked, kernel, (3,), *args, **constants)
    assert len(calls) == len(ways)
    for args, constants in ways:
        _compile(asked, kernel, (7,), *args, **constants)
    _compile(asked, kernel, (3,), torch.ones(9), 7, BLOCK=16)
    _compile(asked, kernel, (3,), aligned, 48, BLOCK=16)
    assert len(calls) == len(ways), "another grid, tensor or number makes no other kernel"
    _compile(asked, Kernel(), (3,), aligned, 5, BLOCK=16)
    assert len(calls) == len(ways) + 1
