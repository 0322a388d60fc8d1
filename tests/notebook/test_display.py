from __future__ import annotations

import gc
import importlib.util
import json
from types import SimpleNamespace

import IPython.display
import pytest

from interactive_infer.generation import GenerationGroup
from interactive_infer.notebook import display
from interactive_infer.notebook.follower import Follower
from tests.notebook.fakes import Clock, Writer

HOSTILE = ["<script>", "alert(1)</script>", "<img src=x onerror=", "'alert(2)'>", " & ", '"quoted"', "\n$x$ **b**"]
WIDGET = "application/vnd.jupyter.widget-view+json"


def test_text_that_no_message_can_carry_is_shown_all_the_same() -> None:
    words = ["NUL \0", " half \ud83d", " other half \udc09", " dragon \U0001f409", " bidi \u202e", "x" * 1_000_000]
    writer = Writer(words)
    writer.write(len(words))
    writer.finish()
    bundle = display.bundle(writer.generation)
    json.dumps(bundle, ensure_ascii=False).encode()  # as jupyter_client does
    assert "NUL \u2400 half \ufffd other half \ufffd dragon \U0001f409 bidi \u202ex" in bundle["text/html"]
    assert "\0" not in bundle["text/html"] and "x" * 1_000_000 in bundle["text/plain"]


def test_the_status_says_how_fast_tokens_come() -> None:
    writer = Writer(["a"] * 300)
    assert display.status(writer.generation) == "waiting · 0 tokens"
    writer.output.created_ns = -250_000_000
    writer.write(300)
    writer.finish()
    assert display.status(writer.generation) == (
        "stop · 300 tokens · 1,000.0 tokens/s after the first · first token after 0.25 s · 1.0 ms between tokens"
    )


def test_hostile_text_is_data_in_the_saved_notebook() -> None:
    writer = Writer(HOSTILE)
    writer.write(len(HOSTILE))
    writer.finish("error", RuntimeError("<b>oops</b>"))
    bundle = display.bundle(writer.generation)
    markup = bundle["text/html"]
    assert "<script" not in markup and "<img" not in markup and "<b>" not in markup
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in markup
    assert "&lt;b&gt;oops&lt;/b&gt;" in markup
    assert bundle["text/plain"].startswith("".join(HOSTILE))


# -- show() ------------------------------------------------------------------------------------------------------------


class Shown:
    """What was displayed in a kernel that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.displayed: list[dict] = []
        self.updated: list[dict] = []
        self.ids: set[str] = set()

        def catch(into: list[dict]):
            def show(data: dict, *, raw: bool, display_id: str) -> None:
                assert raw
                into.append(data)
                self.ids.add(display_id)

            return show

        monkeypatch.setattr(IPython.display, "display", catch(self.displayed))
        monkeypatch.setattr(IPython.display, "update_display", catch(self.updated))
        monkeypatch.setattr(display, "_shell", lambda: SimpleNamespace(kernel=object()))


def test_a_live_view_becomes_the_final_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, writer = Shown(monkeypatch), Writer(HOSTILE)
    assert writer.generation.show() is writer.generation
    writer.write(len(HOSTILE))
    writer.finish()
    (first,), (last,) = shown.displayed, shown.updated
    assert WIDGET in first and {"text/plain", "text/html"} <= set(first)
    assert set(last) == {"text/plain", "text/html"}, "a reopened notebook has no model for a view"
    assert last["text/plain"] == "".join(HOSTILE)
    assert len(shown.ids) == 1


@pytest.fixture
def in_cells(monkeypatch: pytest.MonkeyPatch) -> tuple[Shown, list[str]]:
    """What is displayed, and the cells that there have been (IPython's has an empty one at first)."""
    shown, cells = Shown(monkeypatch), ["", "first"]
    shell = SimpleNamespace(kernel=object(), history_manager=SimpleNamespace(input_hist_parsed=cells))
    monkeypatch.setattr(display, "_shell", lambda: shell)
    return shown, cells


def test_what_show_displayed_is_not_displayed_again_as_its_cells_value(in_cells: tuple[Shown, list[str]]) -> None:
    shown, cells = in_cells
    one, other = Writer(["a"]).generation, Writer(["b"]).generation
    one.show()._ipython_display_()
    assert len(shown.displayed) == 1
    GenerationGroup([one, other]).show()._ipython_display_()
    assert len(shown.displayed) == 3
    one.show()
    one.show()
    assert len(shown.displayed) == 5, "who asks twice gets two"
    one._ipython_display_()
    other._ipython_display_()
    assert len(shown.displayed) == 6, "the other was not shown since"
    one.show()
    cells.append("second")
    GenerationGroup([one, other])._ipython_display_()
    assert len(shown.displayed) == 9, "that was another cell"


def test_a_value_that_was_not_shown_is_displayed_each_time(in_cells: tuple[Shown, list[str]]) -> None:
    shown, _ = in_cells
    generation = Writer(["a"]).generation
    generation._ipython_display_()
    generation._ipython_display_()
    assert len(shown.displayed) == 2


def test_an_open_view_holds_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    Shown(monkeypatch)
    writer = Writer(["a"])
    writer.generation.show()
    assert writer.engine._steps.held == [writer.generation]


def test_without_widgets_plain_html_is_updated_at_most_5_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, writer, clock = Shown(monkeypatch), Writer([f"{i} " for i in range(1_000)]), Clock()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    defaults = {**Follower.__init__.__kwdefaults__, "clock": clock, "call_later": clock.call_later}
    monkeypatch.setattr(Follower.__init__, "__kwdefaults__", defaults)
    writer.generation.show()
    for _ in range(1_000):
        writer.write()
        clock.advance(0.002)
    assert 8 <= len(shown.updated) <= 11
    writer.finish()
    assert WIDGET not in shown.displayed[0]
    assert shown.updated[-1]["text/plain"] == writer.generation.text


def test_a_finished_generation_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, writer = Shown(monkeypatch), Writer(["all ", "of it"])
    writer.write(2)
    writer.finish()
    writer.generation._ipython_display_()
    assert shown.displayed[0]["text/plain"] == "all of it"
    assert not shown.updated


def test_a_terminal_ipython_prints_the_text_once_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_shell", SimpleNamespace)
    writer = Writer(["one ", "two"])
    writer.generation.show()
    writer.write(2)
    assert capsys.readouterr().out == ""
    writer.finish()
    assert capsys.readouterr().out == "one two\n"


def test_in_a_terminal_text_cannot_steer_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_shell", SimpleNamespace)
    writer = Writer(["\x1b[2J cleared \x07", " half \ud83d", " bidi \u202e", "\n\tdragon \U0001f409"])
    writer.generation.show()
    writer.write(4)
    writer.finish("error", RuntimeError("\x1b]0;title\x07"))
    shown = capsys.readouterr().out
    assert shown.startswith("\\x1b[2J cleared \\x07 half \ufffd bidi \\u202e\n\tdragon \U0001f409\n")
    assert "[RuntimeError: \\x1b]0;title\\x07]" in shown
    assert not set(shown) & set("\x1b\x07\u202e")


def test_outside_ipython_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(["a"])
    listeners = list(writer.output.listeners)
    writer.generation.show()
    writer.write()
    writer.finish()
    assert writer.output.listeners == listeners
    assert capsys.readouterr().out == ""
    assert not writer.engine._steps.held


def test_a_view_lets_go_when_the_text_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    Shown(monkeypatch)
    writer = Writer(["a"])
    writer.generation.show()
    writer.write()
    writer.finish()
    gc.collect()
    assert [listener for listener in writer.output.listeners if isinstance(listener, Follower)] == []
