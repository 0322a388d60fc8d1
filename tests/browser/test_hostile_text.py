"""What a model writes is shown as text in a real page, and nothing in it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.lab import LabPage

# Each would set `window.ran`, open a dialog, or ask for an address with "leak-" in it.
PIECES = [
    "<script>window.ran = 1; alert(1)</script>",
    "</pre></div><script>window.ran = 2</script>",
    "<img src=leak-1 onerror='window.ran = 3'>",
    "<svg onload='window.ran = 4'></svg>",
    "<iframe srcdoc='<script>parent.ran = 5</script>' src=leak-2></iframe>",
    "<style>body { display: none }</style>",
    "<a href='javascript:window.ran = 6'>click</a>",
    "<textarea></textarea><img src=leak-3 onerror='window.ran = 7'>",
    "![](leak-4) **bold** `code` $\\sqrt{2}$ \\(x\\)",
    "&lt;b&gt; &amp;",
    "\x1b[31mred\x1b[0m \U0001f409 é 東京 \u202egnirts",
    "NUL \0 and half \ud83d a character",
    "\n\n  two spaces\tand a tab",
]
WORDS = [word for piece in PIECES for word in (piece[:5], piece[5:], "\n")]
TEXT = "".join(WORDS).replace("\0", "\u2400").replace("\ud83d", "\ufffd")
"""What is to be seen of it: HTML cannot hold NUL, and no message half a character."""

START = f"""
import asyncio, contextvars
from tests.notebook.fakes import Writer

words = {WORDS!r}
writer = Writer(words)
go_on = asyncio.Event()

async def write():
    writer.write(len(words) - 1)
    await go_on.wait()
    writer.write()
    writer.finish()

# As the engine's own task: in a context that belongs to no cell.
writing = asyncio.create_task(write(), context=contextvars.Context())
writer.generation
"""
END = "go_on.set()\nawait writing"
FAILS = f"""
failing = Writer(words)
failing.write(len(words))
failing.finish("error", RuntimeError({PIECES[2]!r}))
failing.generation
"""
LOUD = """
from interactive_infer.notebook.widgets.token_view import TokenView

def loud():
    print("".join(words), end="")
    raise RuntimeError("".join(words))

TokenView._finished[0].attend(loud)
"""
WITHOUT_WIDGETS = """
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "anywidget" else find(name, *rest)
"""
# Every other widget, with hostile text wherever there is text of somebody else's: an engine whose name, device, default
# stop string, prompts and answers are that.
OTHERS = f"""
from interactive_infer import Engine
from tests.tiny_models import tiny_model, tiny_tokenizer

words = {WORDS!r}
text = "".join(words)

class InOrder:
    holding = False

    def __init__(self):
        self.left = list(words)

    def push(self, token_ids):
        return [self.left.pop(0) for _ in token_ids]

    def flush(self):
        return ""

engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
engine.name = engine.timeline.device = text
engine.defaults.update(stop=[text])
"""
PLAYGROUND = """
playground = engine.playground()
run = playground.run("".join(words[:24]), samples=2, max_tokens=len(words), ignore_eos=True, stop=[])
for one in run.generations:
    one._output.detokenizer = InOrder()
playground
"""
# If this sets nothing, the tests here see nothing.
CONTROL = "from IPython.display import HTML\nHTML(\"<img src=leak-0 onerror='window.ran = 0'>\")"


async def nothing_ran(page: LabPage, ours: str = "") -> None:
    """`ours`: elements that our own pages are made of."""
    assert await page.page.evaluate("window.ran") is None
    assert page.dialogs == []
    assert [address for address in page.requests if "leak-" in address] == []
    foreign = {"script", "img", "svg", "iframe", "style", "a", "b", "textarea"}.difference(ours.split())
    inside = page.page.locator(".jp-OutputArea-output").locator(", ".join(foreign))
    assert await inside.count() == 0
    assert await page.page.locator(".jp-OutputArea-output mjx-container").count() == 0


async def live_text(page: LabPage, index: int) -> str:
    """The text of a view; each of its lines is an element of its own."""
    lines = page.output(index).locator(".token-view .line")
    return "\n".join(await lines.all_text_contents())


async def shows(page: LabPage, index: int, text: str) -> None:
    """Wait until a view shows this text: it is out of the page for a moment when its output is made anew."""
    async with asyncio.timeout(60):
        while await page.output(index).locator(".token-view").count() == 0 or await live_text(page, index) != text:
            await asyncio.sleep(0.1)


async def look(page: LabPage, index: int, selector: str) -> list[str]:
    """What decides where lines break."""
    names = ["fontFamily", "fontSize", "lineHeight", "whiteSpace", "wordBreak", "overflowWrap"]
    styles = "(element, names) => names.map((name) => getComputedStyle(element)[name])"
    return await page.output(index).locator(selector).first.evaluate(styles, names)


async def final_text(page: LabPage, index: int) -> str | None:
    return await page.output(index).locator("pre").first.text_content()


async def test_hostile_text_is_text_in_every_other_widget(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([OTHERS, PLAYGROUND, "engine.controls()", "engine.monitor()", "engine.timeline.live()"])
    _, playground, controls, monitor, timeline = range(5)
    ours = "svg textarea b"
    await page.run_cells(*range(5))
    board = page.output(playground)
    await expect(board.locator(".token-view[data-state=finished]")).to_have_count(2)
    for sample in range(2):
        lines = board.locator(".lines").nth(sample).locator(".line")
        assert "\n".join(await lines.all_text_contents()) == TEXT
    await board.get_by_role("button", name="To code").click()
    await expect(board.locator(".code")).to_contain_text("window.ran = 7")
    await board.get_by_text("History").click()
    await expect(board.locator("li bdi")).to_contain_text("<script>window.ran = 1")
    await page.screenshot("hostile-playground")
    stop = page.output(controls).get_by_label("stop", exact=True)
    assert "window.ran = 7" in await stop.input_value()
    for index in (monitor, timeline):
        await page.show_cell(index)
        await expect(page.output(index)).to_contain_text("window.ran = 7")
        await page.screenshot(f"hostile-{index}")
    await nothing_ran(page, ours)

    await page.page.evaluate("document.activeElement.blur()")
    await page.page.wait_for_function(
        "() => jupyterapp.shell.currentWidget.content.widgets[1].model.outputs.toJSON()"
        "[0].data['text/plain'].includes('run 1:')"
    )
    await page.save()
    await page.shut_down()
    await page.reload()
    for index in (playground, controls, monitor):
        await expect(page.output(index)).to_contain_text("window.ran = 7")
    await nothing_ran(page, "b")  # what was asked is in bold


async def outputs_are_html(page: LabPage, index: int) -> None:
    """Wait until what would be saved is text and needs no widget."""
    await page.page.wait_for_function(
        """(index) => {
            const [output] = jupyterapp.shell.currentWidget.content.widgets[index].model.outputs.toJSON();
            return Object.keys(output.data).sort().join() === "text/html,text/plain";
        }""",
        arg=index,
    )


async def test_hostile_text_is_text(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, END, FAILS, LOUD, CONTROL])
    start, end, fails, loud, control = range(5)

    # Live: a part first, the rest while the page watches.
    await page.run_cells(start)
    await expect(page.output(start).locator(".lines")).to_contain_text("a tab")
    shown = await live_text(page, start)
    assert shown == TEXT[:-1]
    await nothing_ran(page)
    await page.show_cell(start)
    await page.screenshot("hostile-live")
    live_look = await look(page, start, ".line")

    await page.run_cells(end, fails)
    for index in (start, fails):  # the view has taken the place of the final text
        await expect(page.output(index).locator(".token-view")).to_have_attribute("data-state", "finished")
        assert await live_text(page, index) == TEXT
    await expect(page.output(fails)).to_contain_text(PIECES[2])  # the error's message
    # All about a token: of a fake engine there are no probabilities, and why is said.
    await page.output(start).locator(".line span").first.hover()
    await expect(page.output(start).locator(".detail")).to_contain_text("no probabilities")
    await nothing_ran(page)
    await page.show_cell(fails)
    await page.screenshot("hostile-final")

    # What a callback prints and raises.
    await page.run_cells(loud)
    printed, error = page.output(start).locator(".printed"), page.output(start).locator(".error")
    await expect(printed).to_contain_text("a tab")
    assert await printed.locator("pre").text_content() == TEXT
    await expect(error).to_contain_text("a tab")
    assert await page.outputs(loud) == []
    await nothing_ran(page)
    await printed.scroll_into_view_if_needed()
    await page.screenshot("hostile-printed")
    await printed.get_by_role("button", name="Dismiss").click()
    await expect(printed).to_be_hidden()

    await page.save()
    await page.shut_down()
    await page.reload()
    for index in (start, fails):
        assert await final_text(page, index) == TEXT
    assert await look(page, start, "pre") == live_look
    await nothing_ran(page)
    await page.screenshot("hostile-saved")

    await page.run_cells(control)
    await page.page.wait_for_function("() => window.ran === 0")
    assert any("leak-0" in address for address in page.requests)


async def test_a_page_reloaded_while_text_is_written_shows_all_of_it(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, END])
    start, end = range(2)
    await page.run_cells(start)
    await expect(page.output(start).locator(".lines")).to_contain_text("a tab")
    await page.save()
    await page.reload()
    await expect(page.output(start).locator(".lines")).to_contain_text("a tab")
    await shows(page, start, TEXT[:-1])
    await page.run_cells(end)
    await expect(page.output(start).locator(".status")).to_contain_text("stop")
    await shows(page, start, TEXT)
    # The page no longer knows which display this was, and so has put the text into the output itself.
    await outputs_are_html(page, start)
    await nothing_ran(page)
    await page.save()
    await page.shut_down()
    await page.reload()
    assert await final_text(page, start) == TEXT
    await nothing_ran(page)


async def test_a_notebook_saved_while_text_is_written_has_the_text_so_far(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, END])
    start, end = range(2)
    await page.run_cells(start)
    view = page.output(start).locator(".token-view")
    await expect(view.locator(".lines")).to_contain_text("a tab")
    await view.evaluate("(node) => { node.mine = true; }")
    pause = view.get_by_role("button", name="Pause")
    await pause.focus()
    await page.save()
    written = page.path.read_bytes()
    # The view is in the output's place again, and where it was.
    await expect(pause).to_be_focused()
    assert await view.evaluate("(node) => node.mine")
    await shows(page, start, TEXT[:-1])
    await page.run_cells(end)
    await expect(view).to_have_attribute("data-state", "finished")
    await shows(page, start, TEXT)
    assert await view.evaluate("(node) => node.mine")
    await page.save()
    assert "running" not in (saved := page.path.read_text()) and TEXT[-6:-1] in saved
    await page.shut_down()
    page.path.write_bytes(written)  # as if it had not been saved again
    await page.reload()
    assert await final_text(page, start) == TEXT[:-1]
    await nothing_ran(page)


async def test_a_page_reloaded_to_what_it_was_before_the_end_shows_and_saves_all_of_it(
    lab_page: OpenPage, expect: Any
) -> None:
    page = await lab_page([START, END])
    start, end = range(2)
    await page.run_cells(start)
    await expect(page.output(start).locator(".lines")).to_contain_text("a tab")
    await page.save()
    await page.run_cells(end)
    await outputs_are_html(page, start)
    await page.reload()  # without having saved
    await outputs_are_html(page, start)
    await expect(page.output(start).locator(".token-view")).to_have_attribute("data-state", "finished")
    await shows(page, start, TEXT)
    await page.save()
    await page.shut_down()
    await page.reload()
    assert await final_text(page, start) == TEXT
    await nothing_ran(page)


@pytest.mark.parametrize("end", ["session.kernel.restart()", "shutdown()"], ids=["restarted", "shut-down"])
async def test_a_kernel_that_goes_in_the_middle_leaves_the_text_so_far(
    end: str, lab_page: OpenPage, expect: Any
) -> None:
    page = await lab_page([START])
    await page.run_cells(0)
    await expect(page.output(0).locator(".lines")).to_contain_text("a tab")
    await page.evaluate(f"await panel.sessionContext.{end}")
    await outputs_are_html(page, 0)
    await shows(page, 0, TEXT[:-1])
    await page.output(0).locator(".line span").first.hover()
    await expect(page.output(0).locator(".detail")).to_contain_text("its kernel is gone")
    await expect(page.output(0).get_by_role("button", name="Pause")).to_have_attribute("aria-disabled", "true")
    await nothing_ran(page)
    await page.save()
    await page.shut_down()
    await page.reload()
    assert await final_text(page, 0) == TEXT[:-1]
    await expect(page.output(0)).to_contain_text("cut off")
    await nothing_ran(page)


async def test_hostile_text_is_text_without_widgets(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([WITHOUT_WIDGETS, START, END])
    _, start, end = range(3)
    await page.run_cells(0, start)
    await expect(page.output(start)).to_contain_text("a tab")
    assert await page.output(start).locator(".token-view").count() == 0
    await nothing_ran(page)
    await page.run_cells(end)
    await expect(page.output(start)).to_contain_text("stop")
    assert await final_text(page, start) == TEXT
    await nothing_ran(page)


async def test_a_megabyte_on_one_line(lab_page: OpenPage) -> None:
    """All of it is there, as text; so it is in the saved notebook, and after a reload."""
    start = """
from tests.notebook.fakes import Writer

line = "<script>window.ran = 8</script>" + "x" * 1_000_000
writer = Writer([line[:31], line[31:], "!"])
writer.write(2)
writer.generation
"""
    page = await lab_page([start, "writer.write()\nwriter.finish()"])
    line = "<script>window.ran = 8</script>" + "x" * 1_000_000

    async def is_there(text: str) -> None:
        async with asyncio.timeout(60):  # a long line is in several elements
            while (await live_text(page, 0)).replace("\n", "") != text:
                await asyncio.sleep(0.2)
        await nothing_ran(page)

    await page.run_cell(0)
    await is_there(line)
    await page.run_cell(1)
    await is_there(line + "!")
    await page.save()
    (saved,) = await page.outputs(0)
    assert line in saved["data"]["text/plain"] and "<script>" not in saved["data"]["text/html"]
    await page.reload()
    await is_there(line + "!")
