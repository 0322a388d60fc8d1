"""The README's Python: its cells one by one in a real kernel, its scripts as scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook.kernels import execute

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(heading: str) -> list[str]:
    """The Python blocks of a section."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    found: list[str] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(found) >= 2
    return found


@pytest.mark.notebook
@pytest.mark.slow
async def test_its_cells_work_when_they_are_pasted_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    kernel = tmp_path / "kernels" / "readme" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    kernel.write_text(f'{{"argv": {command}, "display_name": "readme", "language": "python"}}')
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block) for block in blocks("In a notebook")])
    await execute(notebook, "readme")  # raises what a cell raises
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_its_scripts_work(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", blocks("In a script")[number]], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5
