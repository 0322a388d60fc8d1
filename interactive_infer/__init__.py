"""Interactive LLM inference in notebooks: an engine on the kernel's own event loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interactive_infer.errors import (
    DeviceError,
    EngineClosedError,
    InferError,
    InvalidRequestError,
    MissingPackageError,
    ModelLoadError,
    ModelNotFoundError,
    NestedLoopError,
    PromptTooLongError,
    ReentrantStepError,
    UnsupportedModelError,
    WrongLoopError,
)
from interactive_infer.sampling import SamplingParams

if TYPE_CHECKING:
    from interactive_infer.completion import Alternative, Completion, Timing, Token, Usage
    from interactive_infer.engine import Engine
    from interactive_infer.generation import Generation, GenerationGroup
    from interactive_infer.info import EngineInfo
    from interactive_infer.notebook.kernel import keep_live, live_controls
    from interactive_infer.notebook.sync import run_sync
    from interactive_infer.timeline import Timeline
    from interactive_infer.waiting import device_done, run_on_device

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "Completion",
    "DeviceError",
    "Engine",
    "EngineClosedError",
    "EngineInfo",
    "Generation",
    "GenerationGroup",
    "InferError",
    "InvalidRequestError",
    "MissingPackageError",
    "ModelLoadError",
    "ModelNotFoundError",
    "NestedLoopError",
    "PromptTooLongError",
    "ReentrantStepError",
    "SamplingParams",
    "Timeline",
    "Timing",
    "Token",
    "UnsupportedModelError",
    "Usage",
    "WrongLoopError",
    "device_done",
    "keep_live",
    "live_controls",
    "run_on_device",
    "run_sync",
]

# Loaded on first use, so that importing the package costs little.
_LAZY = {
    "Engine": "engine",
    "EngineInfo": "info",
    "Alternative": "completion",
    "Completion": "completion",
    "Generation": "generation",
    "GenerationGroup": "generation",
    "Timing": "completion",
    "Token": "completion",
    "Usage": "completion",
    "Timeline": "timeline",
    "device_done": "waiting",
    "run_on_device": "waiting",
    "keep_live": "notebook.kernel",
    "live_controls": "notebook.kernel",
    "run_sync": "notebook.sync",
    "load_ipython_extension": "notebook.magics",  # for %load_ext
    "unload_ipython_extension": "notebook.magics",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
