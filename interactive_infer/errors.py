"""Every error a user can meet. Each message names what was given, why it cannot be, and what to do."""

from __future__ import annotations

from types import WrapperDescriptorType
from typing import Any


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

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with the message alone.
        return _invalid_request, (type(self), self.args[0], self.argument, self.value)


def _invalid_request(
    kind: type[InvalidRequestError], message: str, argument: str, value: object
) -> InvalidRequestError:
    error = kind.__new__(kind, message)
    error.argument, error.value = argument, value
    return error


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
    """The engine was used from another event loop while unfinished texts are read or displayed on its own."""


class ReentrantStepError(InferError, RuntimeError):
    """A hook or callback that runs inside an engine's step asked the same engine for another step."""


class NestedLoopError(InferError, RuntimeError):
    """A running event loop cannot be run once more from inside, or only by losing cells; the message says what can."""


class MissingPackageError(InferError, ImportError):
    """A package that only this call needs is not installed; the message says how to get it."""


class DeviceError(InferError, RuntimeError):
    """Work on the device failed. Chained to the device's own exception (`__cause__`)."""


def twin(error: BaseException) -> BaseException:
    """A new exception that says all that `error` says: each reader of a failure raises one of its own.

    Tracebacks of several readers do not pile up on one object, which would also keep what their frames refer to.
    Not `copy.copy`: that calls the class with `args`, which an `__init__` of other arguments refuses or garbles.
    """
    cls = type(error)
    try:
        args = error.__reduce__()[1]  # OSError's `args` are not all that it was made with
        new = cls.__new__(cls, *args)
        if isinstance(cls.__init__, WrapperDescriptorType):  # written in C: has fields outside of `__dict__`
            new.__init__(*args)  # type: ignore[misc]
    except Exception:  # a class of an unusual kind: its readers share the one object
        return error
    new.args = error.args
    new.__dict__.update(error.__dict__)
    new.__cause__, new.__context__ = error.__cause__, error.__context__
    new.__suppress_context__ = error.__suppress_context__
    return new.with_traceback(error.__traceback__)
