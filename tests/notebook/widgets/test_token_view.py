from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from interactive_infer.notebook import widgets
from interactive_infer.notebook.display import Follower
from interactive_infer.notebook.widgets.token_view import TokenView
from tests.notebook.fakes import Clock, Writer

SOURCE = Path(widgets.__file__).parent / "token_view.js"


class FrontEnd:
    """The browser's side of the protocol, on a wire that loses what `lose` says."""

    def __init__(self, view: TokenView, monkeypatch: pytest.MonkeyPatch, lose: set[int] = frozenset()) -> None:
        self.text, self.status, self.sent, self.count = "", "", 0, 0
        self.asked: list[int] = []
        self._lose = lose

        def send(content: dict, buffers: object = None) -> None:
            self.sent += len(content["text"])
            self._receive(content["start"], content["text"], content["status"])

        def send_state(keys: object = None) -> None:
            self.sent += len(view.text)
            self._receive(0, view.text, view.status)

        monkeypatch.setattr(view, "send", send, raising=False)
        monkeypatch.setattr(view, "send_state", send_state, raising=False)

    def _receive(self, start: int, text: str, status: str) -> None:
        self.count += 1
        if self.count in self._lose:
            return
        if start > len(self.text):
            self.asked.append(len(self.text))
            return
        self.text += text[len(self.text) - start :]
        self.status = status


def follow(writer: Writer, view: TokenView) -> Clock:
    clock = Clock()
    Follower(writer.generation, view.publish, rate=30, clock=clock, call_later=clock.call_later).start()
    return clock


def write_all(writer: Writer, clock: Clock, words: list[str]) -> None:
    for _ in words:
        writer.write()
        clock.advance(0.01)


def test_the_wire_carries_a_few_times_the_text_and_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word {i} " for i in range(5_000)]
    writer = Writer(words)
    view = TokenView(writer.output, None)
    front_end = FrontEnd(view, monkeypatch)
    write_all(writer, follow(writer, view), words)
    writer.finish()
    assert front_end.text == "".join(words)
    assert front_end.status.startswith("stop · 5,000 tokens")
    assert front_end.sent <= 4 * len(front_end.text)
    assert not front_end.asked


def test_what_was_lost_is_asked_for_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{i} " for i in range(1_000)]
    writer = Writer(words)
    view = TokenView(writer.output, None)
    front_end = FrontEnd(view, monkeypatch, lose=set(range(30, 40)))
    clock = follow(writer, view)
    write_all(writer, clock, words[:150])
    assert front_end.asked, "the loss was not noticed"
    assert front_end.text != writer.generation.text
    view._handle_custom_msg({"resend": front_end.asked[0]}, [])
    clock.advance(0.1)
    assert front_end.text == writer.generation.text


def test_a_loss_heals_without_an_answer_when_the_text_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{i} " for i in range(1_000)]
    writer = Writer(words)
    view = TokenView(writer.output, None)
    front_end = FrontEnd(view, monkeypatch, lose={1, 2, 3, 9})
    write_all(writer, follow(writer, view), words)
    assert len(front_end.text) >= len(writer.generation.text) // 2 - 10
    assert writer.generation.text.startswith(front_end.text)


def test_the_synced_text_shows_a_late_view_what_was_before_it() -> None:
    words = [f"{i} " for i in range(200)]
    writer = Writer(words)
    view = TokenView(writer.output, None)
    write_all(writer, follow(writer, view), words)
    assert len(view.get_state()["text"]) >= len(writer.generation.text) // 2 - 10
    writer.finish()
    assert view.get_state()["text"] == "".join(words)


@pytest.mark.parametrize("content", [{}, {"resend": -1}, {"resend": "0"}, {"resend": None}, [], "resend"])
def test_messages_that_are_not_ours_are_ignored(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    view = TokenView(Writer([]).output, None)
    front_end = FrontEnd(view, monkeypatch)
    view._handle_custom_msg(content, [])
    assert front_end.count == 0


async def test_a_request_from_another_thread_is_answered_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a", "b"])
    view = TokenView(writer.output, asyncio.get_running_loop())
    answered = asyncio.Event()
    threads: list[int] = []

    def send(content: dict, buffers: object = None) -> None:
        threads.append(threading.get_ident())
        answered.set()

    monkeypatch.setattr(view, "send", send, raising=False)
    await asyncio.to_thread(view._handle_custom_msg, {"resend": 0}, [])
    await asyncio.wait_for(answered.wait(), 30)
    assert threads == [threading.get_ident()]


def test_the_page_inserts_text_only_as_text_nodes() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|srcdoc", source)
