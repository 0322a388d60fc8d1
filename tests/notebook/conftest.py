from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from interactive_infer.notebook.follower import Follower
from tests.notebook.kernels import VERSIONS, Kernel, kernel_spec, running_kernel


@pytest.fixture(autouse=True)
def no_open_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests before: all views share a rate."""
    monkeypatch.setattr(Follower, "open_views", 0)


@pytest.fixture(params=["7.4.0", "6.31.0"], ids=["ipykernel7", "ipykernel6"])
def kernel_name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an installed kernel of each series in use, apart from the user's own Jupyter."""
    name = f"ipykernel{request.param[0]}"
    folder = tmp_path / "jupyter" / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(kernel_spec(request.param)))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return name


@pytest.fixture(scope="module", params=VERSIONS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A running kernel of each version, shared by a module's tests: each leaves it idle."""
    with running_kernel(request.param, tmp_path_factory.mktemp("kernel")) as running:
        yield running
