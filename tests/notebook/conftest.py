from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _python(series: int) -> Path:
    """The interpreter whose ipykernel is of that series: this one, or another environment's."""
    if series == 7:
        return Path(sys.executable)
    given = os.environ.get("INTERACTIVE_INFER_IPYKERNEL6")
    python = Path(given) if given else ROOT / ".venv-ipykernel6" / "bin" / "python"
    if not python.exists():
        missing = f"{python} is not there: `make ipykernel6` makes it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return python


@pytest.fixture(params=[7, 6], ids=["ipykernel7", "ipykernel6"])
def kernel_name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an installed kernel of each series in use, apart from the user's own Jupyter."""
    series = request.param
    python = _python(series)
    command = [str(python), "-c", "import importlib.metadata as m; print(m.version('ipykernel'))"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert version.startswith(f"{series}."), f"{python} has ipykernel {version}"

    name = f"ipykernel{series}"
    spec = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
        "env": {"PYTHONPATH": str(ROOT)},
    }
    folder = tmp_path / "jupyter" / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return name
