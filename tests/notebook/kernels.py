"""Real kernels of several ipykernels: notebooks from top to bottom in them, and single messages."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
VERSIONS = ("6.17.1", "6.31.0", "7.3.0", "7.4.0")
"""Colab's, and the last ones of what is in use. `make kernels` puts each into build/kernels/<version>."""
PATIENCE = 60.0
"""Seconds after which a kernel's silence is a failure. Not a speed that anything is held to."""


def kernel_folder(version: str) -> Path:
    """Where that ipykernel alone is; everything else comes from this environment."""
    folder = ROOT / "build" / "kernels" / version
    if not (folder / "ipykernel").is_dir():
        missing = f"{folder} is not there: `make kernels` makes it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return folder


def kernel_spec(version: str) -> dict[str, Any]:
    """A kernel.json. On the path the folder stands before this environment's packages, so its ipykernel is taken."""
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": f"ipykernel {version}",
        "language": "python",
        "env": {"PYTHONPATH": os.pathsep.join([str(kernel_folder(version)), str(ROOT)])},
    }


# ipykernel itself does not live with asyncio's debug mode: its control thread raises there.
def _environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONASYNCIODEBUG"} | more


class Kernel:
    """One running kernel, and what its front end would send and hear.

    Messages that it publishes are kept in `heard`, in order. A request is named by its message id. `close` ends it.
    """

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.series = int(version.split(".")[0])
        spec = kernel_spec(version)
        self.manager = KernelManager(kernel_name=f"ipykernel-{version}", connection_file=str(folder / "kernel.json"))
        self.manager._kernel_spec = KernelSpec(resource_dir=str(folder), **spec)
        self.manager.start_kernel(env=_environment(IPYTHONDIR=str(folder / "ipython"), **spec["env"]))
        self.client = self.manager.blocking_client()
        self.heard: list[dict[str, Any]] = []
        self._others: list[Any] = []
        try:
            self.client.start_channels()
            self.client.wait_for_ready(timeout=PATIENCE)
            assert self.value("__import__('ipykernel').__version__") == version
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for socket in self._others:
            socket.close()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    # -- sending -------------------------------------------------------------------------------------------------

    def start(self, code: str, *, stop_on_error: bool = False) -> str:
        """Ask for a cell; do not wait. Its error aborts cells behind it only with `stop_on_error`: for a moment the
        kernel then aborts also what is sent after its end."""
        return str(self.client.execute(code, stop_on_error=stop_on_error))

    def run(self, code: str) -> str:
        """A cell from beginning to end; returns what it printed. An error in it raises."""
        request = self.start(code)
        self.finish(request)
        assert not self.errors(request), "\n".join(self.errors(request)[0]["traceback"])
        return self.printed(request)

    def value(self, expression: str) -> Any:
        """What an expression is in the kernel, by way of JSON."""
        return json.loads(self.run(f"print(__import__('json').dumps({expression}))"))

    def comm(self, comm_id: str, data: Any, subshell: str | None = None, kind: str = "comm_msg") -> str:
        """Send a comm message as a front end does, by a subshell if one is given."""
        message = self.client.session.msg(kind, {"comm_id": comm_id, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def set(self, model_id: str, subshell: str | None = None, **state: Any) -> str:
        """What a slider's front end sends when it is moved."""
        return self.comm(model_id, {"method": "update", "state": state, "buffer_paths": []}, subshell)

    def click(self, model_id: str, subshell: str | None = None) -> str:
        return self.comm(model_id, {"method": "custom", "content": {"event": "click"}}, subshell)

    def subshell(self) -> str:
        """A new subshell's id (ipykernel 7)."""
        request = self.client.session.msg("create_subshell_request", {})
        self.client.control_channel.send(request)
        while True:
            reply = self.client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    # -- hearing -------------------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Hear messages until something holds."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, f"{what}: not after {PATIENCE:.0f} s"
            try:
                self.heard.append(self.client.get_iopub_msg(timeout=1))
            except queue.Empty:
                self._nudge()

    def _nudge(self) -> None:
        """ipykernel 7.0 to 7.3 may become deaf to a front end while they send a reply, until another one connects."""
        if (7, 0) <= tuple(map(int, self.version.split(".")))[:2] < (7, 4):
            self._others.append(self.manager.connect_shell())

    def finish(self, *requests: str) -> None:
        """Hear messages until the requests are worked off (their idle status has come)."""
        for request in requests:
            self.until(lambda request=request: "idle" in self.states(request), f"the end of {request}")

    def await_print(self, request: str, text: str) -> None:
        self.until(lambda: text in self.printed(request), f"{text!r} on stdout")

    def reply(self, request: str) -> dict[str, Any]:
        """The reply to an execute request on the shell channel; others before it are dropped."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                reply = self.client.get_shell_msg(timeout=1)
            except queue.Empty:
                self._nudge()
                continue
            if reply["parent_header"].get("msg_id") == request:
                return dict(reply["content"])
        raise AssertionError(f"no reply to {request} after {PATIENCE:.0f} s")

    def of(self, request: str, kind: str) -> list[dict[str, Any]]:
        """What was published of one kind for a request."""
        return [
            message["content"]
            for message in self.heard
            if message["parent_header"].get("msg_id") == request and message["msg_type"] == kind
        ]

    def states(self, request: str) -> list[str]:
        return [content["execution_state"] for content in self.of(request, "status")]

    def printed(self, request: str, stream: str = "stdout") -> str:
        return "".join(content["text"] for content in self.of(request, "stream") if content["name"] == stream)

    def errors(self, request: str) -> list[dict[str, Any]]:
        return self.of(request, "error")

    def order(self, *requests: str) -> list[tuple[int, str]]:
        """In which order requests (by their place in the arguments) became busy and idle."""
        places = {request: place for place, request in enumerate(requests)}
        return [
            (places[message["parent_header"]["msg_id"]], message["content"]["execution_state"])
            for message in self.heard
            if message["msg_type"] == "status" and message["parent_header"].get("msg_id") in places
        ]


@contextlib.contextmanager
def running_kernel(version: str, folder: Path) -> Iterator[Kernel]:
    kernel = Kernel(version, folder)
    try:
        yield kernel
    finally:
        kernel.close()


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
    await client.async_execute(env=_environment())
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
