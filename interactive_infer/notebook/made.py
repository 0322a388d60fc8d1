"""The widgets, made on the first call that asks for one: what they are built with is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interactive_infer.errors import MissingPackageError

if TYPE_CHECKING:
    from interactive_infer.engine import Engine
    from interactive_infer.generation import Generation, GenerationGroup
    from interactive_infer.notebook.widgets.controls import Controls
    from interactive_infer.notebook.widgets.monitor import Monitor
    from interactive_infer.notebook.widgets.playground import Playground


def controls(target: Generation | GenerationGroup | Engine) -> Controls:
    with _needs_widgets():
        from interactive_infer.notebook.widgets.controls import Controls
    return Controls(target)


def monitor(engine: Engine) -> Monitor:
    with _needs_widgets():
        from interactive_infer.notebook.widgets.monitor import Monitor
    engine._check_open()
    return Monitor(engine)


def playground(engine: Engine) -> Playground:
    with _needs_widgets():
        from interactive_infer.notebook.widgets.playground import Playground
    engine._check_open()
    return Playground(engine)


@contextmanager
def _needs_widgets() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anywidget", "ipywidgets", "traitlets", "IPython"):
            raise
        raise MissingPackageError(
            f"widgets need {error.name}, which is not installed: install this package with its [notebook] extra"
        ) from error
