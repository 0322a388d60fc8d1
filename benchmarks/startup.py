"""What `import interactive_infer` adds to importing torch and transformers, and how long the first loads take.

    python benchmarks/startup.py [--quick]

Each figure is the median of fresh processes. The files of both are in the page cache (one untimed run comes first).
A first load converts the GGUF file, in an empty cache folder; a second one finds what the first has written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from report import ROOT, publish, wait_until_idle

IMPORTS = {
    "import torch, transformers": ("", "import torch, transformers"),
    "import torch, transformers, interactive_infer": ("", "import torch, transformers, interactive_infer"),
    "import interactive_infer, after the other two": ("import torch, transformers", "import interactive_infer"),
    "import interactive_infer alone": ("", "import interactive_infer"),
}
LOAD = "engine = interactive_infer.Engine.load_sync(progress=False)"


def seconds(before: str, timed: str, cache: str | None = None) -> float:
    """What the statement `timed` takes in a fresh process after the statement `before`."""
    code = f"{before}\nimport time\nstart = time.perf_counter()\n{timed}\nprint(time.perf_counter() - start)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    if cache is not None:
        environment["INTERACTIVE_INFER_CACHE"] = cache
    result = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat, no first load: only to see it work")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    wait_until_idle()
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for turn in range(repeats + 1):
        for name, (before, timed) in IMPORTS.items():
            took = seconds(before, timed)
            if turn:
                taken[name].append(took)
    if not args.quick:
        with tempfile.TemporaryDirectory() as cache:
            taken["first load of the default model"] = [
                seconds("import torch, transformers, interactive_infer", LOAD, cache)
            ]
            taken["second load, in a new process"] = [
                seconds("import torch, transformers, interactive_infer", LOAD, cache) for _ in range(min(repeats, 3))
            ]
            taken["second load and all imports, in a new process"] = [
                seconds("", f"import interactive_infer\n{LOAD}", cache) for _ in range(min(repeats, 3))
            ]
            both = f"{LOAD}\nimport gc, time\nengine.close_sync()"
            taken["second load, in the same process"] = [seconds(f"import interactive_infer\n{both}", LOAD, cache)]
    rows = [[name, statistics.median(values), min(values), max(values), len(values)] for name, values in taken.items()]
    publish("startup", "Start-up, seconds", ["what", "median", "min", "max", "runs"], rows, seconds=taken)


if __name__ == "__main__":
    main()
