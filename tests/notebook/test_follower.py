"""How often a view hears of a text, and what."""

from __future__ import annotations

import itertools
import logging

import pytest

from interactive_infer.notebook import display
from interactive_infer.notebook.follower import Follower, Update
from interactive_infer.timeline.recorder import Phase
from tests.notebook.fakes import Clock, Writer


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
