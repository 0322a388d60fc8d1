"""The sampling parameters as a form: what there is to set, and its values as a front end and as the engine has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from interactive_infer.errors import InvalidRequestError
from interactive_infer.notebook.hostile import sound
from interactive_infer.sampling import SamplingParams

FIELDS: list[dict[str, Any]] = [
    {"name": "temperature", "kind": "slider", "min": 0, "max": 2, "step": 0.05, "hint": "0: the most likely token"},
    {"name": "top_p", "kind": "slider", "min": 0.01, "max": 1, "step": 0.01, "hint": "1: off"},
    {"name": "top_k", "kind": "slider", "min": 0, "max": 200, "step": 1, "hint": "0: off"},
    {"name": "min_p", "kind": "slider", "min": 0, "max": 1, "step": 0.01, "hint": "0: off"},
    {"name": "presence_penalty", "kind": "slider", "min": -2, "max": 2, "step": 0.1, "hint": "0: off"},
    {"name": "frequency_penalty", "kind": "slider", "min": -2, "max": 2, "step": 0.1, "hint": "0: off"},
    {"name": "repetition_penalty", "kind": "slider", "min": 0.5, "max": 2, "step": 0.05, "hint": "1: off"},
    {"name": "max_tokens", "kind": "number", "min": 1, "step": 1, "hint": "the text ends after so many"},
    {"name": "min_tokens", "kind": "number", "min": 0, "step": 1, "hint": "it does not end before so many"},
    {"name": "seed", "kind": "text", "hint": "empty: one is drawn"},
    {"name": "stop", "kind": "lines", "hint": r"strings that end the text, one a line; \n stands for a new line"},
    {"name": "ignore_eos", "kind": "box", "hint": "go on after an end-of-text token"},
    {"name": "logprobs", "kind": "text", "hint": "alternatives kept with each token, 0 to 20; empty: none"},
]
"""In the order in which a form shows them. `slider` and `number`: any number the engine takes may be typed in."""

_KINDS = {field["name"]: field["kind"] for field in FIELDS}
_WHOLE = ("top_k", "max_tokens", "min_tokens", "seed", "logprobs")


def form_values(params: SamplingParams) -> dict[str, Any]:
    """As a front end shows them: numbers, text and booleans."""
    values = {name: getattr(params, name) for name in _KINDS}
    for name in ("seed", "logprobs"):  # as text: JavaScript would round a seed
        values[name] = "" if values[name] is None else str(values[name])
    values["stop"] = "\n".join(sound(stop).replace("\\", "\\\\").replace("\n", "\\n") for stop in params.stop)
    return values


def parsed(name: Any, value: Any) -> dict[str, Any]:
    """The argument of `update` that a front end's value stands for. InvalidRequestError: it is none."""
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidRequestError("name", name, "is not a parameter of this form")
    if kind in ("text", "lines") and not isinstance(value, str):
        raise InvalidRequestError(name, value, "must be text")
    if kind == "lines":
        lines = [line for line in value.split("\n") if line]
        return {name: [line.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\") for line in lines]}
    if kind == "text":
        if not value.strip():
            return {name: None}
        try:
            return {name: int(value)}
        except ValueError:
            raise InvalidRequestError(name, value, "must be a whole number, or empty") from None
    if name in _WHOLE and isinstance(value, float) and value.is_integer():
        value = int(value)
    return {name: value}


def arguments(params: SamplingParams) -> str:
    """The arguments of `SamplingParams(…)` that make these, without those that are as they are by default."""
    usual = SamplingParams()
    return ", ".join(
        f"{field.name}={getattr(params, field.name)!r}"
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(usual, field.name)
    )
