"""The live timeline in a real page: drawn from what the kernel sends, quiet while nobody sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.browser.conftest import OpenPage
from tests.browser.lab import LabPage

START = """
import asyncio, time
from interactive_infer.notebook.widgets.timeline_view import TimelineView
from interactive_infer.timeline import Phase, Timeline

timeline = Timeline(device="<b>GPU</b>")
timeline.recorder.runnable(time.perf_counter_ns(), 1)

async def step():
    number = 0
    while True:
        number += 1
        start = time.perf_counter_ns()
        await asyncio.sleep(0.02)
        now = time.perf_counter_ns()
        timeline.recorder.step(start, now, step_id=number, batch_size=1, tokens=1, prefill_tokens=0)
        timeline.recorder.record(Phase.COMMIT, now - 2_000_000, now, number)
        timeline.recorder.lag(now, 250_000)

stepping = asyncio.ensure_future(step())
sent = []
send = TimelineView.send
TimelineView.send = lambda view, content, buffers: (sent.append(content["first"]), send(view, content, buffers))[1]
view = timeline.live(3.0)
view
"""
COUNT = "print(len(sent), sum(sent))"
END = "stepping.cancel()"
# Of the page's canvas: how many pixels there are of the colour that a decode step has.
BLUE = """
(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) count += data[i] === 0 && data[i + 1] === 114 && data[i + 2] === 178;
    return count;
}
"""


async def count(page: LabPage) -> tuple[int, int]:
    await page.run_cells(1)
    messages, first = (await page.printed(1)).split()
    return int(messages), int(first)


async def blue_beyond(count: int, canvas: Any) -> int:
    """Wait for more decode steps on the canvas than `count` pixels."""
    for _ in range(150):
        if (now := await canvas.evaluate(BLUE)) > count:
            return int(now)
        await asyncio.sleep(0.2)
    raise AssertionError(f"no more than {count} pixels of decode steps were drawn")


async def test_it_scrolls_what_the_kernel_records(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, COUNT, END])
    await page.run_cells(0)
    output = page.output(0)
    said = output.locator(".interactive-infer-timeline-view .said")
    await expect(said).to_contain_text("<b>GPU</b> busy")
    assert await output.locator(".interactive-infer-timeline-view b").count() == 0
    canvas = output.locator("canvas")
    await page.page.wait_for_function("(text) => /busy [1-9]/.test(text.textContent)", arg=await said.element_handle())
    few = await blue_beyond(0, canvas)
    await blue_beyond(few, canvas)
    await page.screenshot("timeline-view")
    before = await count(page)
    await page.page.wait_for_timeout(1_500)
    after = await count(page)
    assert after[0] - before[0] >= 3, "two messages a second or more"
    await page.run_cells(2)


async def test_nothing_is_sent_while_it_is_hidden(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, COUNT, END])
    await page.run_cells(0)
    said = page.output(0).locator(".interactive-infer-timeline-view .said")
    await expect(said).to_contain_text("busy")
    view = page.output(0).locator(".interactive-infer-timeline-view")
    await view.evaluate("(element) => { element.style.display = 'none'; }")
    await page.page.wait_for_timeout(500)
    hidden = await count(page)
    await page.page.wait_for_timeout(1_000)
    assert await count(page) == hidden
    await view.evaluate("(element) => { element.style.display = ''; }")
    await page.page.wait_for_timeout(1_000)
    seen = await count(page)
    assert seen[0] > hidden[0] and seen[1] == hidden[1] + 1, "seen again, the last seconds come at once"
    await page.run_cells(2)
