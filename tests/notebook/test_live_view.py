"""What a live view sends and what it leaves in the notebook, in real kernels, without a model."""

from __future__ import annotations

import html

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.notebook.kernels import displays_of, execute, text_of
from tests.notebook.test_display import HOSTILE, WIDGET

WORDS = HOSTILE * 100

START = f"""
import asyncio, contextvars, time
from tests.notebook.fakes import Writer

words = {WORDS!r}
writer = Writer(words)

async def write():
    for _ in words:
        writer.write()
        await asyncio.sleep(0.002)
    writer.finish()

# As the engine's own task: in a context that belongs to no cell.
writing = asyncio.create_task(write(), context=contextvars.Context())
started = time.monotonic()
writer.generation
"""
WAIT = "await writing\nprint(time.monotonic() - started)"
SYNCHRONOUS = f"""
import time
from tests.notebook.fakes import Writer

words = {WORDS!r}
writer = Writer(words)
writer.generation.show()
started = time.monotonic()
for _ in words:  # holds the loop, as generate_sync does
    writer.write()
    time.sleep(0.002)
print(time.monotonic() - started)
writer.finish()
"""


def notebook_of(*sources: str):
    cells = [new_code_cell(source) for source in sources]
    for index, cell in enumerate(cells):
        cell.id = f"cell{index}"
    return new_notebook(cells=cells)


@pytest.mark.notebook
@pytest.mark.parametrize("sources", [(START, WAIT), (SYNCHRONOUS,)], ids=["awaiting", "synchronous"])
async def test_only_new_text_crosses_at_most_30_times_a_second(kernel_name: str, sources: tuple[str, ...]) -> None:
    notebook = notebook_of(*sources)
    client = await execute(notebook, kernel_name)
    text = "".join(WORDS)
    seconds = float(text_of(notebook, f"cell{len(sources) - 1}"))

    sent = [m["content"]["data"] for m in client.published if m["msg_type"] == "comm_msg"]
    parts = [data["content"] for data in sent if data["method"] == "custom"]
    wholes = [data["state"]["snapshot"] for data in sent if data["method"] == "update" and data["state"]["snapshot"]]
    # Messages of the first cell's end may go by unseen between two cells, so there is no exact count.
    assert 5 <= len(parts) + len(wholes) <= 30 * seconds + 2
    for message in parts + wholes:
        assert message["tokens"] == WORDS[message["from"] :][: len(message["tokens"])]
    last = parts[-1]
    assert last["state"] == "finished" and last["count"] == len(WORDS) == last["from"] + len(last["tokens"])
    assert sum(len(message["tokens"]) for message in parts + wholes) <= 4 * len(WORDS)

    (saved,) = displays_of(notebook, "cell0")
    assert WIDGET not in saved
    assert saved["text/plain"] == text
    assert html.escape(text) in saved["text/html"]
    assert "<script" not in saved["text/html"] and "<img" not in saved["text/html"]
    (first,) = [m["content"]["data"] for m in client.published if m["msg_type"] == "display_data"]
    assert WIDGET in first and "text/plain" in first


@pytest.mark.notebook
async def test_without_anywidget_the_text_is_shown_all_the_same(kernel_name: str) -> None:
    hide = "import sys, importlib.util\nfind = importlib.util.find_spec\n"
    hide += "importlib.util.find_spec = lambda name, *rest: None if name == 'anywidget' else find(name, *rest)"
    notebook = notebook_of(hide, START, WAIT)
    client = await execute(notebook, kernel_name)
    (saved,) = displays_of(notebook, "cell1")
    assert set(saved) == {"text/plain", "text/html"}
    assert saved["text/plain"] == "".join(WORDS)
    seconds = float(text_of(notebook, "cell2"))
    updates = [m for m in client.published if m["msg_type"] == "update_display_data"]
    assert 2 <= len(updates) <= 5 * seconds + 2
    assert not [m for m in client.published if m["msg_type"] == "comm_open"]
