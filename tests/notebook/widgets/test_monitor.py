from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from interactive_infer import Engine
from interactive_infer.errors import EngineClosedError
from interactive_infer.notebook.widgets.monitor import Monitor, look_at
from tests.tiny_models import tiny_model, tiny_tokenizer


async def test_it_counts_what_there_is(engine: Engine) -> None:
    before = look_at(engine)
    assert (before.running, before.waiting, before.paused, before.tokens_per_s) == (0, 0, 0, 0)
    generation = engine.generate("a cat", max_tokens=400, ignore_eos=True)
    async for token in generation:
        if token.index == 20:
            break
    now = look_at(engine)
    assert now.running == 1 and now.pages >= 1 and now.tokens_per_s > 0
    assert 0 < now.busy <= 1 and now.pages_in_all == engine.info().kv_cache_tokens // engine.info().page_size
    generation.pause()
    assert generation.state == "paused"
    assert look_at(engine).paused == 1
    generation.cancel()


async def test_it_looks_only_while_somebody_looks_at_it(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.monitor())
    assert not ui.of("figures")
    ui.say(visible=True, page="one")
    ui.say(visible=True, page="other")
    await ui.until(lambda: len(ui.of("figures")) >= 3)
    ui.say(visible=False, page="one")
    count = len(ui.of("figures"))
    await ui.until(lambda: len(ui.of("figures")) > count)
    ui.say(visible=False, page="other")
    await ui.until(lambda: ui.panel._timer is None)
    assert ui.renewed == 1, "what is saved from now on"
    names = [row[0] for row in ui.of("figures")[0]["figures"]]
    assert names[:5] == ["running", "waiting", "paused", "KV pages in use", "tokens/s"]


async def test_it_looks_no_more_once_its_page_is_gone(
    engine: Engine, wire: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.monitor.PERIOD_S", 0.01)
    monkeypatch.setattr("interactive_infer.notebook.widgets.panel.UNSEEN_AFTER_S", 0.3)
    ui = wire(engine.monitor())
    for _ in range(10):
        ui.say(visible=True, page="page")
        await asyncio.sleep(0.05)
        assert ui.panel._timer is not None, "the page is there"
    await ui.until(lambda: ui.panel._timer is None)
    assert ui.renewed == 1
    count = len(ui.of("figures"))
    ui.say(visible=True, page="page")
    await ui.until(lambda: len(ui.of("figures")) > count)


async def test_a_kernel_that_hears_pages_between_cells_does_not_take_them_for_gone(
    engine: Engine, wire: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.monitor.PERIOD_S", 0.01)
    monkeypatch.setattr("interactive_infer.notebook.widgets.panel.UNSEEN_AFTER_S", 0.0)
    monkeypatch.setattr(Monitor, "answers_at_once", False)
    ui = wire(engine.monitor())
    ui.say(visible=True, page="page")
    await ui.until(lambda: len(ui.of("figures")) >= 5)


async def test_closed_it_looks_no_more(
    engine: Engine, wire: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.monitor.PERIOD_S", 0.01)
    looked: list[Engine] = []
    monkeypatch.setattr(
        "interactive_infer.notebook.widgets.monitor.look_at", lambda engine: (looked.append(engine), look_at(engine))[1]
    )
    ui = wire(engine.monitor())
    ui.say(visible=True, page="page")
    await ui.until(lambda: len(looked) >= 3)
    ui.panel.close()
    assert ui.renewed == 1
    ui.panel.attend(lambda: ui.panel.seen(True))  # was on its way
    count = len(looked)
    await asyncio.sleep(0.1)
    assert len(looked) == count


async def test_it_does_not_keep_an_engine_and_says_when_it_is_gone(wire: Callable[..., Any]) -> None:
    engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
    ui, reference = wire(engine.monitor()), weakref.ref(engine)
    ui.say(visible=True, page="page")
    await ui.until(lambda: ui.of("figures"))
    del engine
    gc.collect()
    assert reference() is None
    await ui.until(lambda: ui.of("closed"))
    assert ui.renewed == 1 and ui.panel._timer is None


async def test_messages_that_are_not_ours_are_ignored(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.monitor())
    for message in ({}, {"visible": 1, "page": "page"}, {"visible": True}, {"figures": True}):
        ui.say(**message)
    await asyncio.sleep(0)
    assert not ui.sent and ui.panel._timer is None


async def test_a_closed_engine_has_no_monitor() -> None:
    engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
    await engine.close()
    with pytest.raises(EngineClosedError):
        engine.monitor()


async def test_its_static_form_carries_the_figures(engine: Engine) -> None:
    engine.name = "<b>model</b>"
    bundle = Monitor(engine).bundle()
    for words in ("running", "KV pages in use", "tokens/s", "busy", "loop lag"):
        assert words in bundle["text/plain"] and words in bundle["text/html"]
    assert "&lt;b&gt;model" in bundle["text/html"] and "<b>" not in bundle["text/html"]
