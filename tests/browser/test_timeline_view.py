"""The live timeline in a real page: drawn from what the kernel sends, quiet while nobody sees it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.browser.conftest import OpenPage
from tests.browser.lab import LabPage

START = """
import asyncio, time
from interactive_infer.notebook.widgets import panel
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
publish = TimelineView._publish
TimelineView._publish = lambda view, *rest: (sent.append(view._after is None), publish(view, *rest))[1]
panel.UNSEEN_AFTER_S = 11.0
view = timeline.live(3.0)
view
"""
COUNT = "print(len(sent), sum(sent))"
SENDING = "print(view.sending)"
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
    page = await lab_page([START, COUNT])
    await page.run_cells(0)
    output = page.output(0)
    said = output.locator(".timeline-view .said")
    await expect(said).to_contain_text("<b>GPU</b> busy")
    assert await output.locator(".timeline-view b").count() == 0
    canvas = output.locator("canvas")
    await page.page.wait_for_function("(text) => /busy [1-9]/.test(text.textContent)", arg=await said.element_handle())
    few = await blue_beyond(0, canvas)
    await blue_beyond(few, canvas)
    await page.screenshot("timeline-view")
    before = await count(page)
    await page.page.wait_for_timeout(1_500)
    after = await count(page)
    assert after[0] - before[0] >= 3, "two messages a second or more"


async def test_who_goes_on_looking_goes_on_seeing(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, COUNT, SENDING])
    await page.run_cells(0)
    await expect(page.output(0).locator(".timeline-view .said")).to_contain_text("busy")
    await page.page.wait_for_timeout(14_000)  # longer than a page that says nothing is taken to be there
    await page.run_cells(2)
    assert (await page.printed(2)).strip() == "True"
    assert (await count(page))[1] == 1, "in one piece"


async def test_nothing_is_sent_while_it_is_hidden(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, COUNT, SENDING])

    async def until_sending(expected: str) -> None:
        async with asyncio.timeout(60):
            while True:
                await page.run_cells(2)
                if (await page.printed(2)).strip() == expected:
                    return
                await asyncio.sleep(0.2)

    await page.run_cells(0)
    said = page.output(0).locator(".timeline-view .said")
    await expect(said).to_contain_text("busy")
    view = page.output(0).locator(".timeline-view")
    await view.evaluate("(element) => { element.style.display = 'none'; }")
    await until_sending("False")
    hidden = await count(page)
    await page.page.wait_for_timeout(1_000)
    assert await count(page) == hidden
    await view.evaluate("(element) => { element.style.display = ''; }")
    await until_sending("True")
    await page.page.wait_for_timeout(1_000)
    seen = await count(page)
    assert seen[0] > hidden[0] and seen[1] == hidden[1] + 1, "seen again, the last seconds come at once"


async def test_it_is_alive_after_a_reload_and_reads_well_without_its_kernel(lab_page: OpenPage, expect: Any) -> None:
    page = await lab_page([START, COUNT, SENDING])
    await page.run_cells(0)
    output = page.output(0)
    await expect(output.locator(".said")).to_contain_text("busy")
    await page.save()
    await expect(output.locator("canvas")).to_be_visible()  # what is saved does not disturb what is seen
    await page.reload()
    await expect(output.locator("canvas")).to_be_visible()
    await blue_beyond(0, output.locator("canvas"))
    await page.save()
    await page.shut_down()
    await page.reload()
    await expect(output).to_contain_text("<b>GPU</b> busy")
    await expect(output).to_contain_text("in the last 3 s")
    await expect(output.locator("canvas")).to_have_count(0)
    await page.screenshot("timeline-view-saved")
