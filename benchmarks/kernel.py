"""How long controls and interrupts take while a cell awaits, in real kernels of several ipykernels.

    make kernels
    python benchmarks/kernel.py [--messages 200]

A cell awaits a generation of a tiny random model (steps of a few milliseconds, in the same process) while sliders are
moved, 20 ms apart. Times are from the front end's side: ms from sending a message to the callback in the kernel, to the
idle status, and from sending an interrupt to the end of the await (of a paused generation, on an otherwise idle loop).
One clock: CLOCK_MONOTONIC, which the processes share. "off": without the hooks; messages that are not handled when the
cell ends are left out of its times. The aim is 20 ms to the callback, and 200 ms for an interrupt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import percentile, publish

from tests.notebook.kernels import VERSIONS, Kernel, running_kernel

SETUP = """
import asyncio, json, time
import ipywidgets
from interactive_infer import Engine, keep_live, live_controls
from tests.tiny_models import tiny_model, tiny_tokenizer

engine = await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False)
slider = ipywidgets.IntSlider(max=100_000)
handled = {}
slider.observe(lambda change: handled.update({change.new: time.monotonic()}), "value")
keep_live(slider)

async def awaiting(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await engine.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
"""
AWAITING = """
gen = engine.generate([1, 2, 3])
gen.pause()
print("awaiting")
try:
    await gen
finally:
    at = time.monotonic()
"""
INTERRUPTS = 5


def moves(kernel: Kernel, which: str, route: str | None, count: int) -> list[object]:
    """Move the slider `count` times while a cell awaits."""
    kernel.run(f"live_controls({which!r})\nslider.value = 0\nhandled.clear()")
    slider = str(kernel.value("slider.model_id"))
    cell = kernel.start(f"print('awaiting')\nawait awaiting({count * 0.02 + 1})\nprint(time.monotonic())")
    kernel.await_print(cell, "awaiting")
    sent, idle = {}, []
    for value in range(1, count + 1):
        sent[value] = time.monotonic()
        request = kernel.set(slider, route, value=value)
        if which != "off":
            kernel.finish(request)
            idle.append((time.monotonic() - sent[value]) * 1e3)
        time.sleep(max(0.0, sent[value] + 0.02 - time.monotonic()))
    kernel.finish(cell)
    ended = float(kernel.printed(cell).split()[-1])
    handled = {int(value): at for value, at in kernel.value("handled").items()}
    in_time = [(at - sent[value]) * 1e3 for value, at in handled.items() if at < ended]
    kernel.heard.clear()
    delays = [percentile(in_time, share) for share in (0.5, 0.95, 1.0)] if in_time else [None] * 3
    return [
        kernel.version,
        "shell" if route is None else "subshell",
        "off" if which == "off" else "on",
        f"{len(in_time)} of {count}",
        *delays,
        percentile(idle, 0.5) if idle else None,
    ]


def interrupts(kernel: Kernel) -> list[object]:
    delays = []
    for _ in range(INTERRUPTS):
        cell = kernel.start(AWAITING)
        kernel.await_print(cell, "awaiting")
        time.sleep(0.2)
        start = time.monotonic()
        kernel.interrupt()
        kernel.finish(cell)
        delays.append((kernel.value("at") - start) * 1e3)
    return [kernel.version, percentile(delays, 0.5), max(delays)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200)
    arguments = parser.parse_args()

    controls: list[list[object]] = []
    stops: list[list[object]] = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder, running_kernel(version, Path(folder)) as kernel:
            kernel.run(SETUP)
            routes = [None] if kernel.series < 7 else [None, kernel.subshell()]
            controls += [
                moves(kernel, which, route, arguments.messages) for route in routes for which in ("ours", "off")
            ]
            stops.append(interrupts(kernel))
    columns = ["ipykernel", "route", "hooks", "while the cell awaited", "p50", "p95", "max", "idle p50"]
    publish("kernel", "Moves of a slider while a cell awaits, ms from sending to the callback", columns, controls)
    columns = ["ipykernel", "p50", "max"]
    publish("kernel_interrupts", "Interrupts of a cell that awaits, ms to the end of the await", columns, stops)


if __name__ == "__main__":
    main()
