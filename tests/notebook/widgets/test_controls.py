from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from interactive_infer import Engine
from interactive_infer.errors import InvalidRequestError
from interactive_infer.notebook.widgets.controls import Controls
from interactive_infer.notebook.widgets.form import FIELDS, arguments, form_values, parsed
from interactive_infer.sampling import SamplingParams

LONG = {"max_tokens": 400, "ignore_eos": True}


async def test_a_slider_changes_a_running_generation(engine: Engine, wire: Callable[..., Any]) -> None:
    generation = engine.generate("a cat", temperature=0.5, **LONG)
    ui = wire(generation.controls())
    assert ui.panel.values["temperature"] == 0.5
    ui.say(set="temperature", value=1.5)
    await ui.until(lambda: generation.params.temperature == 1.5)
    await ui.until(lambda: ui.panel.values["temperature"] == 1.5)
    generation.cancel()
    await ui.until(lambda: ui.panel.ended)


async def test_an_update_moves_the_slider_of_a_paused_generation_too(engine: Engine, wire: Callable[..., Any]) -> None:
    generation = engine.generate("a cat", **LONG)
    ui = wire(generation.controls())
    generation.pause()
    await ui.until(lambda: generation.state == "paused")
    generation.update(top_k=7, stop=["a\nb", "c\\n"])
    await ui.until(lambda: ui.panel.values["top_k"] == 7)
    assert ui.panel.values["stop"] == "a\\nb\nc\\\\n"
    generation.cancel()


async def test_a_group_is_changed_all_at_once(engine: Engine, wire: Callable[..., Any]) -> None:
    group = engine.generate("a cat", n=3, **LONG)
    ui = wire(group.controls())
    ui.say(set="min_p", value=0.25)
    await ui.until(lambda: [one.params.min_p for one in group] == [0.25] * 3)
    group[0].update(min_p=0.5)
    await ui.until(lambda: ui.panel.values["min_p"] == 0.5)
    group.cancel()


async def test_defaults_hold_for_later_calls_that_say_nothing_else(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.controls())
    ui.say(set="max_tokens", value=3.0)
    ui.say(set="seed", value="9007199254740993")  # more than a JavaScript number can hold
    await ui.until(lambda: engine.defaults.params.seed == 9007199254740993)
    assert engine.generate("a").params.max_tokens == 3
    assert engine.generate("a", max_tokens=5).params.max_tokens == 5
    assert engine.generate("a", SamplingParams(max_tokens=7)).params.max_tokens == 7
    engine.defaults.update(max_tokens=11)
    await ui.until(lambda: ui.panel.values["max_tokens"] == 11)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", None),
        ("seed", "x"),
        ("seed", 5),
        ("logprobs", "21"),
        ("n", 2),
        ("nothing", 1),
        (None, None),
        (["temperature"], 1),
        ("ignore_eos", "yes"),
    ],
)
async def test_what_is_refused_is_said_and_nothing_changes(
    name: Any, value: Any, engine: Engine, wire: Callable[..., Any]
) -> None:
    before = engine.defaults.params
    ui = wire(engine.controls())
    ui.say(set=name, value=value)
    await ui.until(lambda: ui.of("refused"))
    (refused,) = ui.of("refused")
    assert refused["refused"] == name and refused["problem"]
    assert refused["values"] == form_values(before)
    assert engine.defaults.params == before


async def test_a_change_from_another_thread_happens_on_the_loop(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.controls())
    await asyncio.to_thread(ui.say, set="top_p", value=0.5)
    await ui.until(lambda: engine.defaults.params.top_p == 0.5)


async def test_closed_it_listens_no_more(engine: Engine) -> None:
    generation = engine.generate("a cat", **LONG)
    lists = (engine.defaults.listeners, generation._output.listeners)
    before = [list(listeners) for listeners in lists]
    for target in (engine, generation, generation):
        controls = target.controls()
        assert [list(listeners) for listeners in lists] != before
        controls.close()
        controls.close()
        assert [list(listeners) for listeners in lists] == before
    generation.cancel()


async def test_its_static_form_says_all_values(engine: Engine) -> None:
    engine.defaults.update(stop=["<script>alert(1)</script>"])
    bundle = engine.controls().bundle()
    assert "&lt;script&gt;" in bundle["text/html"] and "<script" not in bundle["text/html"]
    for field in FIELDS:
        assert field["name"] in bundle["text/plain"] and field["name"] in bundle["text/html"]


def test_other_targets_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="target="):
        Controls("engine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(seed=2**63 - 1, logprobs=0, stop=["\n\n", "\\n", "\\", " \t"], ignore_eos=True, min_tokens=3),
    ],
)
def test_a_form_gives_back_what_it_was_given(params: SamplingParams) -> None:
    values = form_values(params)
    assert {field["name"] for field in FIELDS} == set(values)
    back = SamplingParams()
    for name, value in values.items():
        back = back.replace(**parsed(name, value))
    assert back == params
    assert eval(f"SamplingParams({arguments(params)})", {"SamplingParams": SamplingParams}) == params
