"""What a running notebook's messages look like in a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from interactive_infer import Engine
from interactive_infer.notebook.hostile import printable
from interactive_infer.notebook.widgets.stream import Stream
from interactive_infer.printer import StreamPrinter
from tests.tiny_models import tiny_model, tiny_tokenizer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sent(comm: str, first: int, *tokens: str) -> dict[str, Any]:
    return custom(comm, {"run": 0, "keep": 0, "from": first, "tokens": list(tokens)})


def custom(comm: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "header": {"msg_type": "comm_msg"},
        "content": {"comm_id": comm, "data": {"method": "custom", "content": content}},
    }


def synced(comm: str, **state: Any) -> dict[str, Any]:
    return {
        "header": {"msg_type": "comm_msg"},
        "content": {"comm_id": comm, "data": {"method": "update", "state": state}},
    }


def display(kind: str, display_id: str, **data: Any) -> dict[str, Any]:
    bundle = {name.replace("_", "/", 1): value for name, value in data.items()}
    content = {"data": bundle, "transient": {"display_id": display_id}}
    return {"header": {"msg_type": kind}, "content": content}


def printed(text: str) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text}}


class TestStreamPrinter:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def printer(self, clock: Clock) -> StreamPrinter:
        return StreamPrinter(clock)

    async def test_a_real_stream_is_printed_as_it_comes(
        self, printer: StreamPrinter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        messages: list[dict[str, Any]] = []
        async with await Engine.load(
            tiny_model("llama"), tokenizer=tiny_tokenizer(), kv_cache_tokens=256, progress=False, freeze_gc=False
        ) as engine:
            generation = engine.generate([5, 9, 2], max_tokens=40, temperature=0, ignore_eos=True)
            stream = Stream(generation, messages.append, lambda _: None)
            stream.start()
            text = (await generation).text
            assert len(messages) > 1 and text
            printer.hear(custom("a", messages[0]))
            assert text.startswith(capsys.readouterr().out)
            for message in messages:
                printer.hear(custom("b", message))
            printer.flush()
            assert capsys.readouterr().out.replace("\n", "") == printable(text).replace("\n", "")
            for message in messages[1:]:  # the first one was lost
                printer.hear(custom("c", message))
            printer.hear(synced("c", snapshot=stream.batch(0)))
            printer.flush()
            assert capsys.readouterr().out.replace("\n", "") == printable(text).replace("\n", "")

    def test_only_what_is_new(self, printer: StreamPrinter, capsys: pytest.CaptureFixture[str]) -> None:
        for message in (sent("a", 0, "On", "ce"), sent("a", 2, " upon"), sent("a", 0, "On", "ce", " upon")):
            printer.hear(message)
        printer.hear(sent("a", 1, "ce"))  # stale
        printer.hear(sent("a", 90, "lost"))  # a message before it was lost; the next snapshot heals it
        printer.hear(synced("a", value=3))
        printer.hear(custom("a", {"hello": True}))
        printer.hear(synced("a", snapshot={"from": 0, "tokens": ["On", "ce", " upon", " a time"]}))
        assert capsys.readouterr().out == "Once upon a time"

    def test_streams_take_turns(self, printer: StreamPrinter, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
        printer.hear(sent("a", 0, "a1 "))
        printer.hear(sent("b", 0, "b1 "))
        printer.hear(sent("a", 1, "a2 "))
        assert capsys.readouterr().out == "a1 a2 "
        printer.hear(sent("b", 1, "b" * 60))
        assert capsys.readouterr().out == "\nb1 " + "b" * 60
        clock.now = 1.0
        printer.hear(sent("a", 2, "a3"))
        assert capsys.readouterr().out == "\na3"
        printer.hear(sent("b", 2, "end"))
        printer.flush()
        assert capsys.readouterr().out == "\nend"

    def test_print_is_at_once(self, printer: StreamPrinter, capsys: pytest.CaptureFixture[str]) -> None:
        printer.hear(sent("a", 0, "a"))
        printer.hear(printed("said\n"))
        assert capsys.readouterr().out == "a\nsaid\n"

    def test_a_display_and_the_widget_it_shows_are_one_stream(
        self, printer: StreamPrinter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        view = display("display_data", "d", text_plain="TokenView()")
        view["content"]["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "a"}
        printer.hear(view)
        printer.hear(sent("a", 0, "Once"))
        printer.hear(display("update_display_data", "d", text_plain="Once upon"))
        assert capsys.readouterr().out == "Once upon"
        assert printer.last == {"d": {"text/plain": "Once upon"}}

    def test_model_text_cannot_steer_the_terminal(
        self, printer: StreamPrinter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printer.hear(sent("a", 0, "\x1b[2Jline\n\t日本 🙂\x07\x9b\u202e"))
        assert capsys.readouterr().out == "\\x1b[2Jline\n\t日本 🙂\\x07\\x9b\\u202e"
