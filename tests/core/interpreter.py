"""Triton's interpreter, for checks of kernels on a CPU.

Triton decides when it is imported whether it interprets, so checks run in a process of their own: a test module run as
a script, which reports how each of them went.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def let_scalars_be_bounds() -> None:
    """Triton 3.6's interpreter keeps scalars as arrays of one element, which NumPy 2.4 refuses as a loop's bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_more


def report(checks: Mapping[str, Callable[[], None]], path: str) -> None:
    """In that process: run the checks, and write what went wrong, by name, to `path`."""
    let_scalars_be_bounds()
    outcome: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
    Path(path).write_text(json.dumps(outcome), encoding="utf-8")


def outcome_of(script: str, folder: Path) -> dict[str, str | None]:
    """Run a test module as a script that calls `report`; what it wrote."""
    path = folder / "outcome.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, script, str(path)], check=True, env=environment, timeout=280)
    outcome: dict[str, str | None] = json.loads(path.read_text(encoding="utf-8"))
    return outcome
