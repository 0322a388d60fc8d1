"""What a token view sends and what it answers, without a browser."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interactive_infer import Alternative, Engine, Token
from interactive_infer.errors import EngineClosedError
from interactive_infer.notebook import widgets
from interactive_infer.notebook.follower import Follower
from interactive_infer.notebook.widgets import token_view
from interactive_infer.notebook.widgets.panel import Panel
from interactive_infer.notebook.widgets.token_view import TokenView
from interactive_infer.timeline.analysis import duration
from tests.notebook.fakes import Clock, Writer
from tests.notebook.test_display import WIDGET
from tests.notebook.widgets.conftest import Wire

SOURCES = Path(widgets.__file__).parent.glob("*.js")


class FrontEnd:
    """The browser's side of the protocol (stream.js in short), on a wire that loses what `lose` says."""

    def __init__(self, writer: Writer, monkeypatch: pytest.MonkeyPatch, lose: set[int] = frozenset()) -> None:
        self.clock = Clock()
        timing = {"clock": self.clock, "call_later": self.clock.call_later}
        monkeypatch.setattr(Follower.__init__, "__kwdefaults__", {**(Follower.__init__.__kwdefaults__ or {}), **timing})
        self.view = TokenView(writer.generation)
        self.tokens: list[str] = []
        self.logprobs: dict[int, float] = {}
        self.details: list[dict[str, Any]] = []
        self.steps: dict[int, str] = {}
        self.errors: list[str] = []
        self.status, self.state, self.run = "", "", 0
        self.bytes = self.count = 0
        self.asked: list[int] = []
        self.renewed = 0
        self._lose = lose
        monkeypatch.setattr(self.view, "send", lambda content, buffers=None: self._receive(content), raising=False)
        monkeypatch.setattr(self.view, "send_state", self._receive_state, raising=False)
        monkeypatch.setattr(self.view, "renew", self._renew, raising=False)
        self.view.stream.start()

    def _renew(self) -> None:
        self.renewed += 1

    def _receive_state(self, key: str | None = None) -> None:
        if self.view.snapshot:
            self._receive(self.view.snapshot)

    def _receive(self, message: dict[str, Any]) -> None:
        self.count += 1
        self.bytes += len(json.dumps(message, ensure_ascii=False).encode())
        if self.count in self._lose:
            return
        if "error" in message:
            self.errors.append(message["error"])
        elif "detail" in message:
            self.details.append(message)
        elif "made" in message:
            self.steps[message["made"]] = message["step"]
        else:
            self._receive_batch(message)

    def _receive_batch(self, message: dict[str, Any]) -> None:
        if message["run"] > self.run:
            self.run = message["run"]
            del self.tokens[message["keep"] :]
        start, tokens = message["from"], message.get("tokens", [])
        if start <= len(self.tokens):
            self.tokens += tokens[len(self.tokens) - start :]
        self.logprobs |= {start + i: value for i, value in enumerate(message.get("logprobs", ())) if value is not None}
        self.status, self.state = message.get("status", self.status), message.get("state", self.state)
        if len(self.tokens) < message["count"]:
            self.asked.append(len(self.tokens))

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    def say(self, message: object) -> None:
        self.view._handle_custom_msg(message, [])

    def catch_up(self) -> None:
        while self.asked:
            self.say({"resend": self.asked.pop()})


def write_all(writer: Writer, clock: Clock, words: list[str]) -> None:
    for _ in words:
        writer.write()
        clock.advance(0.01)


def test_the_wire_carries_each_token_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word {i} " for i in range(5_000)]
    writer = Writer(words)
    front_end = FrontEnd(writer, monkeypatch)
    write_all(writer, front_end.clock, words)
    writer.finish()
    assert front_end.text == "".join(words)
    assert front_end.status.startswith("stop · 5,000 tokens") and front_end.state == "finished"
    assert front_end.bytes <= 120 * len(words)
    assert not front_end.asked
    assert front_end.renewed == 1, "the saved output is the final text"


def test_what_was_lost_is_asked_for_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{i} " for i in range(1_000)]
    writer = Writer(words)
    front_end = FrontEnd(writer, monkeypatch, lose=set(range(30, 40)))
    write_all(writer, front_end.clock, words[:150])
    assert front_end.asked, "the loss was not noticed"
    assert front_end.text != writer.generation.text
    front_end.catch_up()
    front_end.clock.advance(0.1)
    assert front_end.text == writer.generation.text


def test_an_early_loss_heals_without_an_answer_when_the_text_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{i} " for i in range(1_000)]
    writer = Writer(words)
    front_end = FrontEnd(writer, monkeypatch, lose={1, 2, 3, 9})
    write_all(writer, front_end.clock, words)
    assert len(front_end.tokens) >= 128
    assert writer.generation.text.startswith(front_end.text)


def test_a_long_text_that_has_ended_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{i} " for i in range(20_000)]
    writer = Writer(words)
    writer.write(len(words))
    writer.finish()
    front_end = FrontEnd(writer, monkeypatch)
    assert len(front_end.tokens) == 1_000
    front_end.catch_up()
    assert front_end.tokens == words
    assert front_end.renewed == 0, "it was displayed whole"


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"resend": -1},
        {"resend": "0"},
        {"detail": 99},
        {"detail": "0"},
        {"do": "close"},
        {"do": "__del__"},
        {"visible": 0, "page": "one"},
        {"visible": False},
        {"visible": False, "page": 1},
        [],
        "resend",
        None,
    ],
)
def test_messages_that_are_not_ours_are_ignored(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a"])
    writer.write()
    front_end = FrontEnd(writer, monkeypatch)
    front_end.clock.advance(1)
    count = front_end.count
    front_end.say(content)
    front_end.clock.advance(1)
    assert front_end.count == count


async def test_a_message_from_another_thread_is_heard_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    view = TokenView(Writer(["a", "b"]).generation)
    answered = asyncio.Event()
    threads: list[int] = []

    def send(content: dict, buffers: object = None) -> None:
        threads.append(threading.get_ident())
        answered.set()

    monkeypatch.setattr(view, "send", send, raising=False)
    await asyncio.to_thread(view._handle_custom_msg, {"resend": 0}, [])
    await asyncio.wait_for(answered.wait(), 30)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_a_button_steers_the_generation(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, called = Writer(["a"]), []
    monkeypatch.setattr(writer.generation, verb, lambda: called.append(verb), raising=False)
    FrontEnd(writer, monkeypatch).say({"do": verb})
    assert called == [verb]


def test_what_a_button_raises_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a"])
    writer.write()
    writer.finish()

    def refuse() -> None:
        raise EngineClosedError("closed <b>")

    monkeypatch.setattr(writer.generation, "continue_", refuse, raising=False)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"do": "continue"})
    assert front_end.errors == ["EngineClosedError: closed <b>"]


def test_continue_goes_on_in_the_same_view(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Writer(["one ", "two ", "end"]), Writer(["one ", "two ", "three ", "four"])
    front_end = FrontEnd(first, monkeypatch)
    first.write(3)
    first.finish()
    second.write(2)  # what both share
    monkeypatch.setattr(first.generation, "continue_", lambda: second.generation, raising=False)
    assert first.generation.continued is first.generation
    front_end.say({"do": "continue"})
    assert front_end.view.stream.generation is second.generation
    assert first.generation.continued is second.generation
    second.write(2)
    second.finish()
    assert front_end.tokens == ["one ", "two ", "three ", "four"]
    assert front_end.renewed == 2


def test_a_hidden_view_is_sent_nothing_until_it_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a "] * 100
    writer = Writer(words)
    front_end = FrontEnd(writer, monkeypatch)
    write_all(writer, front_end.clock, words[:30])
    front_end.say({"visible": False, "page": "one"})
    count = front_end.count
    write_all(writer, front_end.clock, words[:30])
    assert front_end.count == count
    front_end.say({"visible": True, "page": "one"})
    front_end.clock.advance(0)
    assert len(front_end.tokens) == 60


def test_a_page_that_hides_does_not_starve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a "] * 100)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"visible": True, "page": "one"})
    front_end.say({"visible": True, "page": "two"})
    front_end.say({"visible": False, "page": "one"})
    write_all(writer, front_end.clock, ["a "] * 30)
    assert len(front_end.tokens) > 20
    front_end.say({"visible": False, "page": "two"})
    count = front_end.count
    write_all(writer, front_end.clock, ["a "] * 30)
    assert front_end.count == count


def test_a_page_that_went_without_a_word_keeps_no_view_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a "] * 100)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"visible": True, "page": "gone"})
    monkeypatch.setattr("interactive_infer.notebook.widgets.panel.UNSEEN_AFTER_S", -1.0)
    front_end.say({"visible": False, "page": "one"})
    count = front_end.count
    write_all(writer, front_end.clock, ["a "] * 30)
    assert front_end.count == count


def test_a_page_that_was_reloaded_out_of_sight_is_sent_the_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a "] * 100)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"visible": False, "page": "before"})
    front_end.say({"visible": True, "page": "after"})
    write_all(writer, front_end.clock, ["a "] * 60)
    assert len(front_end.tokens) > 50


def test_a_closed_view_follows_no_more_and_leaves_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, before = Writer(["a "] * 100), Follower.open_views
    front_end = FrontEnd(writer, monkeypatch)
    write_all(writer, front_end.clock, ["a "] * 30)
    assert Follower.open_views == before + 1 and WIDGET in front_end.view.bundle()
    front_end.view.close()
    assert front_end.renewed == 1 and set(front_end.view.bundle()) == {"text/plain", "text/html"}
    assert Follower.open_views == before
    count = front_end.count
    writer.write(70)
    writer.finish()
    assert front_end.count == count and front_end.renewed == 1
    assert not [one for one in writer.output.listeners if isinstance(one, Follower)]
    front_end.view.close()


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> list[TokenView]:
    """Two views of texts that have ended stay usable. These are they."""
    monkeypatch.setattr(token_view, "_FINISHED_KEPT", 2)
    monkeypatch.setattr(TokenView, "_finished", kept := [])
    return kept


def ended(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Writer, FrontEnd]:
    writer = Writer([text])
    front_end = FrontEnd(writer, monkeypatch)
    writer.write()
    writer.finish()
    front_end.clock.advance(1)  # which lets go of timers that were cancelled
    return writer, front_end


def test_a_view_that_is_retired_keeps_its_widget_and_text_and_lets_go_of_the_rest(
    few_kept: list[TokenView], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, first = ended("one", monkeypatch)
    bundle = first.view.bundle()
    others = [ended(text, monkeypatch) for text in ("two", "three")]
    assert few_kept == [front_end.view for _, front_end in others]
    assert first.view.retired == {"text": "one", "status": first.status} and first.view.comm is not None
    assert not any(front_end.view.retired for _, front_end in others)
    assert first.view.bundle() == bundle and not first.view.snapshot
    count = first.count
    for message in ({"do": "continue"}, {"resend": 0}, {"detail": 0}, {"visible": True, "page": "one"}):
        first.say(message)
    assert first.count == count and not first.errors
    generation = weakref.ref(writer.generation)
    del writer
    gc.collect()
    assert generation() is None


def test_of_a_generation_that_is_displayed_again_and_again_the_oldest_view_is_retired(
    few_kept: list[TokenView], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = ended("other", monkeypatch)
    writer, first = ended("again", monkeypatch)
    second, third = FrontEnd(writer, monkeypatch), FrontEnd(writer, monkeypatch)
    assert few_kept == [other.view, third.view]
    assert first.view.retired and second.view.retired


def test_a_view_that_is_closed_says_first_that_it_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    view = TokenView(Writer(["a"]).generation)
    told: list[str | None] = []
    monkeypatch.setattr(view, "send_state", lambda key=None: told.append(key), raising=False)
    comm = view.comm
    monkeypatch.setattr(comm, "close", lambda *_, **__: told.append("closed"), raising=False)
    view.close()
    assert [word for word in told if word in ("retired", "closed")] == ["retired", "closed"]
    assert view.retired == {"text": "", "status": "waiting · 0 tokens"}


def test_a_kernel_that_would_not_hear_that_it_is_seen_again_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenView, "answers_at_once", False)
    writer = Writer(["a "] * 60)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"visible": False, "page": "one"})
    write_all(writer, front_end.clock, ["a "] * 60)
    front_end.clock.advance(1)
    assert len(front_end.tokens) == 60


async def test_a_page_that_was_reloaded_gets_the_output_that_it_would_not_hear_of(
    engine: Engine, wire: Callable[[Panel], Wire]
) -> None:
    gen = engine.generate("a cat", max_tokens=40, ignore_eos=True)
    gen.pause()
    page = wire(view := TokenView(gen))
    view.stream.start()
    page.say(here=True)
    page.say(here=True)
    await asyncio.sleep(0)
    assert not page.of("output"), "it is live, and the output is the widget"
    gen.resume()
    await gen
    await page.until(lambda: page.renewed)
    page.say(here=True)
    await page.until(lambda: page.of("output"))
    assert set(page.of("output")[0]["output"]) == {"text/plain", "text/html"}
    assert page.of("output")[0]["output"]["text/plain"] == gen.text


async def test_a_first_page_hears_of_its_output_by_the_kernels_display(
    engine: Engine, wire: Callable[[Panel], Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    displayed: list[object] = []
    monkeypatch.setattr("IPython.display.update_display", lambda bundle, **_: displayed.append(bundle))
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    gen = engine.generate("a cat", max_tokens=4, ignore_eos=True)
    await gen
    panel = TokenView(gen)
    Panel.renew(panel)
    assert not displayed, "it has no output yet"
    Panel.show(panel)
    page = wire(panel)
    monkeypatch.setattr(panel, "renew", lambda: Panel.renew(panel), raising=False)
    for pages in (1, 2):
        page.say(here=True)
        await page.until(lambda pages=pages: panel._pages == pages)
        page.sent.clear()
        page.say(renew=True)
        await page.until(lambda pages=pages: len(displayed) == pages)
        assert bool(page.of("output")) is (pages == 2)


# -- probabilities -----------------------------------------------------------------------------------------------------


def scoring(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`Generation.score` without a model; the list gets how many tokens there were at each call."""
    calls: list[int] = []

    async def score(k: int) -> tuple[Token, ...]:
        count = len(writer.output.token_ids)
        calls.append(count)
        await asyncio.sleep(0)
        other = Alternative(7, "other", -0.5)
        return tuple(Token(i, writer.output.piece(i), i, -1.0 - i, 2, (other,)) for i in range(count))

    monkeypatch.setattr(writer.generation, "score", score, raising=False)
    return calls


async def turns(front_end: FrontEnd, count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_first_hover_scores_the_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a", "b", "c"])
    calls = scoring(writer, monkeypatch)
    writer.write(3)
    writer.finish()
    front_end = FrontEnd(writer, monkeypatch)
    for index in (1, 2, 1):
        front_end.say({"detail": index})
    await turns(front_end)
    front_end.say({"detail": 0})
    await turns(front_end)
    assert calls == [3]
    assert [(d["detail"], d["logprob"], d["rank"]) for d in front_end.details] == [
        (1, -2.0, 2),
        (2, -3.0, 2),
        (0, -1.0, 2),
    ]
    assert front_end.details[0]["alternatives"][0][0] == 7


async def test_a_text_that_has_grown_is_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a", "b", "c"])
    calls = scoring(writer, monkeypatch)
    front_end = FrontEnd(writer, monkeypatch)
    writer.write(1)
    front_end.clock.advance(1)
    front_end.say({"detail": 0})
    await turns(front_end)
    writer.write(2)
    front_end.clock.advance(1)
    front_end.say({"shade": True})
    await turns(front_end)
    assert calls == [1, 3]
    assert front_end.logprobs == {0: -1.0, 1: -2.0, 2: -3.0}


async def test_probabilities_that_cannot_be_had_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a"])
    writer.write()
    writer.finish()

    async def score(k: int) -> tuple[Token, ...]:
        raise EngineClosedError("it is closed")

    monkeypatch.setattr(writer.generation, "score", score, raising=False)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"detail": 0})
    await turns(front_end)
    assert front_end.details == [{"detail": 0, "problem": "no probabilities: it is closed"}]
    front_end.say({"shade": True})
    await turns(front_end)
    assert front_end.errors == ["EngineClosedError: it is closed"]


async def test_a_score_that_knows_less_than_was_asked_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, calls = Writer(["a"]), []
    writer.write()
    writer.finish()

    async def score(k: int) -> tuple[Token, ...]:
        calls.append(k)
        return ()

    monkeypatch.setattr(writer.generation, "score", score, raising=False)
    front_end = FrontEnd(writer, monkeypatch)
    front_end.say({"detail": 0})
    await turns(front_end)
    assert len(calls) == 1 and "problem" in front_end.details[0]


# -- steps -------------------------------------------------------------------------------------------------------------


async def test_a_token_leads_to_the_step_that_made_it(engine: Engine, wire: Callable[[Panel], Wire]) -> None:
    one, other = engine.generate(["a cat", "a dog"], max_tokens=9, ignore_eos=True)
    view = TokenView(one)
    page = wire(view)
    view.stream.start()
    await asyncio.gather(one, other)
    for index in (0, 5):
        page.say(detail=index)
        await page.until(lambda index=index: any(message["made"] == index for message in page.of("made")))
    first, later = (engine.timeline.step_of(one, index) for index in (0, 5))
    assert first is not None and later is not None
    assert [(message["made"], message["step"]) for message in page.of("made")] == [
        (0, f"step {first.step_id}: prefill of 2 texts, {duration(first.duration_ns)}"),
        (5, f"step {later.step_id}: decode of 2 texts, {duration(later.duration_ns)}"),
    ]

    # A branch did not draw what it shares; and the records may have been cleared.
    branch = one.branch(at=4)
    await branch
    page = wire(branched := TokenView(branch))
    branched.stream.start()
    page.say(detail=2)
    await page.until(lambda: page.of("made"))
    engine.timeline.clear()
    page.say(detail=6)
    await page.until(lambda: len(page.of("made")) == 2)
    assert [(message["made"], message["step"]) for message in page.of("made")] == [(2, ""), (6, "")]


async def test_of_many_tokens_asked_for_at_once_the_last_ones_step_is_looked_up(
    engine: Engine, wire: Callable[[Panel], Wire]
) -> None:
    gen = engine.generate("a cat", max_tokens=40, ignore_eos=True)
    page = wire(view := TokenView(gen))
    view.stream.start()
    await gen
    for index in range(40):
        page.say(detail=index)
    await page.until(lambda: any(message["made"] == 39 for message in page.of("made")))
    assert len(page.of("made")) <= 3


def test_the_pages_insert_text_only_as_text() -> None:
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|srcdoc|new Function"
        assert not re.search(unsafe, source), path.name
