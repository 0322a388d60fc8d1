from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from interactive_infer import Engine
from interactive_infer.errors import EngineClosedError
from interactive_infer.notebook.widgets.monitor import Monitor, _union, look_at
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
    while generation.state != "paused":
        await generation._until(generation._readers.of_news, lambda output: False)
    assert look_at(engine).paused == 1
    generation.cancel()


async def test_it_looks_only_while_somebody_looks_at_it(engine: Engine, wire: Callable[..., Any]) -> None:
    ui = wire(engine.monitor())
    assert not ui.of("figures")
    ui.say(visible=True)
    ui.say(visible=True)  # from a second page
    await ui.until(lambda: len(ui.of("figures")) >= 3)
    ui.say(visible=False)
    await ui.until(lambda: ui.panel._timer is None)
    assert ui.renewed == 1, "what is saved from now on"
    names = [row[0] for row in ui.of("figures")[0]["figures"]]
    assert names[:5] == ["running", "waiting", "paused", "KV pages in use", "tokens/s"]


async def test_it_does_not_keep_an_engine_and_says_when_it_is_gone(wire: Callable[..., Any]) -> None:
    engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
    ui, reference = wire(engine.monitor()), weakref.ref(engine)
    ui.say(visible=True)
    await ui.until(lambda: ui.of("figures"))
    del engine
    gc.collect()
    assert reference() is None
    await ui.until(lambda: ui.of("closed"))
    assert ui.renewed == 1 and ui.panel._timer is None


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


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([], 0), ([(0, 5)], 5), ([(0, 5), (5, 9)], 9), ([(7, 9), (0, 5)], 7), ([(0, 9), (2, 3), (8, 12)], 12)],
)
def test_busy_counts_no_moment_twice(intervals: list[tuple[int, int]], expected: int) -> None:
    starts, ends = np.array([a for a, _ in intervals]), np.array([b for _, b in intervals])
    assert _union(starts, ends) == expected
