"""Notebooks from top to bottom in a real kernel, and what they then hold."""

from __future__ import annotations

import os
from typing import Any

import nbformat
from nbclient import NotebookClient


class Client(NotebookClient):
    """A client that also keeps every message that the kernel published while a cell ran."""

    def __init__(self, notebook: nbformat.NotebookNode, **options: Any) -> None:
        self.published: list[dict[str, Any]] = []
        super().__init__(notebook, store_widget_state=False, **options)

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.published.append(msg)
        return super().process_message(msg, cell, cell_index)


async def execute(notebook: nbformat.NotebookNode, kernel_name: str) -> Client:
    """Run it in a fresh kernel; outputs are written into `notebook`, an error in a cell raises."""
    client = Client(notebook, kernel_name=kernel_name, timeout=240)
    # ipykernel itself does not live with asyncio's debug mode: its control thread raises there.
    await client.async_execute(env={k: v for k, v in os.environ.items() if k != "PYTHONASYNCIODEBUG"})
    return client


def cell_of(notebook: nbformat.NotebookNode, cell_id: str) -> nbformat.NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == cell_id)


def text_of(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """What a cell printed on stdout."""
    outputs = cell_of(notebook, cell_id).outputs
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def displays_of(notebook: nbformat.NotebookNode, cell_id: str) -> list[dict[str, str]]:
    """The mime bundles that a cell displayed, as they stand in the saved notebook."""
    outputs = cell_of(notebook, cell_id).outputs
    return [dict(o.data) for o in outputs if o.output_type in ("display_data", "execute_result")]
