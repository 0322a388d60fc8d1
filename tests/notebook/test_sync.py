"""`run_sync`: without a loop, in synchronous cells of real kernels, and where it must refuse."""

from __future__ import annotations

import asyncio
import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from interactive_infer import InvalidRequestError, MissingPackageError, NestedLoopError, run_sync
from interactive_infer.notebook import sync
from tests.notebook.kernels import Kernel, running_kernel

SETUP = """
import asyncio, json, sys, threading, time
import ipywidgets
from interactive_infer import run_sync

button, clicks = ipywidgets.Button(), []
button.on_click(lambda _: clicks.append("click"))

async def nested(seconds):
    print("nested", flush=True)
    await asyncio.sleep(seconds)
    return "value"
"""


@pytest.fixture(scope="module")
def ready(kernel: Kernel) -> Kernel:
    kernel.run(SETUP)
    return kernel


@pytest.mark.notebook
def test_a_synchronous_cell_gets_the_value(ready: Kernel) -> None:
    assert ready.run("def cell():\n    return run_sync(nested(0.01))\nprint(cell(), run_sync(nested(0)))") == (
        "nested\nnested\nvalue value\n"
    )
    assert ready.value("'nest_asyncio2' in sys.modules and 'nest_asyncio' not in sys.modules")
    assert ready.run("print(await nested(0))") == "nested\nvalue\n"


@pytest.mark.notebook
def test_an_error_is_raised_in_the_cell(ready: Kernel) -> None:
    cell = ready.start("async def fails():\n    await asyncio.sleep(0)\n    1 / 0\nrun_sync(fails())")
    ready.finish(cell)
    assert ready.errors(cell)[0]["ename"] == "ZeroDivisionError"


@pytest.mark.notebook
def test_cells_and_clicks_that_come_meanwhile_are_not_lost(ready: Kernel) -> None:
    model_id = ready.value("(clicks.clear(), button.model_id)[1]")
    cell = ready.start("run_sync(nested(0.3))\nclicks.append('first')")
    ready.await_print(cell, "nested")
    click = ready.click(model_id)
    behind = [ready.start("clicks.append('second')"), ready.start("clicks.append('third')")]
    ready.finish(cell, click, *behind)
    assert ready.value("clicks")[-2:] == ["second", "third"]
    assert sorted(ready.value("clicks")) == ["click", "first", "second", "third"]


@pytest.mark.notebook
def test_a_live_control_answers_meanwhile(ready: Kernel) -> None:
    ready.run("from interactive_infer import keep_live\nkeep_live(button)\nclicks.clear()")
    model_id = ready.value("button.model_id")
    cell = ready.start(
        "async def clicked():\n    print('nested', flush=True)\n    while not clicks: await asyncio.sleep(0.01)\n"
        "run_sync(clicked())"
    )
    ready.await_print(cell, "nested")
    ready.finish(ready.click(model_id), cell)
    assert not ready.errors(cell)


@pytest.mark.notebook
def test_an_interrupt_cancels_it_and_no_other_task(ready: Kernel) -> None:
    ready.run(
        "async def forever():\n    while True: await asyncio.sleep(0.01)\n"
        "background = [asyncio.create_task(forever()) for _ in range(5)]"
    )
    cell = ready.start("task = asyncio.ensure_future(nested(600))\nrun_sync(task)")
    ready.await_print(cell, "nested")
    ready.interrupt()
    ready.finish(cell)
    assert ready.errors(cell)[0]["ename"] == "KeyboardInterrupt"
    assert ready.value("[task.cancelled(), [task.done() for task in background]]") == [True, [False] * 5]
    ready.run("for task in background: task.cancel()")


# -- patched by somebody else ------------------------------------------------------------------------------------------


@pytest.fixture(params=["6.31.0", "7.4.0"])
def patched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kernel]:
    with running_kernel(request.param, tmp_path) as kernel:
        kernel.run(SETUP + "import nest_asyncio\nnest_asyncio.apply()\n")
        kernel.run("from interactive_infer import live_controls\nlive_controls('ours')")
        yield kernel


@pytest.mark.notebook
def test_a_loop_that_loses_cells_is_refused_and_warned_of_once(patched: Kernel) -> None:
    cells = [patched.start("print(run_sync(nested(0)))"), patched.start("1")]
    patched.finish(*cells)
    warned = "".join(patched.printed(cell, "stderr") for cell in cells)
    if patched.series == 6:
        assert patched.printed(cells[0]) == "nested\nvalue\n"
        assert warned == ""
    else:
        assert patched.errors(cells[0])[0]["ename"] == "NestedLoopError"
        assert "restart the kernel" in patched.errors(cells[0])[0]["evalue"]
        assert warned.count("RuntimeWarning: something called nest_asyncio.apply()") == 1


# -- without a kernel --------------------------------------------------------------------------------------------------


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_without_a_loop_nothing_is_patched() -> None:
    assert run_sync(answer()) == 42
    assert not hasattr(asyncio, "_nest_patched")


@pytest.mark.parametrize("module", ["nest_asyncio2", "nest_asyncio"])
def test_the_turn_in_which_the_loop_is_patched_goes_on(module: str) -> None:
    """asyncio's own `_run_once` is on the stack then, and has counted the handles that it will take."""
    script = f"""
import asyncio
from interactive_infer import run_sync
from interactive_infer.notebook import sync

sync._fork = lambda: {module!r}

async def cell():
    loop, ran = asyncio.get_running_loop(), []
    for _ in range(2):
        loop.call_soon(lambda: ran.append(run_sync(asyncio.sleep(0.01, "value"))))
        for _ in range(3):
            loop.call_soon(ran.append, "other")
    await asyncio.sleep(0.2)
    print(sorted(ran))

asyncio.run(cell())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"{['other'] * 6 + ['value'] * 2}\n", ran.stderr


def test_what_cannot_be_awaited_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="awaitable=42: give a coroutine"):
        run_sync(42)  # type: ignore[arg-type]


def test_uvloop_is_refused() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def cell() -> int:
        return run_sync(answer())

    with (
        pytest.raises(NestedLoopError, match=r"uvloop.Loop.*generate_sync"),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(cell())


@pytest.mark.parametrize(
    ("ipykernel", "installed", "fork"),
    [
        (7, {"nest-asyncio2": "1.7.3", "nest-asyncio": "1.6.0"}, "nest_asyncio2"),
        (7, {"nest-asyncio2": "1.10.0"}, "nest_asyncio2"),
        (7, {"nest-asyncio2": "1.7.2", "nest-asyncio": "1.6.0"}, "which is 1.7.2 here"),
        (7, {"nest-asyncio": "1.6.0"}, "which is not installed"),
        (6, {"nest-asyncio2": "1.7.2", "nest-asyncio": "1.6.0"}, "nest_asyncio2"),
        (6, {"nest-asyncio": "1.6.0"}, "nest_asyncio"),
        (0, {"nest-asyncio": "1.6.0"}, "nest_asyncio"),
        (6, {}, "which is not installed"),
    ],
)
def test_which_fork(ipykernel: int, installed: dict[str, str], fork: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(sync, "version", version)
    if ipykernel:
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(version_info=(ipykernel, 0, 0)))  # type: ignore[arg-type]
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if fork.startswith("nest"):
        assert sync._fork() == fork
    else:
        with pytest.raises(MissingPackageError, match=rf"{fork}.*pip install"):
            sync._fork()


async def test_a_loop_that_nobody_patched_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync.warn_if_cells_get_lost()
