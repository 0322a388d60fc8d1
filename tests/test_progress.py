"""What a load shows in a terminal, in a log and in a notebook."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from interactive_infer.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


def load(shown: bool = True) -> None:
    with ProgressBar(shown) as bar:
        for stage in ("loading weights", "checking <b>"):
            for percent in range(101):
                bar.update(stage, percent / 100)
    bar.update("checking", 1.0)  # came late to the loop


def test_a_log_gets_a_line_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    load()
    assert log.getvalue() == "interactive_infer: loading weights\ninteractive_infer: checking <b>\n"


def test_a_terminal_gets_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load()
    shown = terminal.getvalue()
    assert "loading weights:" in shown and "checking" in shown
    assert not shown.rsplit("\r", 2)[1].strip() and shown.endswith("\r"), "the last thing drawn is nothing"


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_nothing_where_it_is_not_wanted_or_there_is_no_stderr(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    load(shown=stderr is None)
    assert stderr is None or stderr.getvalue() == ""


class TestInANotebook:
    @pytest.fixture
    def displayed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
        """(display id, bundle) of everything that was displayed, in order."""
        said: list[tuple[str, dict[str, str]]] = []

        def hear(bundle: dict[str, str], *, raw: bool, display_id: str) -> None:
            assert raw
            said.append((display_id, bundle))

        loading = pytest.importorskip("interactive_infer.notebook.loading")
        ipython: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setattr(loading, "display", hear)
        monkeypatch.setattr(loading, "update_display", hear)
        return said

    def test_one_output_that_ends_as_a_line(self, displayed: list[tuple[str, dict[str, str]]]) -> None:
        load()
        assert len({display_id for display_id, _ in displayed}) == 1
        *bars, (_, last) = displayed
        assert set(last) == {"text/plain"} and last["text/plain"].startswith("loaded in ")
        assert all(bundle["text/plain"] == "" and "<progress" in bundle["text/html"] for _, bundle in bars)
        assert not any("<b>" in bundle["text/html"] for _, bundle in bars)

    def test_a_load_that_fails_leaves_no_bar(self, displayed: list[tuple[str, dict[str, str]]]) -> None:
        with pytest.raises(KeyError), ProgressBar(True) as bar:
            bar.update("loading weights", 0.5)
            raise KeyError
        assert displayed[-1][1] == {"text/plain": ""}
