"""What a model writes is shown as text in a real page, and nothing in it runs."""

from __future__ import annotations

from typing import Any

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
WITHOUT_WIDGETS = """
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "anywidget" else find(name, *rest)
"""
# If this sets nothing, the tests here see nothing.
CONTROL = "from IPython.display import HTML\nHTML(\"<img src=leak-0 onerror='window.ran = 0'>\")"


async def nothing_ran(page: LabPage) -> None:
    assert await page.page.evaluate("window.ran") is None
    assert page.dialogs == []
    assert [address for address in page.requests if "leak-" in address] == []
    inside = page.page.locator(".jp-OutputArea-output").locator("script, img, svg, iframe, style, a, b, textarea")
    assert await inside.count() == 0
    assert await page.page.locator(".jp-OutputArea-output mjx-container").count() == 0


async def live_text(page: LabPage, index: int) -> str:
    """The text of a view; each of its lines is an element of its own."""
    lines = page.output(index).locator(".token-view .line")
    return "\n".join(await lines.all_text_contents())


async def look(page: LabPage, index: int, selector: str) -> list[str]:
    """What decides where lines break."""
    names = ["fontFamily", "fontSize", "lineHeight", "whiteSpace", "wordBreak", "overflowWrap"]
    styles = "(element, names) => names.map((name) => getComputedStyle(element)[name])"
    return await page.output(index).locator(selector).first.evaluate(styles, names)


async def final_text(page: LabPage, index: int) -> str | None:
    return await page.output(index).locator("pre").first.text_content()


async def test_hostile_text_is_text(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, END, FAILS, CONTROL])
    start, end, fails, control = range(4)

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
    assert await live_text(page, start) == TEXT[:-1]
    await page.run_cells(end)
    # The page no longer knows which display this was, so the view stays. It has the kernel's text as well.
    await expect(page.output(start).locator(".status")).to_contain_text("stop")
    assert await live_text(page, start) == TEXT
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
