"""notebooks/01_quickstart.ipynb in JupyterLab and in Notebook 7, as somebody who runs its cells sees it."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import OpenPage
from tests.browser.lab import SCREENSHOTS, FrontEnd, LabPage

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"

LOAD, HEARTBEAT, STORY, COMPUTE, AWAIT = 1, 3, 5, 7, 9
ITERATE, SEVERAL, CANCEL, CHAT, BRANCH, SYNC, TIMELINE, SUMMARY, CLOSE = 11, 13, 15, 17, 19, 21, 23, 24, 26

# Looks at the stream's text whenever something in the cell's output changes, so that no moment is missed on a
# machine that is slow to answer a test's questions. `waiting`: which cells were running at that moment.
WATCH = """
window.seen = [];
const area = cell(arg.stream).node;
const look = () => {
    const lines = area.querySelector(".token-view .lines");
    if (lines === null) return;
    const length = lines.textContent.length;
    const waiting = arg.others.filter((i) => cell(i).model.executionState === "running");
    if (length !== window.seen.at(-1)?.length) window.seen.push({ length, waiting });
};
new MutationObserver(look).observe(area, { childList: true, characterData: true, subtree: true });
"""

# The picture's size, and the share of its pixels that are neither its background nor nearly so.
PICTURE = """
async (image) => {
    await image.decode();
    const canvas = document.createElement("canvas");
    const width = (canvas.width = image.naturalWidth), height = (canvas.height = image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, width, height).data;
    let drawn = 0;
    for (let i = 0; i < pixels.length; i += 4)
        drawn += Math.abs(pixels[i] - pixels[0]) + Math.abs(pixels[i + 2] - pixels[2]) > 60;
    return { width, height, drawn: drawn / (width * height) };
}
"""


async def story_text(page: LabPage) -> str | None:
    """The final text that the story's cell shows, without its status line."""
    return await page.output(STORY).locator("pre").first.text_content()


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["lab", "notebook"])
async def test_it_streams_while_a_cell_awaits_and_reads_well_when_reopened(
    front_end: FrontEnd, lab_page: OpenPage, expect: Any
) -> None:
    page = await lab_page(QUICKSTART, front_end)
    name = "quickstart" if front_end == "lab" else "quickstart-notebook"
    await page.run_cells(LOAD, HEARTBEAT)

    # The stream's cell has ended; its text grows while the next cells compute and await.
    await page.evaluate(WATCH, {"stream": STORY, "others": [COMPUTE, AWAIT]})
    for index in (STORY, COMPUTE, AWAIT):
        await page.run_cell(index)
    await page.page.wait_for_function("() => window.seen.at(-1)?.length > 200")
    await page.screenshot(f"{name}-live")
    await page.finished(AWAIT)
    seen = await page.evaluate("return window.seen")
    lengths = [look["length"] for look in seen if look["waiting"]]
    assert len(lengths) >= 5, seen
    assert all(earlier < later for earlier, later in itertools.pairwise(lengths))

    # Then the output is the final text, which needs no widget; while the kernel lives the view is in its place.
    await expect(page.output(STORY)).to_contain_text("120 tokens")
    await expect(page.output(STORY).locator(".token-view")).to_have_attribute("data-state", "finished")
    (saved,) = await page.outputs(STORY)
    story = saved["data"]["text/plain"]
    assert len(story) >= max(lengths)
    assert (await page.printed(AWAIT)).startswith(story)
    await page.screenshot(f"{name}-story")

    for index in (ITERATE, SEVERAL, CANCEL, CHAT, BRANCH, SYNC, TIMELINE, SUMMARY, CLOSE):
        await page.run_cell(index)
    await page.finished(CLOSE)
    for index in (SEVERAL, CANCEL, BRANCH):
        await page.show_cell(index)
        await page.screenshot(f"{name}-cell-{index}")
    assert await page.output(SEVERAL).locator(".token-view").count() == 3
    await expect(page.output(CANCEL)).to_contain_text("cancelled")

    await page.show_cell(TIMELINE)
    figure = page.output(TIMELINE).locator("img")
    picture = await figure.evaluate(PICTURE)
    assert picture["width"] >= 600 and picture["height"] >= 200
    assert 0.01 < picture["drawn"] < 0.9
    await page.screenshot(f"{name}-timeline")
    (shown,) = (o["data"]["image/png"] for o in await page.outputs(TIMELINE) if "image/png" in o.get("data", {}))
    (SCREENSHOTS / "timeline.png").write_bytes(base64.b64decode(shown))

    await page.save()
    await page.shut_down()  # nothing but the file is left
    (saved,) = nbformat.read(page.path, as_version=4).cells[STORY].outputs
    assert set(saved.data) == {"text/plain", "text/html"} and saved.data["text/plain"] == story
    await page.reload()
    assert await story_text(page) == story
    await expect(page.output(STORY)).to_contain_text("120 tokens")
    await expect(page.output(TIMELINE).locator("img")).to_be_attached()
    await page.show_cell(STORY)
    await page.screenshot(f"{name}-reopened")
    await page.dark()
    await page.screenshot(f"{name}-reopened-dark")
    assert page.dialogs == []
