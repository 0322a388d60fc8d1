"""notebooks/01_quickstart.ipynb, from top to bottom in real kernels, with the real default model."""

from __future__ import annotations

import base64
import html
import itertools
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebook.kernels import cell_of, displays_of, execute, text_of

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
LIVE = ["generate", "several", "cancel", "chat", "branch"]


def read(path: Path = QUICKSTART) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_it_is_stored_without_outputs_and_is_valid() -> None:
    notebook = read()
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.notebook
@pytest.mark.slow
async def test_it_runs_and_shows_what_it_says(kernel_name: str) -> None:
    notebook = read()
    await execute(notebook, kernel_name)

    # Every live stream is in the saved notebook as its final text, which needs no widget to be shown.
    for cell_id in LIVE:
        streams = displays_of(notebook, cell_id)
        assert len(streams) == (3 if cell_id == "several" else 1)
        for stream in streams:
            assert set(stream) == {"text/plain", "text/html"}
            assert len(stream["text/plain"].split()) >= 5
            assert html.escape(stream["text/plain"]) in stream["text/html"]
    (story,) = displays_of(notebook, "generate")
    assert text_of(notebook, "await").startswith(story["text/plain"])

    # While the story was being written a cell computed and a coroutine ticked.
    grown = re.search(r"grew from (\d+) to (\d+) tokens", text_of(notebook, "compute"))
    beats = re.search(r"(\d+) beats", text_of(notebook, "compute"))
    assert grown is not None and beats is not None
    assert int(grown[2]) > int(grown[1]) + 2
    assert int(beats[1]) >= 3

    # `async for` printed token by token, not the whole at the end.
    printed = cell_of(notebook, "iterate").outputs
    assert len(text_of(notebook, "iterate")) > 10
    assert len(printed) >= 3

    # Several advance in turn.
    order = text_of(notebook, "several").split()[0]
    assert {letter: order.count(letter) for letter in "ABC"} == {"A": 32, "B": 32, "C": 32}
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes >= len(order) // 2
    assert re.search(f"{len(order)} tokens, the turn changed {changes} times", text_of(notebook, "several"))

    cancelled = re.search(r"cancelled after (\d+) tokens", text_of(notebook, "cancel"))
    assert cancelled is not None and 21 <= int(cancelled[1]) <= 24

    # The branch shares its beginning and goes its own way.
    original, branch = text_of(notebook, "branch").splitlines()
    assert original != branch and original[:20] == branch[:20]
    assert " dragon" in displays_of(notebook, "branch")[0]["text/plain"]

    assert len(text_of(notebook, "sync").split()) >= 3
    assert any(
        base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
        for shown in displays_of(notebook, "timeline")
        if "image/png" in shown
    )
    assert "busy" in text_of(notebook, "summary")
    all_beats = re.search(r"(\d+) beats in all; ([\d,]+) MB freed", text_of(notebook, "close"))
    assert all_beats is not None and int(all_beats[1]) > int(beats[1])
    assert int(all_beats[2].replace(",", "")) > 100
    assert not [o for cell in notebook.cells if "outputs" in cell for o in cell.outputs if o.output_type == "error"]
