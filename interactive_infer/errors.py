"""Every error a user can meet. Each message names what was given, why it cannot be, and what to do."""

from __future__ import annotations


class InferError(Exception):
    """Base class of every error this package raises on purpose."""


class InvalidRequestError(InferError, ValueError):
    """An argument of a call is wrong; nothing was queued and no running generation was touched.

    `argument` is the argument's name and `value` what was given.
    """

    def __init__(self, argument: str, value: object, problem: str) -> None:
        self.argument = argument
        self.value = value
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{argument}={shown}: {problem}")


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model's context or the KV cache."""


class ModelNotFoundError(InferError, FileNotFoundError):
    """No weights, configuration or tokenizer where they were looked for."""

    # FileNotFoundError's own __str__ expects an errno; ours is a sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ModelLoadError(InferError):
    """The files are there but cannot be loaded: damaged, truncated, or of another kind."""


class UnsupportedModelError(InferError):
    """The model would give wrong tokens here, so it is refused. The message names its type and the reason."""


class EngineClosedError(InferError, RuntimeError):
    """The engine was closed, or was dropped while idle because nothing referred to it."""


class WrongLoopError(InferError, RuntimeError):
    """The engine was used from another event loop, or with no loop, while generations are unfinished."""


class ReentrantStepError(InferError, RuntimeError):
    """A hook or callback that runs inside an engine's step asked the same engine for another step."""


class DeviceError(InferError, RuntimeError):
    """Work on the device failed. Chained to the device's own exception (`__cause__`)."""
