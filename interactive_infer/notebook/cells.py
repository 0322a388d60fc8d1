"""The user's cells: whether one runs now; their spans, and those of widgets' callbacks, for timelines."""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from interactive_infer.notebook.sync import warn_if_cells_get_lost
from interactive_infer.timeline.recorder import Phase, Recorder


class Cells:
    """Hears when a shell's cells begin and end.

    IPython's `pre_run_cell` and `post_run_cell`, which come in pairs, also for a cell that fails or is interrupted.
    Not `pre_execute` and `post_execute`: each comm message fires those too, in the middle of a cell. Of nested cells
    (`shell.run_cell` in a cell) only the outermost counts. ipykernel 7 runs cells on threads too (subshells): one stack
    a thread.

    Made in the middle of a cell, it takes that one to have begun now. Where none runs, the next one's beginning shows
    that.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._main = threading.main_thread().ident
        self._open: dict[int | None, list[tuple[int, int]]] = {}  # by thread: start in ns and number of each
        self._assumed: tuple[int, int] | None = (time.perf_counter_ns(), num_cells(shell))
        shell.events.register("pre_run_cell", self._begins)
        shell.events.register("post_run_cell", self._ended)

    @property
    def running(self) -> bool:
        """Whether a cell of the main thread has begun and not ended."""
        return self._assumed is not None or bool(self._open.get(self._main))

    def record(self, recorder: Recorder) -> None:
        """Give it a Phase.CELL span for each cell from the running one on; `ref` is the cell's number. And a
        Phase.CALLBACK span for each callback that `called` hears of."""
        self._recorders.add(recorder)
        for begun in tuple(self._open.values()):
            recorder.begin(Phase.CELL, *begun[0])

    def called(self, name: str, start_ns: int, end_ns: int) -> None:
        """A widget's callback has run on the loop, which all engines share."""
        for recorder in tuple(self._recorders):
            recorder.record(Phase.CALLBACK, start_ns, end_ns, name=name)

    def _begins(self, _: object) -> None:
        warn_if_cells_get_lost()
        shell, thread = self._shell(), threading.get_ident()
        if thread == self._main:
            self._assumed = None
        begun = self._open.setdefault(thread, [])
        begun.append((time.perf_counter_ns(), num_cells(shell) + 1 if shell else 0))
        if len(begun) == 1:
            for recorder in tuple(self._recorders):
                recorder.begin(Phase.CELL, *begun[0])

    def _ended(self, _: object) -> None:
        now, thread = time.perf_counter_ns(), threading.get_ident()
        begun = self._open.get(thread)
        if begun:
            _, number = begun.pop()
            if not begun:
                del self._open[thread]
                for recorder in tuple(self._recorders):
                    recorder.end(Phase.CELL, now, number)
        elif thread == self._main and self._assumed is not None:
            (start, number), self._assumed = self._assumed, None
            for recorder in tuple(self._recorders):
                recorder.record(Phase.CELL, start, now, number)


def num_cells(shell: Any) -> int:
    """Cells there have been, one that runs included. Not `execution_count`: since IPython 9.18 it is the next one's by
    the time that a cell's beginning is told, and before it was that cell's own."""
    return len(shell.history_manager.input_hist_parsed) - 1


_of_shells: weakref.WeakKeyDictionary[Any, Cells] = weakref.WeakKeyDictionary()


def cells_of(shell: Any) -> Cells:
    """The one `Cells` of a shell, made at the first call. Raises something where the shell is not as IPython's is."""
    cells = _of_shells.get(shell)
    if cells is None:
        cells = _of_shells[shell] = Cells(shell)
    return cells


def record_cells(recorder: Recorder) -> None:
    """Put the user's cells on a timeline, from the running one on. Outside IPython: nothing. From any thread.

    A shell that is not as IPython's is has none there; a warning says so.
    """
    shell = _shell()
    if shell is None:
        return
    try:
        cells = cells_of(shell)
    except Exception as error:
        warnings.warn(
            f"{type(shell).__name__} is not a shell as this version of interactive_infer knows it "
            f"({type(error).__name__}: {error}): its cells are not on the timeline",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    cells.record(recorder)


@contextmanager
def recorded_callback(name: str) -> Iterator[None]:
    """Put the block on the timelines that have the cells, as a widget's callback. Outside IPython: nothing."""
    start_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        shell = _shell()
        cells = None if shell is None else _of_shells.get(shell)
        if cells is not None:
            cells.called(name, start_ns, time.perf_counter_ns())


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()
