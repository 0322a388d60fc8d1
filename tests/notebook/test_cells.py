"""The spans of the user's cells."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest
from IPython.core.events import EventManager, available_events

from interactive_infer.notebook.cells import Cells, record_cells, recorded_callback
from interactive_infer.timeline.recorder import Phase, Recorder
from tests.notebook.kernels import Kernel


class Shell:
    """Fires what IPython fires around cells and comm messages."""

    def __init__(self) -> None:
        self.events = EventManager(self, available_events)
        self.history_manager = SimpleNamespace(input_hist_parsed=[""] * 7)  # six cells have been

    def begin(self) -> None:
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", SimpleNamespace())
        self.history_manager.input_hist_parsed.append("a cell")

    def end(self) -> None:
        self.events.trigger("post_execute")
        self.events.trigger("post_run_cell", None)

    def comm_message(self) -> None:
        self.events.trigger("pre_execute")
        self.events.trigger("post_execute")


def spans(recorder: Recorder) -> list[tuple[int, int, int]]:
    held = recorder.snapshot().spans
    assert set(held["phase"].tolist()) <= {Phase.CELL}
    return [tuple(span) for span in held[["start", "end", "ref"]].tolist()]


def test_each_cell_is_one_span_whatever_comes_in_the_middle() -> None:
    shell, recorder = Shell(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    for _ in range(3):
        assert not shell.begin() and cells.running
        shell.comm_message()
        assert cells.running
        shell.end()
        assert not cells.running
        shell.comm_message()
    assert [ref for _, _, ref in spans(recorder)] == [7, 8, 9]
    edges = [edge for start, end, _ in spans(recorder) for edge in (start, end)]
    assert edges == sorted(edges)


def test_the_cell_in_which_it_begins_counts_from_then() -> None:
    shell, recorder = Shell(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    assert cells.running
    shell.end()
    assert [ref for _, _, ref in spans(recorder)] == [6] and not cells.running


def test_a_running_cell_is_there_too() -> None:
    shell, recorder, later = Shell(), Recorder(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    shell.begin()
    cells.record(later)
    for each in (recorder, later):
        [(start, end, number)] = spans(each)
        assert start <= end and number == 7
    shell.end()
    assert len(spans(recorder)) == len(spans(later)) == 1
    assert spans(recorder)[0][:2] == spans(later)[0][:2]


def test_of_nested_cells_the_outermost_counts() -> None:
    shell, recorder = Shell(), Recorder()
    Cells(shell).record(recorder)
    shell.begin()
    shell.begin()
    shell.end()
    shell.end()
    assert [ref for _, _, ref in spans(recorder)] == [7]


def test_cells_of_several_threads_do_not_end_each_other() -> None:
    shell, recorder = Shell(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    shell.begin()
    thread = threading.Thread(target=lambda: (shell.begin(), shell.end()))
    thread.start()
    thread.join()
    assert [ref for _, _, ref in spans(recorder)] == [8, 7] and cells.running, "the one that runs comes last"
    shell.end()
    assert [ref for _, _, ref in spans(recorder)] == [8, 7] and not cells.running


def test_a_callback_is_a_span_with_the_widgets_name() -> None:
    shell, recorder = Shell(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    cells.called("Button", 10, 30)
    held = recorder.snapshot()
    assert held.spans[["start", "end", "phase"]].tolist() == [(10, 30, Phase.CALLBACK)]
    assert list(held.names) == ["Button"]


def test_a_recorder_is_not_kept() -> None:
    shell, recorder = Shell(), Recorder()
    cells = Cells(shell)
    cells.record(recorder)
    del recorder
    assert not list(cells._recorders)


@pytest.mark.notebook
def test_cells_in_a_kernel(kernel: Kernel) -> None:
    kernel.run(
        "import asyncio, json\nimport ipywidgets\nfrom interactive_infer import keep_live, run_sync\n"
        "from interactive_infer.notebook.cells import record_cells\n"
        "from interactive_infer.timeline.recorder import Recorder\nslider = ipywidgets.IntSlider()\nkeep_live(slider)\n"
        "recorder = Recorder()\nrecord_cells(recorder)\nfirst = len(In) - 1\n"
        "gate = asyncio.Event()\nslider.observe(lambda change: gate.set(), 'value')"
    )
    slider = kernel.value("slider.model_id")
    awaiting = kernel.start("print('awaiting')\nawait gate.wait()")
    kernel.await_print(awaiting, "awaiting")
    kernel.finish(kernel.set(slider, value=3), awaiting)
    interrupted = kernel.start("gate.clear()\nprint('awaiting')\nwhile True: await asyncio.sleep(0.01)")
    kernel.await_print(interrupted, "awaiting")
    kernel.finish(kernel.set(slider, value=4))
    kernel.interrupt()
    failing = kernel.start("1 / 0")
    kernel.finish(interrupted, failing, kernel.set(slider, value=5))
    kernel.run("from interactive_infer.timeline import Phase\nheld = recorder.snapshot()")
    assert kernel.value("held.names[held.spans['phase'] == Phase.CALLBACK].tolist()") == ["IntSlider"] * 3
    recorded = kernel.value(
        "[held.spans[held.spans['phase'] == Phase.CELL][key].tolist() for key in ('ref', 'start', 'end')]"
    )
    first = kernel.value("first")
    # Those that began before this one: the first, the slider's id, the three, the look at the spans.
    assert recorded[0][:5] == [first + n for n in range(5)]
    edges = [edge for pair in zip(*recorded[1:], strict=True) for edge in pair]
    assert edges == sorted(edges)


def test_outside_ipython_nothing_happens() -> None:
    record_cells(Recorder())


@pytest.mark.parametrize("missing", ["events", "history_manager"])
def test_a_shell_that_is_not_known_has_no_cells_and_breaks_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell()
    delattr(shell, missing)
    monkeypatch.setattr("interactive_infer.notebook.cells._shell", lambda: shell)
    with pytest.warns(RuntimeWarning, match=rf"'{missing}'.*not on the timeline"):
        record_cells(Recorder())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorded_callback("Button"):
            pass
