"""notebooks/04_timelines.ipynb, from top to bottom in real kernels, with the real default model."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebook.kernels import displays_of, execute, text_of

TIMELINES = Path(__file__).parents[2] / "notebooks" / "04_timelines.ipynb"
FIGURES = ["compare", "after", "around", "profile"]


def test_it_is_stored_without_outputs_and_is_valid() -> None:
    notebook = nbformat.read(TIMELINES, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.notebook
@pytest.mark.slow
async def test_it_runs_and_shows_what_it_says(kernel_name: str) -> None:
    notebook = nbformat.read(TIMELINES, as_version=4)
    await execute(notebook, kernel_name)

    for cell_id in FIGURES:
        pictures = [shown["image/png"] for shown in displays_of(notebook, cell_id) if "image/png" in shown]
        assert len(pictures) == 1 and base64.b64decode(pictures[0]).startswith(b"\x89PNG"), cell_id

    # A loop that is blocked for each step is later, by far, than one that awaits it.
    found = re.findall(r"^(.+): busy ([\d.]+)%, heartbeat lag p50 ([\d.]+) ms", text_of(notebook, "numbers"), re.M)
    lag = {way: float(p50) for way, _, p50 in found}
    assert set(lag) == {"blocking", "awaiting", "two in flight"}
    assert lag["blocking"] > 3 * max(lag["awaiting"], lag["two in flight"])

    # The planted sleep of 400 ms is the largest cause, less the steps that were in flight.
    ms, cause = re.findall(r"([\d.]+) ms  (.+)", text_of(notebook, "causes"))[0]
    assert float(ms) > 100 and ("user cell" in cause or cause == "late loop")

    step = re.search(r"decode of 2 tokens in 2 texts", text_of(notebook, "own"))
    drew = re.search(r"it drew \{\d+: 5, \d+: 5\}", text_of(notebook, "own"))
    assert step and drew, text_of(notebook, "own")
    kernels = re.search(r"([\d,]+) kernels", text_of(notebook, "profile"))
    assert kernels is not None and int(kernels[1].replace(",", "")) > 100
    (view,) = displays_of(notebook, "live")
    assert set(view) == {"text/plain", "text/html"}, "which needs no widget once it is saved"
    assert view["text/plain"].endswith("s, live")
