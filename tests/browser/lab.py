"""A JupyterLab of its own, and a notebook open in it or in Notebook 7, which the same server serves.

The server has fresh folders for settings, workspaces and run-time files, and one kernel: this interpreter's. What a
browser does with a cell is asked of JupyterLab's own objects (`window.jupyterapp`), never read off the screen's looks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # where it is not installed these tests are skipped, and the others must still be collected
    from playwright.async_api import Dialog, Locator, Page, Request

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "browser"
START_S = 120.0
"""How long a server may take to come up, on a machine that is busy with other things."""
WAIT_MS = 90_000.0
"""How long anything in a page may take, `expect` included. A page is as slow as its kernel."""
FrontEnd = Literal["lab", "notebook"]
"""JupyterLab, or Notebook 7, which is made of JupyterLab's parts."""

_SETTINGS = {
    # Without an answer JupyterLab asks, over the notebook, whether it may fetch news.
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
}
_NOTEBOOK_JS = """
const panel = window.jupyterapp.shell.currentWidget, cell = (i) => panel.content.widgets[i];
"""


@dataclass(frozen=True)
class Lab:
    """A running server. `folder` is what its file browser shows."""

    url: str
    token: str
    folder: Path

    def address(self, notebook: str, front_end: FrontEnd) -> str:
        """Where a notebook is open alone: in a workspace of its own, as Lab reopens what was open in a workspace."""
        if front_end == "notebook":
            return f"{self.url}notebooks/{notebook}?token={self.token}"
        workspace = re.sub(r"\W", "-", notebook)
        return f"{self.url}lab/workspaces/{workspace}/tree/{notebook}?token={self.token}"


@contextmanager
def running_lab(place: Path) -> Iterator[Lab]:
    """Start a server of JupyterLab and Notebook under `place`; at the end it and its kernels are gone."""
    folder, runtime, kernel = place / "notebooks", place / "runtime", place / "share" / "kernels" / "python3"
    for path in (folder, runtime, kernel):
        path.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"})
    )
    for name, values in _SETTINGS.items():
        path = place / "settings" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    # ipykernel does not live with asyncio's debug mode, and `make lab` chooses no matplotlib backend.
    left_out = {"PYTHONASYNCIODEBUG", "PYTHONWARNINGS", "MPLBACKEND"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PATH": str(place / "share"),  # before all other places that kernels are looked for in
        "JUPYTER_CONFIG_DIR": str(place / "config"),
        "JUPYTER_DATA_DIR": str(place / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(place / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(place / "workspaces"),
        "IPYTHONDIR": str(place / "ipython"),
    }
    options = [
        "--no-browser",
        "--ip=127.0.0.1",
        "--port=0",  # any free one; the server writes which
        "--allow-root",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    log = place / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=environment,
            cwd=place,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            told = runtime / f"jpserver-{server.pid}.json"
            info = _wait_for_json(told, server, log)
            yield Lab(info["url"], info["token"], folder)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for_json(path: Path, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        if path.exists():
            try:
                return json.loads(path.read_text())
            except json.JSONDecodeError:
                pass  # it is being written
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not come up (exit status {server.poll()}):\n{log.read_text()}")


@dataclass
class LabPage:
    """One notebook in one browser page. Cells are counted from 0, Markdown ones too."""

    page: Page
    lab: Lab
    name: str
    front_end: FrontEnd = "lab"
    requests: list[str] = field(default_factory=list)
    """Every address that the page asked for."""
    dialogs: list[str] = field(default_factory=list)
    """Every `alert` and the like that a page opened; each was dismissed."""

    def __post_init__(self) -> None:
        async def answer(dialog: Dialog) -> None:
            if dialog.type == "beforeunload":  # "leave this page?", where something is not saved
                await dialog.accept()
            else:
                self.dialogs.append(dialog.message)
                await dialog.dismiss()

        def asked(request: Request) -> None:
            self.requests.append(request.url)

        self.page.set_default_timeout(WAIT_MS)
        self.page.on("dialog", answer)
        self.page.on("request", asked)

    @property
    def path(self) -> Path:
        """The notebook's file."""
        return self.lab.folder / self.name

    async def open(self) -> None:
        await self.page.goto(self.lab.address(self.name, self.front_end))
        await self._ready()
        await self._theme("Light")  # the server keeps what an earlier page chose

    async def reload(self) -> None:
        await self.page.reload()
        await self._ready()

    async def _ready(self) -> None:
        """The notebook is there and its kernel waits for work or is at work."""
        await self.page.wait_for_function(
            """(name) => {
                const panel = window.jupyterapp?.shell.currentWidget;
                const status = panel?.context?.path === name && panel.sessionContext?.session?.kernel?.status;
                return ["idle", "busy"].includes(status) && panel.content?.widgets.length > 0;
            }""",
            arg=self.name,
        )
        # The file browser only takes width from the notebook.
        await self.evaluate("if (!jupyterapp.shell.leftCollapsed) jupyterapp.shell.collapseLeft()")

    async def evaluate(self, body: str, arg: Any = None) -> Any:
        """Run JavaScript statements with `panel` (the notebook), `cell(i)` and `arg` at hand."""
        return await self.page.evaluate(f"async (arg) => {{ {_NOTEBOOK_JS} {body} }}", arg)

    async def run_cell(self, index: int) -> None:
        """Ask for cell `index` to be run, without waiting for it."""
        await self.evaluate(
            """
            panel.content.activeCellIndex = arg;
            panel.content.deselectAll();
            cell(arg).model.executionCount = null; // so that `finished` waits for this run
            void window.jupyterapp.commands.execute("notebook:run-cell");
            """,
            index,
        )

    async def finished(self, index: int) -> None:
        """Wait until cell `index` has ended. An error in it is raised here."""
        await self.page.wait_for_function(
            f"(i) => {{ {_NOTEBOOK_JS} const {{ model }} = cell(i);"
            " return model.executionCount !== null && model.executionState === 'idle'; }",
            arg=index,
        )
        for output in await self.outputs(index):
            if output["output_type"] == "error":
                raise AssertionError(f"cell {index}: {output['ename']}: {output['evalue']}")

    async def run_cells(self, *indices: int) -> None:
        """Run cells one after the other, each to its end."""
        for index in indices:
            await self.run_cell(index)
            await self.finished(index)

    async def outputs(self, index: int) -> list[dict[str, Any]]:
        """A cell's outputs, as they would be saved now."""
        return await self.evaluate("return cell(arg).model.outputs.toJSON()", index)

    async def printed(self, index: int) -> str:
        """What a cell printed on stdout."""
        return "".join("".join(o["text"]) for o in await self.outputs(index) if o["output_type"] == "stream")

    async def show_cell(self, index: int) -> None:
        """Scroll until cell `index` is at the top, and wait until it is drawn (what is out of sight is not)."""
        await self.evaluate(
            """
            for (let i = 0; i < 4; i++) {
                cell(arg).node.scrollIntoView({ block: "start" });
                await new Promise((then) => setTimeout(() => requestAnimationFrame(then), 50));
            }
            """,
            index,
        )

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """Where a cell's outputs are drawn."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    async def shut_down(self) -> None:
        """End the notebook's kernel, if it has one."""
        await self.evaluate("await panel?.sessionContext?.shutdown()")

    async def save(self) -> None:
        await self.evaluate("await panel.context.save()")

    async def screenshot(self, name: str) -> None:
        """Keep a picture of the page as build/browser/<name>.png."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    async def dark(self) -> None:
        """Switch to JupyterLab's dark theme."""
        await self._theme("Dark")

    async def _theme(self, name: str) -> None:
        light = str(name == "Light").lower()
        if await self.page.evaluate("document.body.dataset.jpThemeLight") == light:
            return
        await self.evaluate(
            'await window.jupyterapp.commands.execute("apputils:change-theme", { theme: `JupyterLab ${arg}` })', name
        )
        await self.page.wait_for_function(
            "(light) => document.body.dataset.jpThemeLight === light && !document.getElementById('jupyterlab-splash')",
            arg=light,
        )
