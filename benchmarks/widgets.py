"""What live views cost: 1, 16 and 64 of them, each fed 100 tokens a second by a simulated engine in a real kernel.

    python benchmarks/widgets.py [--seconds 10] [--browser]

Messages and bytes are those that the kernel published, per second, as a front end receives them. `publishing` is the
share of the loop's time that went into decoding for the views and sending. Lag is a heartbeat's lateness, every 10 ms,
with the simulated engine's own work in it. `--browser` opens JupyterLab in Chromium and counts frames per second while
16 views stream there and while one takes in 20,000 tokens, and the page's elements before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from report import ROOT, publish

sys.path.insert(0, str(ROOT))

VIEWS = (1, 16, 64)
FEED = """
import asyncio, json, time, contextvars
import numpy as np
from interactive_infer.timeline.recorder import Phase
from tests.notebook.fakes import Writer

def made(number, tokens):
    words = [f"word{i % 1000}" + ("\\n" if i % 40 == 39 else " ") for i in range(tokens)]
    return [Writer(words) for _ in range(number)]

async def feed(writers, seconds, tokens_a_step=1):
    lags, started = [], time.perf_counter()
    for step in range(int(100 * seconds)):
        for writer in writers:
            writer.write(tokens_a_step)
        due = started + (step + 1) * 0.01
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        lags.append(time.perf_counter() - due)
    took = time.perf_counter() - started
    for writer in writers:
        writer.finish()
    publishing = 0
    for writer in writers:
        spans = writer.engine.timeline.recorder.snapshot().spans
        mine = spans[np.isin(spans["phase"], [Phase.PUBLISH, Phase.DETOKENIZE])]
        publishing += int((mine["end"] - mine["start"]).sum())
    p50, p99, worst = (1e3 * float(value) for value in np.percentile(lags, [50, 99, 100]))
    return {"took": took, "publishing": publishing / 1e9 / took, "p50": p50, "p99": p99, "worst": worst}
"""


def in_a_kernel(number: int, seconds: float) -> dict[str, Any]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)})
    client = manager.blocking_client()
    client.start_channels()
    counted = {"messages": 0, "bytes": 0}
    printed: list[str] = []
    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            try:
                message = client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["msg_type"] == "comm_msg":
                counted["messages"] += 1
                counted["bytes"] += len(json.dumps(message["content"], ensure_ascii=False).encode())
            elif message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                printed.append("\n".join(message["content"]["traceback"]))

    try:
        client.wait_for_ready(timeout=120)
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            run_cell(client, FEED)
            run_cell(
                client, f"writers = made({number}, {int(100 * seconds)})\nfor one in writers: one.generation.show()"
            )
            time.sleep(1)
            counted["messages"] = counted["bytes"] = 0
            run_cell(client, f"print(json.dumps(await feed(writers, {seconds})))")
            time.sleep(1)
        finally:
            done.set()
            listener.join()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    figures: dict[str, Any] = json.loads("".join(printed))
    return figures | {name: value / figures["took"] for name, value in counted.items()}


def run_cell(client: Any, code: str) -> None:
    request = client.execute(code)
    while client.get_shell_msg(timeout=300)["parent_header"].get("msg_id") != request:
        pass


FRAMES = """
    const start = performance.now();
    let frames = 0;
    await new Promise((then) => {
        const frame = (now) => { frames++; now - start < arg * 1000 ? requestAnimationFrame(frame) : then(); };
        requestAnimationFrame(frame);
    });
    return 1000 * frames / (performance.now() - start);
"""
ELEMENTS = "return document.querySelectorAll('.jp-OutputArea *').length"
LONG = "long = made(1, 20_000)\nlong[0].generation"
FEED_LONG = "await feed(long, 10, 20)"


async def in_a_browser(seconds: float) -> list[tuple[str, float]]:
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook
    from playwright.async_api import async_playwright

    from tests.browser import chromium
    from tests.browser.lab import LabPage, running_lab

    cells = [
        FEED,
        f"writers = made(16, {int(100 * (seconds + 4))})\nfor one in writers: one.generation.show()",
        f"figures = await feed(writers, {seconds + 4})",
        LONG,
        FEED_LONG,
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    with tempfile.TemporaryDirectory() as place, running_lab(Path(place)) as lab:
        nbformat.write(notebook, lab.folder / "views.ipynb")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium.find(), args=chromium.FLAGS)
            page = LabPage(await browser.new_page(viewport={"width": 1100, "height": 2400}), lab, "views.ipynb")
            await page.open()
            await page.run_cells(0, 1)
            idle = await page.evaluate(FRAMES, 2)
            before = await page.evaluate(ELEMENTS)
            await page.run_cell(2)
            await asyncio.sleep(2)
            streaming = await page.evaluate(FRAMES, seconds)
            await page.finished(2)
            after = await page.evaluate(ELEMENTS)
            await page.run_cells(3)
            await page.run_cell(4)
            await asyncio.sleep(4)
            fast = await page.evaluate(FRAMES, seconds)
            await page.finished(4)
            await asyncio.sleep(1)
            long = await page.evaluate(ELEMENTS) - after
            await page.shut_down()
            await browser.close()
    return [
        ("frames/s, nothing streams", idle),
        (f"frames/s, 16 views stream {100 * 16:,} tokens/s", streaming),
        ("frames/s, one view from 8,000 to 18,000 tokens at 2,000/s", fast),
        ("elements of the outputs before", float(before)),
        (f"… after {16 * int(100 * (seconds + 4)):,} tokens", float(after)),
        ("elements of one view of 20,000 tokens", float(long)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--browser", action="store_true", help="needs playwright, JupyterLab and a Chromium")
    options = parser.parse_args()
    rows = []
    for number in VIEWS:
        it = in_a_kernel(number, options.seconds)
        share = 100 * it["publishing"]
        rows.append((number, it["messages"], it["bytes"] / 1e3, share, it["p50"], it["p99"], it["worst"]))
    columns = ("views", "messages/s", "kB/s", "publishing, %", "lag p50, ms", "p99", "max")
    publish("widgets", "Live views, 100 tokens/s each", columns, rows)
    if options.browser:
        publish("widgets_browser", "Live views in Chromium", ("what", "value"), asyncio.run(in_a_browser(5.0)))


if __name__ == "__main__":
    main()
