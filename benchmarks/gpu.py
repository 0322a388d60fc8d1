"""The engine on a CUDA card, beside transformers and beside what the card could do.

    python benchmarks/gpu.py [section ...] --shape 0.6b|8b [--json FILE] [--compiled] [--budget SECONDS] [--quick]

Models are Qwen3 shapes with random weights in bfloat16; nothing is downloaded. Each section prints its tables at once
and adds them to the JSON file; one that fails prints its error, and the exit status says so at the end. A section that
no longer fits into `--budget` is left out, and that counts as a failure too. `--compiled` also runs what transformers
has to compile first (about 45 s each). `--device cpu --shape tiny --quick` only shows that the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib.metadata
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gpu_busy
import gpu_cards
import gpu_life
import gpu_loop
import gpu_models
import gpu_peers
import gpu_speed
import torch
from gpu_bench import QUICK, Bench, Sizes, Table, within
from report import BUILD, environment, table

Section = Callable[[Bench], Coroutine[Any, Any, list[Table]]]

# In the order in which they run; about how many seconds each takes at most with the 8b shape (and more, compiled).
SECTIONS: dict[str, tuple[Section, int, int]] = {
    "floor": (gpu_speed.floor, 40, 0),
    "sampling": (gpu_speed.sampling, 40, 0),
    "blocking": (gpu_speed.blocking, 60, 0),
    "host": (gpu_loop.host, 60, 0),
    "cancel": (gpu_loop.cancel, 30, 0),
    "prefill": (gpu_loop.prefill, 60, 0),
    "tokens": (gpu_peers.tokens, 80, 200),
    "arrivals": (gpu_peers.arrivals, 220, 120),
    "lag": (gpu_loop.lag, 160, 0),
    "busy": (gpu_busy.busy, 80, 0),
    "ways": (gpu_speed.ways, 200, 0),
    "memory": (gpu_life.memory, 40, 0),
    "load": (gpu_life.load, 180, 0),
    "cards": (gpu_cards.cards, 120, 0),
}


def where(device: torch.device) -> dict[str, Any]:
    found = environment() | {"card": None, "cuda": torch.version.cuda, "triton": None}
    if device.type == "cuda":
        found["card"] = torch.cuda.get_device_name(device)
    for package in ("triton", "flash-attn", "kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


async def measure(args: argparse.Namespace, names: list[str], path: Path) -> None:
    """Run the sections, in their order; ends the process with status 1 if some gave nothing."""
    device = torch.device(args.device)
    bench = Bench(args.shape, device, QUICK if args.quick else Sizes(), compiled=args.compiled)
    began = time.monotonic()
    results: dict[str, Any] = {
        "title": f"Qwen3 {args.shape} shape, random weights, bfloat16, {device}",
        "environment": where(device),
        "sections": {},
    }
    print(f"{results['title']}\n{', '.join(f'{key} {value}' for key, value in results['environment'].items())}")
    failed: list[str] = []
    for name in names:
        section, usual, more = SECTIONS[name]
        needs, left = (usual + more * args.compiled) * (not args.quick), args.budget - (time.monotonic() - began)
        start = time.monotonic()
        try:
            if needs > left:
                raise TimeoutError(f"takes up to {needs} s, and {left:.0f} s of the budget are left")
            tables = await within(min(left, 2 * needs + 60) if needs else left, section(bench))
        except Exception as error:
            failed.append(name)
            print(f"\n## {name}: failed after {time.monotonic() - start:.0f} s", flush=True)
            traceback.print_exc(file=sys.stdout)
            results["sections"][name] = {"error": f"{type(error).__name__}: {error}"}
            await bench.abandon()
        else:
            seconds = time.monotonic() - start
            print(f"\n## {name} ({seconds:.0f} s)")
            for shown in tables:
                print(f"\n{shown.title}\n\n{table(shown.columns, shown.rows)}", flush=True)
            results["sections"][name] = {
                "seconds": seconds,
                "tables": [{"title": t.title, "columns": list(t.columns), "rows": t.rows, **t.detail} for t in tables],
            }
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if failed:
        sys.stdout.flush()
        print(f"without a result: {', '.join(failed)}", file=sys.stderr, flush=True)
        os._exit(1)  # what a failed section has left hanging is not waited for
    await within(30, bench.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; none: all of them")
    parser.add_argument("--shape", choices=list(gpu_models.SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, help="default: build/benchmarks/gpu-SHAPE.json")
    parser.add_argument("--compiled", action="store_true", help="also transformers' compiled ways")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see it work")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    path: Path = args.json or BUILD / f"gpu-{args.shape}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    # A loop that hangs cannot time anything out: then say where, and end.
    faulthandler.dump_traceback_later(args.budget + 60, exit=True)
    usual = [name for name in SECTIONS if name != "cards" or torch.cuda.device_count() > 1]
    names = [name for name in SECTIONS if name in (args.sections or usual)]
    asyncio.run(measure(args, names, path))


if __name__ == "__main__":
    main()
