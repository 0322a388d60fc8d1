"""What every benchmark shares: how a machine is described, a table printed, a JSON file written, the model fetched."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "benchmarks"


def cpu_model() -> str:
    """The processor's name: `model name` of /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value.strip()}
    detail = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{fields.get('model name', platform.machine())} ({', '.join(detail)})"


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured. Imports torch and transformers."""
    import torch
    import transformers

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats with one decimal below 100 and none above."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def publish(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], **detail: Any) -> None:
    """Print the table under a line that says where it was measured, and write `build/benchmarks/<name>.json`."""
    where = environment()
    print(f"\n{title}\n{', '.join(f'{key} {value}' for key, value in where.items())}\n")
    print(table(columns, rows), flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    data = {
        "title": title,
        "environment": where,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        **detail,
    }
    (BUILD / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def wait_until_idle(limit_s: float = 20.0) -> None:
    """Wait, at most `limit_s`, for a second in which the machine's other processes used less than a tenth of it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        busy, total = _processor_time()
        time.sleep(1.0)
        busy, total = _processor_time()[0] - busy, _processor_time()[1] - total
        if busy < 0.1 * total:
            return
    print(f"the machine was not idle within {limit_s:.0f} s", flush=True)


def _processor_time() -> tuple[int, int]:
    """Ticks of all cores: busy, and altogether. Zeros where /proc/stat is missing."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0, 1
    ticks = [int(field) for field in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def load_plain(dtype: str) -> tuple[Any, Any]:
    """The default model for `generate`, a separate object with SDPA that no engine touches, and its tokenizer.

    Ending a text early is switched off, so that every way writes the same number of tokens.
    """
    from interactive_infer.core.loader import load_model

    loaded = load_model(None, dtype=dtype)
    assert loaded.model.config._attn_implementation == "sdpa"
    config = loaded.model.generation_config
    config.eos_token_id = None
    return loaded.model, loaded.tokenizer


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """`count` prompts of 16 to 64 tokens, all different: windows of this repository's LICENSE."""
    ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"))["input_ids"]
    return [ids[i * 67 : i * 67 + 16 + (i * 29) % 49] for i in range(count)]
