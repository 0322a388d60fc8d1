"""What can be set when an engine is loaded, checked before anything is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from interactive_infer.errors import InvalidRequestError
from interactive_infer.prompts import whole_number

Waiting = Literal["thread", "spin", "block"]

_MOST = {
    "kv_cache_tokens": 1 << 40,
    "page_size": 1024,
    "max_batch_size": 4096,
    "max_step_tokens": 1 << 20,
    "steps_in_flight": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs, see `Engine.load`. None: what suits the device. InvalidRequestError for a wrong value."""

    kv_cache_tokens: int | None = None
    page_size: int | None = None
    max_batch_size: int | None = None
    max_step_tokens: int | None = None
    waiting: Waiting = "thread"
    steps_in_flight: int = 2

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name != "steps_in_flight":
                continue
            number = whole_number(value)
            if number is None or not 1 <= number <= most:
                raise InvalidRequestError(name, value, f"must be a whole number, 1 to {most:,}")
            object.__setattr__(self, name, number)
        if self.waiting not in get_args(Waiting):
            raise InvalidRequestError("waiting", self.waiting, 'must be "thread", "spin" or "block"')
