"""`run_sync`: any awaitable from a synchronous cell, by way of nest-asyncio."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from interactive_infer.errors import InvalidRequestError, MissingPackageError, NestedLoopError

T = TypeVar("T")

# Both forks mark the loop's class; the second mark came with the version that keeps cells (1.7.3).
_PATCHED = "_nest_patched"
_KEEPS_CELLS = "_nest_deferred"
_KEEPS_CELLS_FROM = (1, 7, 3)
_INSTALL = 'pip install "nest-asyncio2>=1.7.3"'


def run_sync(awaitable: Awaitable[T]) -> T:
    """The result of an awaitable, in a synchronous cell, function or callback; with no loop running, by `asyncio.run`.

    For texts there are `engine.generate_sync` and `gen.result_sync`, which patch nothing. On a running loop this calls
    nest-asyncio, and that **patches the process for good**: `asyncio.run`, `Task` and `Future` (in Python instead of C;
    all tasks get slower) and the class of the running loop. Nested calls end last in, first out. Live
    controls answer meanwhile; a cell that arrives is run once this returns.

    An interrupt cancels the awaitable and raises KeyboardInterrupt here; other tasks go on.

    Raises InvalidRequestError for what cannot be awaited; MissingPackageError where the nest-asyncio that this kernel
    needs is not installed; NestedLoopError where the loop cannot be nested (uvloop), or was patched by a version that
    loses cells. The awaitable has not been started then.
    """
    if not inspect.isawaitable(awaitable):
        raise InvalidRequestError("awaitable", awaitable, "give a coroutine, task, future or generation")
    try:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(_result(awaitable))
        _make_nestable(loop)
    except BaseException:
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # else Python warns that it was never awaited, on top of the error
        raise
    task = loop.create_task(_result(awaitable), name="run_sync")
    with _as_many_ready(loop), _cancelled_by_interrupt(task, loop) as was_interrupted:
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            if was_interrupted():
                raise KeyboardInterrupt from None
            raise


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


@contextmanager
def _as_many_ready(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Leave the loop at least as many handles that are ready as it had.

    asyncio's own `_run_once`, which is on the stack where the loop has just been patched, has counted them before, and
    takes that many. One too few ends the loop, and with it the kernel.
    """
    ready: deque[asyncio.Handle] = loop._ready  # type: ignore[attr-defined]
    before = len(ready)
    try:
        yield
    finally:
        for _ in range(before - len(ready)):
            loop.call_soon(_nothing)


def _nothing() -> None:
    pass


@contextmanager
def _cancelled_by_interrupt(task: asyncio.Task[T], loop: asyncio.AbstractEventLoop) -> Iterator[Callable[[], bool]]:
    """SIGINT cancels `task`. KeyboardInterrupt would be raised in, and end, whichever task the loop runs right then."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        loop.call_soon_threadsafe(task.cancel)  # also wakes an idle loop, which call_soon would not

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def _make_nestable(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop.run_until_complete` work while it runs, with the fork that this kernel needs."""
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise NestedLoopError(
            f"run_sync cannot nest a {type(loop).__module__}.{type(loop).__name__}: nest-asyncio patches asyncio's own "
            "loops only; await it instead, or for a text call engine.generate_sync(...) or gen.result_sync()"
        )
    if hasattr(type(loop), _PATCHED):
        if _loses_cells(loop):
            raise NestedLoopError(
                f"run_sync: this kernel's loop was patched by a nest-asyncio that loses the cells and clicks which "
                f"arrive in a nested run on ipykernel {_ipykernel()}; {_INSTALL}, restart the kernel, and leave out "
                "the other's apply(). For a text engine.generate_sync(...) and gen.result_sync() do without"
            )
        return
    importlib.import_module(_fork()).apply(loop)


def _fork() -> str:
    """The module to patch with: nest_asyncio2; on ipykernel below 7, which needs no more, also nest_asyncio."""
    have = _release("nest-asyncio2")
    if _ipykernel() >= 7:
        if have is None or have < _KEEPS_CELLS_FROM:
            found = "is not installed" if have is None else f"is {'.'.join(map(str, have))} here"
            raise MissingPackageError(
                f"run_sync on ipykernel {_ipykernel()} needs nest-asyncio2 1.7.3 or newer, which {found} (others lose "
                f"cells that arrive in a nested run): {_INSTALL}. engine.generate_sync(...) does without"
            )
        return "nest_asyncio2"
    if have is not None:
        return "nest_asyncio2"
    if _release("nest-asyncio") is not None:
        return "nest_asyncio"
    raise MissingPackageError(f"run_sync needs nest-asyncio2, which is not installed: {_INSTALL}")


def _release(distribution: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", version(distribution))[:3])
    except PackageNotFoundError:
        return None


def _ipykernel() -> int:
    """The major version of the ipykernel that runs here; 0 for none."""
    kernel = sys.modules.get("ipykernel")
    return int(kernel.version_info[0]) if kernel is not None else 0


def _loses_cells(loop: asyncio.AbstractEventLoop) -> bool:
    cls = type(loop)
    return _ipykernel() >= 7 and hasattr(cls, _PATCHED) and not hasattr(cls, _KEEPS_CELLS)


_warned = False


def warn_if_cells_get_lost() -> None:
    """Warn once if somebody has patched the running loop with a version known to lose cells here."""
    global _warned
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if not _warned and _loses_cells(loop):
        _warned = True
        warnings.warn(
            "something called nest_asyncio.apply(): on ipykernel 7 that version silently loses cells and clicks that "
            f"arrive while a synchronous cell runs the loop. {_INSTALL} and use nest_asyncio2 in its place; "
            "interactive_infer needs neither",
            RuntimeWarning,
            stacklevel=2,
        )
