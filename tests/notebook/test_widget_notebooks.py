"""notebooks/02_live_controls.ipynb and 03_playground.ipynb, from top to bottom, with the real default model."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebook.kernels import cell_of, displays_of, execute, text_of

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CONTROLS, PLAYGROUND = NOTEBOOKS / "02_live_controls.ipynb", NOTEBOOKS / "03_playground.ipynb"


@pytest.mark.parametrize("path", [CONTROLS, PLAYGROUND], ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_is_valid(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


def only_static(notebook: nbformat.NotebookNode, cell_id: str) -> list[dict[str, str]]:
    shown = displays_of(notebook, cell_id)
    assert all(set(one) == {"text/plain", "text/html"} for one in shown)
    return shown


@pytest.mark.notebook
@pytest.mark.slow
async def test_a_text_is_steered_while_it_is_written(kernel_name: str) -> None:
    notebook = nbformat.read(CONTROLS, as_version=4)
    await execute(notebook, kernel_name)
    paused = re.search(r"paused with (\d+) tokens", text_of(notebook, "steer"))
    assert paused is not None and 21 <= int(paused[1]) <= 24
    assert "length: 160 tokens, temperature 1.0 at the end" in text_of(notebook, "steer")
    (text,) = only_static(notebook, "stream")
    assert "160 tokens" in text["text/html"] and html.escape(text["text/plain"]) in text["text/html"]
    (controls,) = only_static(notebook, "controls")
    assert "repetition_penalty" in controls["text/plain"]
    assert re.search(r"least likely token: .*, rank \d+", text_of(notebook, "score"))
    assert "length 200" in text_of(notebook, "awaited") or "stop" in text_of(notebook, "awaited")
    (more,) = only_static(notebook, "continue")
    assert more["text/plain"].startswith(text["text/plain"][:100])
    assert len(only_static(notebook, "group")) == 3
    (monitor,) = only_static(notebook, "monitor")
    assert "KV pages in use" in monitor["text/plain"]
    assert "MB freed" in text_of(notebook, "close")


@pytest.mark.notebook
@pytest.mark.slow
async def test_a_playground_is_run_from_code(kernel_name: str) -> None:
    notebook = nbformat.read(PLAYGROUND, as_version=4)
    await execute(notebook, kernel_name)
    assert text_of(notebook, "run") == "3 samples\n"
    assert "SamplingParams(temperature=0.8, seed=7, max_tokens=40, n=3)" in text_of(notebook, "code")
    assert text_of(notebook, "again") == "True\n"
    (saved,) = only_static(notebook, "playground")
    assert "run 1:" in saved["text/plain"] and "run 2:" in saved["text/plain"] and "sample 3" in saved["text/plain"]
    assert text_of(notebook, "chat").strip() in saved["text/plain"]
    assert len(text_of(notebook, "history").splitlines()) == 2
    assert "0.8" in only_static(notebook, "defaults")[0]["text/plain"]
    assert not [o for cell in notebook.cells if "outputs" in cell for o in cell.outputs if o.output_type == "error"]
    assert cell_of(notebook, "close").execution_count is not None
