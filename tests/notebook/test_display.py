from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import logging
from types import SimpleNamespace

import IPython.display
import pytest

from interactive_infer.notebook import display
from interactive_infer.notebook.display import Follower, Update
from interactive_infer.timeline.recorder import Phase
from tests.notebook.fakes import Clock, Writer

HOSTILE = ["<script>", "alert(1)</script>", "<img src=x onerror=", "'alert(2)'>", " & ", '"quoted"', "\n$x$ **b**"]
WIDGET = "application/vnd.jupyter.widget-view+json"


class Watched:
    """A followed generation: the updates with the simulated time at which each came."""

    def __init__(self, writer: Writer, clock: Clock, *, rate: float = 30.0, loop: bool = True) -> None:
        self.updates: list[tuple[float, Update]] = []
        self.follower = Follower(
            writer.generation,
            lambda update: self.updates.append((clock.now, update)),
            rate=rate,
            clock=clock,
            call_later=clock.call_later if loop else lambda delay, callback: None,
        )

    @property
    def text(self) -> str:
        return "".join("".join(update.pieces) for _, update in self.updates)

    @property
    def gaps(self) -> list[float]:
        """Seconds between updates, without the final one, which never waits."""
        times = [time for time, update in self.updates if not update.final]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("tokens_per_second", [20, 100, 2_000])
def test_at_most_30_updates_a_second_however_fast_tokens_come(tokens_per_second: int) -> None:
    words = [f"w{i} " for i in range(3 * tokens_per_second)]
    writer, clock = Writer(words), Clock()
    watched = Watched(writer, clock)
    watched.follower.start()
    for _ in words:
        writer.write()
        clock.advance(1 / tokens_per_second)
    writer.finish()

    assert min(watched.gaps) >= 1 / 30 - 1e-9
    assert len(watched.updates) >= 3 * min(tokens_per_second, 30) * 0.9
    assert watched.text == "".join(words) == writer.generation.text


def test_each_update_carries_only_what_is_new() -> None:
    words = [f"🐉{i} " for i in range(500)]
    writer, clock = Writer(words), Clock()
    watched = Watched(writer, clock)
    watched.follower.start()
    for _ in words:
        writer.write()
        clock.advance(0.004)
    writer.finish()

    position = 0
    for _, update in watched.updates:
        assert update.first == position
        position += len(update.pieces)
    assert [update.final for _, update in watched.updates] == [False] * (len(watched.updates) - 1) + [True]


def test_the_last_token_before_a_silence_is_shown_without_another_commit() -> None:
    writer, clock = Writer(["a", "b", "c"]), Clock()
    watched = Watched(writer, clock)
    watched.follower.start()
    clock.advance(1)
    writer.write(2)
    clock.advance(0.0)
    writer.write()
    clock.advance(0.1)
    assert watched.text == "abc"


@pytest.mark.parametrize("loop", [True, False], ids=["a loop that does not turn", "no loop"])
def test_text_is_shown_while_generate_sync_drives(loop: bool) -> None:
    words = [f"{i} " for i in range(600)]
    writer, clock = Writer(words), Clock(fires=False)
    watched = Watched(writer, clock, loop=loop)
    watched.follower.start()
    for _ in words:
        writer.write()
        clock.advance(0.005)
    assert len(watched.updates) >= 3 * 15
    assert min(watched.gaps) >= 1 / 30 - 1e-9
    writer.finish()
    assert watched.text == "".join(words)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "error"])
def test_the_end_comes_at_once_and_nothing_after_it(reason: str) -> None:
    writer, clock = Writer(["a", "b"]), Clock()
    watched = Watched(writer, clock)
    watched.follower.start()
    clock.advance(1)
    writer.write(2)
    writer.finish(reason, RuntimeError("broken") if reason == "error" else None)
    assert watched.updates[-1][1].final
    assert display.status(writer.generation).startswith(reason)
    assert ("broken" in display.status(writer.generation)) == (reason == "error")
    count = len(watched.updates)
    clock.advance(1)
    assert len(watched.updates) == count
    assert watched.follower not in writer.output.listeners


def test_many_views_share_what_the_notebook_server_lets_through() -> None:
    clock = Clock()
    writers = [Writer(["word "] * 1_000) for _ in range(40)]
    views = [Watched(writer, clock) for writer in writers]
    before = Follower.open_views
    for view in views:
        view.follower.start()
    for _ in range(1_000):
        for writer in writers:
            writer.write()
        clock.advance(0.002)
    assert sum(len(view.updates) for view in views) <= 2 * 200 * 1.1
    for writer in writers:
        writer.finish()
    assert Follower.open_views == before
    assert all(view.text == "word " * 1_000 for view in views)


def test_a_hidden_view_gets_the_end_alone_or_all_that_it_missed() -> None:
    clock, before = Clock(), Follower.open_views
    writers = [Writer(["word "] * 200) for _ in range(2)]
    views = [Watched(writer, clock) for writer in writers]
    for view in views:
        view.follower.start()
        clock.advance(1)
        view.follower.hide()
    assert Follower.open_views == before
    seen = [len(view.updates) for view in views]
    for writer in writers:
        writer.write(100)
    clock.advance(1)
    assert [len(view.updates) for view in views] == seen
    views[0].follower.reveal()
    clock.advance(0)
    assert views[0].text == "word " * 100
    for writer in writers:
        writer.write(100)
        writer.finish()
    assert [view.text for view in views] == ["word " * 200] * 2
    assert len(views[1].updates) == seen[1] + 1
    assert Follower.open_views == before


def test_a_view_that_fails_is_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    writer, clock = Writer(["a"] * 10), Clock()

    def broken(update: Update) -> None:
        raise OSError("the socket is gone")

    follower = Follower(writer.generation, broken, rate=30, clock=clock, call_later=clock.call_later)
    follower.start()
    other = Watched(writer, clock)
    other.follower.start()
    with caplog.at_level(logging.ERROR):
        writer.write(5)
        clock.advance(1)
        writer.write(5)
        writer.finish()
    assert "the socket is gone" in caplog.text
    assert caplog.text.count("Traceback") == 1
    assert other.text == "a" * 10


def test_publishing_is_on_the_timeline() -> None:
    writer, clock = Writer(["a"] * 10), Clock()
    Watched(writer, clock).follower.start()
    writer.write(10)
    writer.finish()
    phases = set(writer.engine.timeline.recorder.snapshot().spans["phase"].tolist())
    assert {Phase.PUBLISH, Phase.DETOKENIZE} <= phases


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
