"""One server and one browser for all tests here; `lab_page(notebook)` opens a notebook in a page of its own.

Everything runs on one event loop, because Playwright's objects belong to the loop they were made on.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import nbformat
import pytest
import pytest_asyncio
from nbformat.v4 import new_code_cell, new_notebook

from tests.browser import chromium
from tests.browser.lab import WAIT_MS, FrontEnd, Lab, LabPage, running_lab

if TYPE_CHECKING:
    from playwright.async_api import Browser

HERE = Path(__file__).parent

_folders = itertools.count()


class OpenPage(Protocol):
    def __call__(self, notebook: Path | list[str], front_end: FrontEnd = "lab") -> Awaitable[LabPage]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            if pytest_asyncio.is_async_test(item):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def chromium_path() -> Path:
    """Skips what cannot be run here; in CI that is a failure."""
    if absent := [name for name in ("playwright", "jupyterlab", "notebook") if importlib.util.find_spec(name) is None]:
        missing = f"{', '.join(absent)} not installed: pip install -e '.[browser]'"
    elif found := chromium.find():
        return found
    else:
        missing = "no Chromium found: `make chromium` installs one, or set INTERACTIVE_INFER_CHROMIUM to its path"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def lab(chromium_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def browser(chromium_path: Path) -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path, args=chromium.FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def expect(chromium_path: Path) -> Any:
    """Playwright's `expect`, with these tests' patience."""
    from playwright.async_api import expect

    expect.set_options(timeout=WAIT_MS)
    return expect


@pytest_asyncio.fixture(loop_scope="session")
async def lab_page(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> AsyncIterator[OpenPage]:
    """`await lab_page(Path or list of cell sources)` copies or writes the notebook and opens it, in JupyterLab unless
    Notebook is named.

    A test that fails leaves a picture of each of its pages in build/browser/.
    """
    opened: list[LabPage] = []

    async def open_page(notebook: Path | list[str], front_end: FrontEnd = "lab") -> LabPage:
        if isinstance(notebook, Path):
            content = nbformat.read(notebook, as_version=4)
        else:
            content = new_notebook(cells=[new_code_cell(source) for source in notebook])
            content.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
        # A folder each, so that a notebook keeps its name.
        name = f"{next(_folders)}/{notebook.name if isinstance(notebook, Path) else 'cells.ipynb'}"
        (lab.folder / name).parent.mkdir()
        nbformat.write(content, lab.folder / name)
        page = await browser.new_page(viewport={"width": 1100, "height": 800}, reduced_motion="reduce")
        opened.append(LabPage(page, lab, name, front_end))
        await opened[-1].open()
        return opened[-1]

    failed = request.session.testsfailed
    yield open_page
    for number, page in enumerate(opened):
        if request.session.testsfailed > failed:
            test = re.sub(r"\W+", "-", request.node.name)
            await page.screenshot(f"failed-{test}-{number}")
        await page.shut_down()
        await page.page.close()
