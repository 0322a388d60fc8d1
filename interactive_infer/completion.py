"""What a generation came to: its text, its tokens, what was used and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from interactive_infer.core.output import FinishReason

if TYPE_CHECKING:
    from interactive_infer.generation import Generation


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another token that could have stood here. `logprob` is a natural logarithm."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. The texts of a generation's tokens, joined, are its text; a token that only begins a
    character, or is a special token, has the text "". `index` counts from 0 at the first generated token.
    `logprob` and `alternatives` (most likely first) are there when the generation was made with `logprobs`.
    """

    id: int
    text: str
    index: int
    logprob: float | None = None
    rank: int | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, named as in the OpenAI API. `cached_tokens` of the prompt were reused from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a generation's time went, in seconds.

    What it was doing, which adds up to its life so far (`core.spent`): `queue`, waiting for a place in a step, at first
    and after `resume`; `prefill`, while more than one token had to be computed for its next one; `decode`, from token
    to token; `paused`; `preempted`, while its pages were somebody else's.

    None for what did not happen: `time_to_first_token`, from the call to the first token on the host; `total`, from the
    call to the end; `tokens_per_second`, over the time after the first token.
    """

    queue: float
    prefill: float
    decode: float
    paused: float
    preempted: float
    time_to_first_token: float | None
    total: float | None
    tokens_per_second: float | None

    def __repr__(self) -> str:
        shown = (f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self))
        return f"Timing({', '.join(shown)})"


class Completion:
    """What a generation came to, or had come to when it was asked. `token_ids` are the generated ones, a stop token
    among them.

    `text` and `tokens` of a finished generation are made when they are first read, and cost nothing until then: dozens
    of readers may wake in one turn of the loop. Read-only; pickled and copied as plain data. Equal: the same tokens
    ended in the same way, in the same time.
    """

    def __init__(self, generation: Generation) -> None:
        output, sequence = generation._output, generation._sequence
        self.finish_reason: FinishReason | None = output.finish_reason
        self.token_ids: tuple[int, ...] = tuple(output.token_ids)
        self.usage = Usage(
            prompt_tokens=len(generation._prompt_ids or ()),
            completion_tokens=len(self.token_ids),
            cached_tokens=min(sequence.num_reused, sequence.prompt_length) if sequence is not None else 0,
        )
        self.timing: Timing = generation.timing
        self._generation: Generation | None = generation
        if self.finish_reason is None:  # it goes on; this does not
            self._settle()

    @cached_property
    def text(self) -> str:
        """Without special tokens, and without the stop string."""
        assert self._generation is not None
        return self._generation.text

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """With log-probabilities where they were asked for."""
        assert self._generation is not None
        return self._generation.tokens

    def _settle(self) -> Self:
        """Make what has not been read yet, and let the generation go."""
        vars(self).update(text=self.text, tokens=self.tokens, _generation=None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self._settle())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.token_ids, self.finish_reason, self.usage, self.timing

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"<Completion {self.finish_reason}, {self.usage.completion_tokens} tokens: {text!r}>"


def _short(number: float | None) -> str:
    return "None" if number is None else f"{number:.4g}"
