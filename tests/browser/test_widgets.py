"""Our widgets in JupyterLab, used by mouse and by keyboard while a cell awaits, with a small random model."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.lab import FrontEnd, LabPage

LOAD = """
import torch
from interactive_infer import Engine
from tests.tiny_models import tiny_model, tiny_tokenizer

engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
slow = engine.model.model.layers[0].register_forward_hook(lambda *_: __import__("time").sleep(0.1))
"""
START = "gen = engine.generate('a cat', max_tokens=400, ignore_eos=True, seed=1)\ngen"
AWAIT = "done = await gen\nprint(done.finish_reason, len(done.token_ids))"
FREE = "slow.remove()"


async def press(page: LabPage, index: int, name: str, key: str | None = None) -> None:
    """A button of a cell's output, by mouse or by a key."""
    node = page.output(index).get_by_role("button", name=name, exact=True)
    if key is None:
        await node.click()
    else:
        await node.focus()
        await page.page.keyboard.press(key)


async def state(page: LabPage, index: int, expect: Any, *states: str) -> None:
    view = page.output(index).locator(".token-view")
    await expect(view).to_have_attribute("data-state", re.compile("|".join(states)))


@pytest.mark.parametrize("front_end", ["lab", "notebook"])
@pytest.mark.parametrize("key", [None, "Enter"], ids=["mouse", "keyboard"])
async def test_buttons_act_while_a_cell_awaits(
    key: str | None, front_end: FrontEnd, lab_page: OpenPage, expect: Any
) -> None:
    page = await lab_page([LOAD, START, AWAIT], front_end)
    await page.run_cells(0, 1)
    await page.run_cell(2)
    await state(page, 1, expect, "running")
    await press(page, 1, "Pause", key)
    await state(page, 1, expect, "paused")
    await asyncio.sleep(1)  # what was in flight still comes
    before = await page.output(1).locator(".lines").text_content() or ""
    assert await page.evaluate("return cell(2).model.executionState") == "running"
    await asyncio.sleep(1)
    assert await page.output(1).locator(".lines").text_content() == before
    if key is not None:
        assert await page.page.evaluate("document.activeElement.textContent") == "Pause", "the focus stays"
    await press(page, 1, "Resume", key)
    await page.page.wait_for_function(
        "(length) => document.querySelector('.token-view .lines').textContent.length > length + 3", arg=len(before)
    )
    await press(page, 1, "Cancel", key)
    await state(page, 1, expect, "finished")
    await page.finished(2)
    assert (await page.printed(2)).startswith("cancelled")
    # It has ended, and can still go on.
    length = len(await page.output(1).locator(".lines").text_content() or "")
    await press(page, 1, "Continue", key)
    await state(page, 1, expect, "running", "waiting")
    await page.page.wait_for_function(
        "(length) => document.querySelector('.token-view .lines').textContent.length > length", arg=length
    )
    await press(page, 1, "Cancel", key)
    await state(page, 1, expect, "finished")


async def test_a_token_explains_itself_by_mouse_and_by_keyboard(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([LOAD, FREE, START.replace("400", "60"), AWAIT])
    await page.run_cells(0, 1, 2, 3)
    out = page.output(2)
    await state(page, 2, expect, "finished")
    detail = out.locator(".detail")
    span = out.locator(".line span").nth(4)
    await span.hover()
    first = await span.evaluate("(node) => node.token") + 1  # some tokens have no text
    await expect(detail).to_contain_text(f"Token {first} of 60")
    await expect(detail).to_contain_text("rank")  # it came with the first hover
    await expect(detail).to_contain_text("ms after the one before")
    await expect(detail).to_contain_text(re.compile(r"step \d+: decode of 1 text, [\d.]+ .s"))
    await expect(detail.locator("li")).to_have_count(5)
    await out.locator(".lines").focus()
    for key, token in (("ArrowRight", first + 1), ("End", 60), ("ArrowLeft", 59), ("Home", 1), ("ArrowDown", 11)):
        await page.page.keyboard.press(key)
        await expect(detail).to_contain_text(f"Token {token} of 60")
    assert await page.page.evaluate("document.activeElement.className") == "lines", "no shortcut of the notebook's"
    await page.screenshot("token-detail")
    await page.page.keyboard.press("Escape")
    await expect(detail).to_be_hidden()
    await press(page, 2, "Shade")
    await expect(out.locator("[data-shade]")).not_to_have_count(0)
    await page.screenshot("token-shade")
    await page.dark()
    await page.screenshot("token-shade-dark")


async def test_a_view_that_nobody_sees_is_sent_nothing(lab_page: OpenPage, expect: Any) -> None:
    count = "from interactive_infer.notebook.follower import Follower\nprint(Follower.open_views)"
    page = await lab_page([LOAD, START, count, "gen.cancel()"])

    async def open_views() -> str:
        await page.run_cells(2)
        return (await page.printed(2)).strip()

    async def until(number: str) -> None:
        async with asyncio.timeout(60):
            while await open_views() != number:
                await asyncio.sleep(0.2)

    await page.run_cells(0, 1)
    await until("1")
    view = page.output(1).locator(".token-view")
    await view.evaluate("(node) => { node.style.display = 'none'; }")
    await until("0")
    before = await view.locator(".lines").text_content() or ""
    await asyncio.sleep(1)
    assert await view.locator(".lines").text_content() == before
    await view.evaluate("(node) => { node.style.display = ''; }")
    await until("1")
    await page.page.wait_for_function(
        "(length) => document.querySelector('.token-view .lines').textContent.length > length", arg=len(before)
    )
    await page.run_cells(3)
    await state(page, 1, expect, "finished")


@pytest.mark.parametrize("hidden", [True, False])
async def test_a_page_that_is_reloaded_goes_on_showing_what_is_written(
    hidden: bool, lab_page: OpenPage, expect: Any
) -> None:
    count = "from interactive_infer.notebook.follower import Follower\nprint(Follower.open_views)"
    run = "run = board.run('a cat', max_tokens=400, ignore_eos=True)"
    page = await lab_page([LOAD, START, f"board = engine.playground()\nboard\n{run}\nboard", count])
    await page.run_cells(0, 1, 2)
    views = [page.output(index).locator(".token-view .lines") for index in (1, 2)]
    for view in views:
        await expect(view).not_to_be_empty()
    if hidden:
        for root in (".token-view", ".playground"):
            await page.page.locator(f".jp-Notebook {root}").first.evaluate("(node) => { node.style.display = 'none'; }")
        async with asyncio.timeout(60):
            while (await page.run_cells(3), await page.printed(3))[1].strip() != "0":
                await asyncio.sleep(0.2)
    await page.save()
    await page.reload()
    for view, at in zip(views, (1, 2), strict=True):
        await page.show_cell(at)
        await expect(view).not_to_be_empty()
        before = len(await view.text_content() or "")
        async with asyncio.timeout(60):
            while len(await view.text_content() or "") <= before:
                await asyncio.sleep(0.2)


async def test_a_number_that_is_cleared_comes_back_and_changes_nothing(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([LOAD + "engine.controls()", "print(engine.defaults.params)"])
    await page.run_cells(0, 1)
    before = await page.printed(1)
    for label, value in (("temperature, exact value", "1"), ("max tokens", "256")):
        field = page.output(0).get_by_label(label, exact=True)
        for key in ("Enter", "Tab"):
            await field.fill("")
            await field.press(key)
            await expect(field).to_have_value(value)
        await field.focus()
        for key in ("ControlOrMeta+a", "e", "Enter"):  # no number yet
            await field.press(key)
        await expect(field).to_have_value(value)
    await asyncio.sleep(1)
    await page.run_cells(1)
    assert await page.printed(1) == before
    await expect(page.output(0).get_by_role("alert").first).to_be_hidden()


async def test_a_slider_steers_a_text_while_a_cell_awaits_and_follows_an_update(
    lab_page: OpenPage, expect: Any
) -> None:
    page = await lab_page([LOAD, START, "gen.controls()", AWAIT, "gen.update(temperature=0.35)", "print(gen.params)"])
    await page.run_cells(0, 1, 2)
    await page.run_cell(3)
    slider = page.output(2).get_by_label("temperature", exact=True)
    await slider.focus()
    await page.page.keyboard.press("End")
    exact = page.output(2).get_by_label("top p, exact value")
    await exact.focus()
    for key in ("ControlOrMeta+a", "7", "Enter"):
        await page.page.keyboard.press(key)
    await expect(page.output(2).get_by_role("alert").first).to_contain_text("top_p=7")
    await expect(exact).to_have_value("1")
    await page.screenshot("controls")
    assert await page.evaluate("return cell(3).model.executionState") == "running"
    await press(page, 1, "Cancel")
    await page.finished(3)
    await page.run_cells(5)
    assert "temperature=2.0" in await page.printed(5)


async def test_a_playground_runs_and_is_saved(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([LOAD, FREE, "engine.playground()", "engine.monitor()", "engine.controls()"])
    await page.run_cells(0, 1, 2, 3, 4)
    out = page.output(2)
    await out.get_by_label("prompt", exact=True).fill("a <script>window.ran = 1</script> cat")
    await out.get_by_label("samples", exact=True).fill("3")
    await out.get_by_text("Parameters").click()
    await out.get_by_label("max tokens").fill("40")
    await out.get_by_label("max tokens").press("Tab")
    await out.get_by_label("prompt", exact=True).press("Shift+Enter")
    views = out.locator(".token-view[data-state=finished]")
    await expect(views).to_have_count(3)
    await expect(page.output(3).locator("tr").first).to_contain_text("running")
    texts = await out.locator(".lines").all_text_contents()
    await out.get_by_text("History").click()
    await press(page, 2, "To code")
    await expect(out.locator(".code")).to_contain_text("SamplingParams(")
    await out.get_by_text("Parameters").click()
    await page.screenshot("playground")
    await page.dark()
    await page.screenshot("playground-dark")

    await page.page.evaluate("document.activeElement.blur()")
    await page.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.widgets[2].model.outputs.toJSON()"
        "[0].data['text/plain'].includes('run 1:')"
    )
    await page.save()
    await page.shut_down()
    await page.reload()
    await expect(page.output(2)).to_contain_text("run 1:")
    saved = "".join((await page.output(2).text_content() or "").split())  # live, lines are elements: no line breaks
    for text in texts:
        assert "".join(text.split())[:20] in saved
    await expect(page.output(3)).to_contain_text("KV pages in use")
    await expect(page.output(4)).to_contain_text("repetition_penalty")
    assert await page.page.evaluate("window.ran") is None
    await page.screenshot("playground-saved")


RETIRED = """
import ipywidgets
from interactive_infer.notebook.widgets import token_view

token_view._FINISHED_KEPT = 1
held = ipywidgets.Output()
display(held)
with held:
    gen.show()
"""


async def test_a_view_that_is_retired_shows_its_text_also_in_an_output_widget(lab_page: OpenPage, expect: Any) -> None:
    last = "last = engine.generate('a dog', max_tokens=5, ignore_eos=True)\nlast.show()"
    page = await lab_page([LOAD, FREE, START.replace("400", "60"), RETIRED, AWAIT, last, "_ = await last"])
    await page.run_cells(0, 1, 2, 3, 4)
    await state(page, 3, expect, "finished")
    text = await page.output(3).locator(".lines").text_content()
    await page.run_cells(5, 6)
    for place in (2, 3):
        await page.show_cell(place)
        view = page.output(place).locator(".token-view")
        await expect(view.locator(".status")).to_contain_text("retired: display it again")
        await expect(view).not_to_contain_text("its kernel is gone")
        await expect(view.get_by_role("button").locator("visible=true")).to_have_count(0)
        assert await view.locator(".lines").text_content() == text
        await view.locator(".lines").focus()
        await expect(view.locator(".detail")).to_be_hidden()
    await page.screenshot("token-retired")
    await expect(page.output(5).locator(".token-view")).to_have_count(1)  # show() was the cell's value too
    await expect(page.output(5).get_by_role("button", name="Continue")).to_be_visible()
    await page.save()
    await page.reload()
    await page.show_cell(3)
    await expect(page.output(3).locator(".status")).to_contain_text("retired: display it again")
    await expect(page.output(3).locator(".lines")).to_have_text(text or "")


LONG = """
from tests.notebook.fakes import Writer
words = [f"w{i}" + (chr(10) if i % 50 == 49 else " ") for i in range(20_000)]
writer = Writer(words)
writer.write(len(words))
writer.finish()
writer.generation
"""
LINE = """
line = Writer(["x" * 1_000_000, "<b>end</b>"])
line.write(2)
line.finish()
line.generation
"""


async def test_20_000_tokens_are_there_and_few_of_them_are_drawn(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([LONG, LINE])
    await page.run_cells(0)
    text = page.output(0).locator(".lines")
    await expect(text).to_contain_text("w19999")
    few = "() => document.querySelectorAll('.token-view .line span').length < 5000"
    await page.page.wait_for_function(few)
    for place, word in (("0", "w0 "), ("node.scrollHeight / 2", None), ("node.scrollHeight", "w19999")):
        await text.evaluate(f"(node) => {{ node.scrollTop = {place}; }}")
        if word is not None:
            await expect(text.locator("span", has_text=word).first).to_be_attached()
        await page.page.wait_for_function(few)
    lines = await text.locator(".line").all_text_contents()
    assert "".join(lines) == "".join(f"w{i}" + ("" if i % 50 == 49 else " ") for i in range(20_000))
    await page.run_cells(1)
    await expect(page.output(1).locator(".lines")).to_contain_text("<b>end</b>")
    assert len(await page.output(1).locator(".lines").text_content() or "") == 1_000_010
