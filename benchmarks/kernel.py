"""How long controls and interrupts take while a cell awaits, in real kernels of several ipykernels.

    make kernels
    python benchmarks/kernel.py [--messages 200] [--json build/benchmarks/kernel.json]

A cell awaits a generation of a tiny random model (steps of a few milliseconds, in the same process) while sliders are
moved, 20 ms apart. Times are from the front end's side: ms from sending a message to the callback in the kernel, to the
idle status, and from sending an interrupt to the idle status of the interrupted cell (a paused generation, so an
otherwise idle loop). One clock: CLOCK_MONOTONIC, which the processes share. "off": without the hooks, where a message
that had not been handled when the cell ended counts as "after the cell". The aim is 20 ms to the callback, and 200 ms
for an interrupt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import BUILD, environment, table, write_json

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
INTERRUPTS = 5


def moves(kernel: Kernel, which: str, route: str | None, count: int) -> dict[str, object]:
    """Move the slider `count` times while a cell awaits."""
    kernel.run(f"live_controls({which!r})\nhandled.clear()\nslider.value = 0")
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
    return {
        "ipykernel": kernel.version,
        "route": "shell" if route is None else "subshell",
        "hooks": "on" if which != "off" else "off",
        "while the cell awaited": f"{len(in_time)} of {count}",
        "callback p50": statistics.median(in_time) if in_time else None,
        "callback p95": statistics.quantiles(in_time, n=20)[-1] if len(in_time) > 1 else None,
        "callback max": max(in_time, default=None),
        "idle p50": statistics.median(idle) if idle else None,
    }


def interrupts(kernel: Kernel) -> dict[str, object]:
    delays = []
    for _ in range(INTERRUPTS):
        cell = kernel.start("gen = engine.generate([1, 2, 3])\ngen.pause()\nprint('awaiting')\nawait gen")
        kernel.await_print(cell, "awaiting")
        time.sleep(0.2)
        start = time.monotonic()
        kernel.interrupt()
        kernel.finish(cell)
        delays.append((time.monotonic() - start) * 1e3)
    return {"ipykernel": kernel.version, "p50": statistics.median(delays), "max": max(delays)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--json", type=Path, default=BUILD / "kernel.json")
    arguments = parser.parse_args()

    controls, stops = [], []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder, running_kernel(version, Path(folder)) as kernel:
            kernel.run(SETUP)
            routes = [None] if kernel.series < 7 else [None, kernel.subshell()]
            controls += [moves(kernel, which, route, arguments.messages) for route in routes for which in ("ours", "off")]
            stops.append(interrupts(kernel))
    print("Controls, ms from sending:\n")
    print(table(list(controls[0]), [list(row.values()) for row in controls]))
    print("\nInterrupts, ms from sending to the cell's idle status:\n")
    print(table(list(stops[0]), [list(row.values()) for row in stops]))
    write_json(arguments.json, {"environment": environment(), "controls": controls, "interrupts": stops})


if __name__ == "__main__":
    main()
