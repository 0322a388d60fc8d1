"""A prompt or a conversation, parameters, samples side by side, and what was tried before."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import traitlets

from interactive_infer.errors import EngineClosedError, InvalidRequestError
from interactive_infer.generation import Generation
from interactive_infer.notebook.display import status
from interactive_infer.notebook.hostile import markup, sound
from interactive_infer.notebook.widgets.form import FIELDS, arguments, form_values, parsed
from interactive_infer.notebook.widgets.panel import Message, Panel, source
from interactive_infer.notebook.widgets.stream import Stream
from interactive_infer.prompts import whole_number
from interactive_infer.sampling import SamplingParams

if TYPE_CHECKING:
    from interactive_infer.engine import Engine

_RUNS_KEPT = 50
_MOST_SAMPLES = 16
_SEEDS = 1 << 31


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked, and what came of it. `chat` or `prompt` is None. `params.seed` is the first sample's seed."""

    number: int
    prompt: str | None
    chat: tuple[dict[str, str], ...] | None
    params: SamplingParams
    generations: tuple[Generation, ...]

    @property
    def code(self) -> str:
        """The cell that does it again."""
        asked = f"chat({list(self.chat)!r}" if self.chat is not None else f"generate({self.prompt!r}"
        return (
            "from interactive_infer import SamplingParams\n\n"
            f"params = SamplingParams({arguments(self.params)})\n"
            f"texts = engine.{asked}, params)\n"
            "texts"
        )

    @property
    def asked(self) -> str:
        """The prompt, or what was said last."""
        return self.prompt if self.prompt is not None else (self.chat or ({"content": ""},))[-1]["content"]


class Playground(Panel):
    """Runs prompts on an engine, which it does not keep.

    From the front end, beside what belongs to a `Stream` (`{"stream": key, …}`): `{"run": {"prompt" or "chat": …,
    "params": {…}, "samples": n}}`, `{"stop": true}`, `{"open": run}`, `{"code": run}`, `{"hello": true}`.
    To it: `{"opened": run, "streams": […], "prompt" or "chat": …, "params": {…}, "running": …}`, `{"settled": run}`,
    `{"code": text}`, `{"refused": name, "problem": …}`; and what a stream sends, with its key.
    """

    _esm = source("panel.js", "stream.js", "form.js", "playground.js")

    fields = traitlets.List(FIELDS).tag(sync=True)
    values = traitlets.Dict({}).tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    can_chat = traitlets.Bool(False).tag(sync=True)
    history = traitlets.List([]).tag(sync=True)

    def __init__(self, engine: Engine) -> None:
        self._streams: dict[str, Stream] = {}
        super().__init__(engine._steps.loop or asyncio.get_running_loop())
        self._engine = weakref.ref(engine)
        self.title = sound(engine.name)
        self.values = form_values(engine.defaults.params)
        self.can_chat = bool(getattr(engine.tokenizer, "chat_template", None))
        self.runs: list[Run] = []
        """Those that are kept, the last at the end. The generations of a run are there to be used."""
        self._number = 0
        self._opened: Run | None = None
        self._has_front_end = False
        self._is_hidden = False

    def run(
        self,
        prompt: str | None = None,
        *,
        chat: Sequence[Mapping[str, str]] | None = None,
        samples: int = 1,
        **sampling: Any,
    ) -> Run:
        """What the Run button does, with a prompt or a conversation; on the loop. Returns at once.

        What `sampling` does not say is as in the engine's defaults. Without a `seed` one is drawn, and is in the run's
        `params`. Raises what `Engine.generate` raises.
        """
        engine = self._engine()
        if engine is None:
            raise EngineClosedError("the engine of this playground is gone; load it again with Engine.load")
        if whole_number(samples) is None or not 1 <= samples <= _MOST_SAMPLES:
            raise InvalidRequestError("samples", samples, f"must be a whole number, 1 to {_MOST_SAMPLES}")
        params = engine.defaults.params.replace(n=samples).replace(**sampling)
        if params.seed is None:  # drawn here, so that the code draws the same
            params = params.replace(seed=secrets.randbelow(_SEEDS))
        if chat is not None:
            made = engine.chat(chat, params)
        elif isinstance(prompt, str):
            made = engine.generate(prompt, params)
        else:
            raise InvalidRequestError("prompt", prompt, "must be text")
        generations = (made,) if isinstance(made, Generation) else tuple(made)
        self._number += 1
        said = None if chat is None else tuple({key: str(one[key]) for key in ("role", "content")} for one in chat)
        run = Run(self._number, prompt if chat is None else None, said, params, generations)
        self.runs = [*self.runs, run][-_RUNS_KEPT:]
        self.history = [self._entry(one) for one in self.runs]
        self._open(run)
        return run

    def hear(self, message: Message) -> None:
        self._has_front_end = True
        match message:
            case {"stream": str(key)} if key in self._streams:
                self._streams[key].hear(message)
            case {"run": dict(asked)}:
                try:
                    sampling: dict[str, Any] = {}
                    for name, value in asked.get("params", {}).items():
                        sampling |= parsed(name, value)
                    self.run(asked.get("prompt"), chat=asked.get("chat"), samples=asked.get("samples", 1), **sampling)
                except InvalidRequestError as error:
                    self.tell({"refused": error.argument, "problem": sound(str(error))})
            case {"stop": True}:
                for run in self.runs:
                    for generation in run.generations:
                        generation.cancel()
            case {"open": int(number)} if opened := self._find(number):
                self._open(opened)
            case {"code": int(number)} if coded := self._find(number):
                self.tell({"code": sound(coded.code)})
            case {"hello": True} if self._opened is not None:
                self._tell_opened(self._opened)

    def seen(self, visible: bool) -> None:
        self._is_hidden = not visible
        for stream in self._streams.values():
            stream.seen(visible)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.stop()
        super().close()

    def _find(self, number: int) -> Run | None:
        return next((run for run in self.runs if run.number == number), None)

    def _open(self, run: Run) -> None:
        """Show a run, the one at hand or one of before, in the place of what is shown."""
        for stream in self._streams.values():
            stream.stop()
        self._opened, self._streams = run, {}
        for place, generation in enumerate(run.generations):
            key = f"{run.number}.{place}"
            send, ended = partial(self._tell_of, key), partial(self._ended, run)
            self._streams[key] = Stream(generation, send, self.spawn, ended)
        self._tell_opened(run)
        for stream in self._streams.values():
            stream.seen(not self._is_hidden)
            stream.start()

    def _tell_opened(self, run: Run) -> None:
        asked: Message = {"prompt": sound(run.prompt)} if run.prompt is not None else {"chat": _sound_chat(run.chat)}
        settled = all(one.finish_reason is not None for one in run.generations)
        self.tell(
            {
                "opened": run.number,
                "streams": list(self._streams),
                "params": form_values(run.params),
                "running": not settled,
                **asked,
            }
        )

    def _tell_of(self, key: str, message: Message) -> None:
        self.tell({**message, "stream": key})

    def _ended(self, run: Run) -> None:
        if all(one.finish_reason is not None for one in run.generations):
            self.tell({"settled": run.number})
            if not self._has_front_end:  # which asks for it when nobody is at it
                self.renew()

    def _entry(self, run: Run) -> Message:
        return {
            "number": run.number,
            "asked": sound(run.asked)[:200],
            "params": sound(arguments(run.params)),
        }

    # -- what is saved -----------------------------------------------------------------------------------------

    def static(self) -> tuple[str, str]:
        if not self.runs:
            words = f"playground of {self.title}: nothing was run"
            return f"<p>{markup(words)}</p>", words
        html, plain = [f"<p>{markup(f'playground of {self.title}')}</p>"], [f"playground of {self.title}"]
        for run in reversed(self.runs):
            heading = f"run {run.number}: {arguments(run.params)}"
            asked = _as_text(run.chat) if run.chat is not None else run.prompt or ""
            samples = "".join(
                f"<td style='{_CELL}'><pre style='{_PRE}'>{markup(one.text)}</pre>"
                f"<small>{markup(status(one))}</small></td>"
                for one in run.generations
            )
            html.append(
                f"<p><b>{markup(heading)}</b></p><pre style='{_PRE}'>{markup(asked)}</pre>"
                f"<table><tbody><tr>{samples}</tr></tbody></table>"
            )
            plain += ["", heading, asked]
            plain += [f"--- sample {place}: {status(one)}\n{one.text}" for place, one in enumerate(run.generations, 1)]
        return "".join(html), "\n".join(plain)


_PRE = "white-space: pre-wrap; overflow-wrap: anywhere"
_CELL = "text-align: left; vertical-align: top; white-space: normal"


def _sound_chat(chat: Sequence[dict[str, str]] | None) -> list[dict[str, str]]:
    return [{key: sound(value) for key, value in one.items()} for one in chat or ()]


def _as_text(chat: Sequence[dict[str, str]]) -> str:
    return "\n".join(f"{one['role']}: {one['content']}" for one in chat)
