from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from interactive_infer import Engine, SamplingParams
from interactive_infer.notebook.follower import Follower
from tests.tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def texts(ui: Any, number: int) -> list[str]:
    """What a front end has of a run's samples."""
    return [
        "".join(
            "".join(message["tokens"]) for message in ui.sent if message.get("stream") == key and "tokens" in message
        )
        for key in next(message["streams"] for message in ui.of("opened") if message["opened"] == number)
    ]


async def settled(ui: Any, number: int) -> None:
    await ui.until(lambda: [message for message in ui.of("settled") if message["settled"] == number])


async def test_a_prompt_is_run_with_its_parameters_and_samples(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    ui.say(
        run={
            "prompt": "a cat",
            "samples": 3,
            "params": {"max_tokens": 9, "temperature": 1.5, "stop": "", "ignore_eos": True},
        }
    )
    await settled(ui, 1)
    (run,) = ui.panel.runs
    assert [len(one.token_ids) for one in run.generations] == [9] * 3
    assert {one.params.temperature for one in run.generations} == {1.5}
    assert texts(ui, 1) == [one.text for one in run.generations]
    assert ui.panel.history == [{"number": 1, "asked": "a cat", "params": ui.panel.history[0]["params"]}]


async def test_the_code_of_a_run_reproduces_it(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    engine.defaults.update(temperature=0.3)  # of the engine, not of the run
    prompt = 'quotes " and \\ and\nlines'
    ui.say(run={"prompt": prompt, "samples": 2, "params": {"max_tokens": 12, "temperature": 1.3, "stop": "\\n"}})
    await settled(ui, 1)
    ui.say(code=1)
    await ui.until(lambda: ui.of("code"))
    names: dict[str, Any] = {"engine": engine}
    exec(ui.of("code")[0]["code"], names)
    await names["texts"]
    assert names["texts"].texts == [one.text for one in ui.panel.runs[0].generations]


async def test_what_a_run_does_not_say_is_as_in_the_engines_defaults(engine: Engine, wire: Callable[..., Any]) -> None:
    engine.defaults.update(stop_token_ids=[3], logit_bias={5: 1.0}, max_tokens=4, temperature=0.3)
    ui = wire(engine.playground())
    run = ui.panel.run("a cat", samples=2, temperature=0.9)
    params = run.params
    assert (params.stop_token_ids, params.logit_bias) == (engine.defaults.params.stop_token_ids, {5: 1.0})
    assert (params.max_tokens, params.temperature, params.n) == (4, 0.9, 2)
    await settled(ui, 1)
    names: dict[str, Any] = {"engine": engine}
    exec(run.code, names)
    await names["texts"]
    assert names["texts"].texts == [one.text for one in run.generations]


async def test_a_conversation_is_run_too(engine: Engine, wire: Callable[..., Any]) -> None:
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = TEMPLATE
    ui = wire(engine.playground())
    assert ui.panel.can_chat
    chat = [{"role": "user", "content": "hello"}]
    ui.say(run={"chat": chat, "samples": 1, "params": {"max_tokens": 5}})
    await settled(ui, 1)
    (run,) = ui.panel.runs
    assert run.generations[0].prompt == "user: hello\n"
    ui.say(code=1)
    await ui.until(lambda: ui.of("code"))
    names: dict[str, Any] = {"engine": engine}
    exec(ui.of("code")[0]["code"], names)
    assert (await names["texts"]).text == run.generations[0].text


async def test_stop_ends_all_samples(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    ui.say(run={"prompt": "a cat", "samples": 2, "params": {"max_tokens": 480, "ignore_eos": True}})
    await ui.until(lambda: ui.panel.runs)
    ui.say(stop=True)
    await settled(ui, 1)
    assert {one.finish_reason for one in ui.panel.runs[0].generations} == {"cancelled"}


async def test_a_run_of_before_is_opened_again(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    for number, prompt in enumerate(("one", "two"), 1):
        ui.say(run={"prompt": prompt, "samples": 1, "params": {"max_tokens": number}})
        await settled(ui, number)
    ui.say(open=1)
    await ui.until(lambda: len(ui.of("opened")) == 3)
    last = ui.of("opened")[-1]
    assert (last["opened"], last["prompt"], last["params"]["max_tokens"]) == (1, "one", 1)
    ui.say(stream=last["streams"][0], resend=0)
    ui.say(stream="9.9", resend=0)
    await ui.until(lambda: ui.sent[-1].get("tokens"))
    assert ui.sent[-1]["stream"] == "1.0" and ui.sent[-1]["state"] == "finished"


async def test_a_front_end_that_comes_late_is_told_what_is_shown(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    run = ui.panel.run("one", samples=2, max_tokens=3)
    await settled(ui, 1)
    assert ui.renewed == 1, "without a front end nobody else would"
    ui.sent.clear()
    ui.say(hello=True)
    await ui.until(lambda: ui.of("opened"))
    assert ui.of("opened")[0]["streams"] == ["1.0", "1.1"] and not ui.of("opened")[0]["running"]
    ui.say(stream="1.1", resend=0)
    await ui.until(lambda: ui.of("stream"))
    assert "".join(ui.of("stream")[0]["tokens"]) == run.generations[1].text


async def test_out_of_sight_only_the_end_is_told_until_somebody_looks_again(
    engine: Engine, wire: Callable[..., Any]
) -> None:
    ui = wire(engine.playground())
    before = Follower.open_views
    ui.panel.run("one", samples=2, max_tokens=400, ignore_eos=True)
    assert Follower.open_views == before + 2
    ui.say(visible=False, page="before the reload")
    await ui.until(lambda: Follower.open_views == before)
    ui.panel.run("two", samples=2, max_tokens=400, ignore_eos=True)
    assert Follower.open_views == before, "nor is what is run meanwhile"
    ui.say(hello=True)
    ui.say(visible=True, page="after it")
    await ui.until(lambda: Follower.open_views == before + 2)
    ui.panel.close()
    await ui.until(lambda: Follower.open_views == before)
    assert {one.finish_reason for one in ui.panel.runs[-1].generations} == {None}, "the texts go on"
    for run in ui.panel.runs:
        for one in run.generations:
            one.cancel()


@pytest.mark.parametrize(
    ("asked", "argument"),
    [
        ({"prompt": "", "samples": 1}, "prompt"),
        ({"prompt": None, "samples": 1}, "prompt"),
        ({"prompt": "a", "samples": 0}, "samples"),
        ({"prompt": "a", "samples": 17}, "samples"),
        ({"prompt": "a", "samples": "2"}, "samples"),
        ({"prompt": "a", "samples": 1, "params": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "samples": 1, "params": {"n": 5}}, "name"),
        ({"samples": 1}, "prompt"),
        ({"chat": [], "samples": 1}, "messages"),
        ({"chat": "hello", "samples": 1}, "messages"),
        ({"prompt": "a\ud800", "samples": 1}, "prompt"),
    ],
)
async def test_what_is_refused_is_said(
    asked: dict[str, Any], argument: str, engine: Engine, wire: Callable[..., Any]
) -> None:
    ui = wire(engine.playground())
    ui.say(run=asked)
    await ui.until(lambda: ui.of("refused"))
    assert ui.of("refused")[0]["refused"] == argument
    assert not ui.panel.runs


async def test_an_engine_that_is_gone_is_said_to_be(wire: Callable[..., Any]) -> None:
    engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
    ui, reference = wire(engine.playground()), weakref.ref(engine)
    del engine
    gc.collect()
    await ui.until(lambda: reference() is None)
    ui.say(run={"prompt": "a", "samples": 1})
    await ui.until(lambda: ui.of("error"))
    assert "EngineClosedError" in ui.of("error")[0]["error"]


async def test_only_so_many_runs_are_kept(
    engine: Engine, wire: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.playground._RUNS_KEPT", 2)
    ui = wire(engine.playground())
    for number in (1, 2, 3):
        ui.say(run={"prompt": "a", "samples": 1, "params": {"max_tokens": 1}})
        await settled(ui, number)
    assert [run.number for run in ui.panel.runs] == [2, 3] == [entry["number"] for entry in ui.panel.history]


async def test_its_static_form_carries_all_texts(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.playground())
    assert "nothing was run" in ui.panel.bundle()["text/plain"]
    ui.say(run={"prompt": "<script>", "samples": 2, "params": {"max_tokens": 9}})
    await settled(ui, 1)
    bundle = ui.panel.bundle()
    assert "<script" not in bundle["text/html"] and "&lt;script&gt;" in bundle["text/html"]
    for generation in ui.panel.runs[0].generations:
        assert generation.text in bundle["text/plain"]
    assert f"seed={ui.panel.runs[0].params.seed}" in bundle["text/plain"]
    assert ui.panel.runs[0].params == SamplingParams(n=2, max_tokens=9, seed=ui.panel.runs[0].params.seed)
