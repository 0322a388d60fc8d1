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
    PromptTooLongError,
    ReentrantStepError,
    UnsupportedModelError,
    WrongLoopError,
)
from interactive_infer.sampling import SamplingParams

if TYPE_CHECKING:
    from interactive_infer.engine import Engine
    from interactive_infer.generation import (
        Alternative,
        Completion,
        Generation,
        GenerationGroup,
        Timing,
        Token,
        Usage,
    )
    from interactive_infer.info import EngineInfo
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
    "run_on_device",
]

# Loaded on first use, so that importing the package costs little.
_LAZY = {
    "Engine": "engine",
    "EngineInfo": "info",
    "Alternative": "generation",
    "Completion": "generation",
    "Generation": "generation",
    "GenerationGroup": "generation",
    "Timing": "generation",
    "Token": "generation",
    "Usage": "generation",
    "Timeline": "timeline",
    "device_done": "waiting",
    "run_on_device": "waiting",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
