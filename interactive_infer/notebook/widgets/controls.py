"""Sliders and fields for sampling parameters, bound to something that has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from interactive_infer.defaults import Defaults
from interactive_infer.errors import InvalidRequestError
from interactive_infer.generation import Generation, GenerationGroup
from interactive_infer.notebook.follower import loop_of
from interactive_infer.notebook.hostile import sound
from interactive_infer.notebook.widgets.form import FIELDS, form_values, parsed
from interactive_infer.notebook.widgets.panel import Message, Panel, source, table

if TYPE_CHECKING:
    from interactive_infer.engine import Engine
    from interactive_infer.sampling import SamplingParams


class Controls(Panel):
    """The parameters of a generation, of a group (all of it at once; the first's values are shown), or an engine's
    defaults, to be seen and changed.

    Both ways: a change here is `update` of what it is bound to, and acts from the next step; a change by `update`
    moves the slider. What is refused is said, and the field goes back. Raises InvalidRequestError for another target.
    """

    _esm = source("panel.js", "form.js", "controls.js")

    values = traitlets.Dict({}).tag(sync=True)
    fields = traitlets.List(FIELDS).tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    ended = traitlets.Bool(False).tag(sync=True)

    _listening: Sequence[list[Callable[[], None]]] = ()

    def __init__(self, target: Generation | GenerationGroup | Engine) -> None:
        self._target: Generation | GenerationGroup | Defaults
        if isinstance(target, Generation | GenerationGroup):
            self._target = target
            self._generations = [target] if isinstance(target, Generation) else list(target)
            numbers = [str(one.number) for one in self._generations]
            title = f"generation{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            loop = loop_of(self._generations[0])
            listening = [one._output.listeners for one in self._generations]
        elif isinstance(defaults := getattr(target, "defaults", None), Defaults):
            # Not the engine: it would be kept for as long as there is this widget.
            self._target, self._generations, title = defaults, [], f"defaults of {target.name}"
            loop, listening = target._steps.loop or _running_loop(), [defaults.listeners]
        else:
            raise InvalidRequestError("target", target, "give a generation, a group or an engine")
        self._seen = self._params
        super().__init__(loop)
        self.title = sound(title)
        self._show()
        self._listening = listening
        for listeners in listening:
            listeners.append(self._changed)

    def close(self) -> None:
        for listeners in self._listening:
            with contextlib.suppress(ValueError):  # it is closed already, or failed and was dropped
                listeners.remove(self._changed)
        super().close()

    @property
    def _params(self) -> SamplingParams:
        return self._generations[0].params if isinstance(self._target, GenerationGroup) else self._target.params

    def hear(self, message: Message) -> None:
        name, value = message.get("set"), message.get("value")
        try:
            change = parsed(name, value)
            self._target.update(**change)
        except InvalidRequestError as error:
            self.tell({"refused": name, "problem": sound(str(error)), "values": form_values(self._params)})
        else:
            self._changed()

    def static(self) -> tuple[str, str]:
        rows = [(field["name"], str(form_values(self._params)[field["name"]])) for field in FIELDS]
        plain = "\n".join([self.title, *(f"  {name:<20}{value}" for name, value in rows)])
        return table(rows, self.title), plain

    def _changed(self) -> None:
        """A listener: called after each commit, on the thread that drives."""
        ended = bool(self._generations) and all(one.finish_reason is not None for one in self._generations)
        if self._params is not self._seen or ended is not self.ended:
            self._seen = self._params
            self.on_loop(self._show)

    def _show(self) -> None:
        self.values = form_values(self._params)
        self.ended = bool(self._generations) and all(one.finish_reason is not None for one in self._generations)


def _running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
