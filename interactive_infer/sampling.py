"""What may be asked of sampling: names and meanings of vLLM and the OpenAI API, checked when given."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from interactive_infer.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy, as in vLLM: dividing by it would overflow float32."""

MAX_LOGPROBS = 20
MAX_N = 1024
"""Samples of one prompt: they are all made before the call returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends. Immutable; every field was checked at construction.

    Numbers may be Python's, numpy's or zero-dimensional torch tensors. A wrong value raises
    `InvalidRequestError`, which names the field, the value and what would be right.

    - `temperature`: divides the logits; 0 (and anything below 1e-5) takes the most likely token.
    - `top_p` in (0, 1], `top_k` (0 or -1: off), `min_p` in [0, 1]: which tokens may be drawn; see
      `interactive_infer.core.sampler` for the order in which they apply and what happens to ties.
    - `presence_penalty`, `frequency_penalty` in [-2, 2]: subtracted from the logit of a token that is in the
      output, once or once per occurrence. `repetition_penalty` in [1e-6, 1e6]: divides a positive logit, multiplies a
      negative one, for tokens in prompt or output.
    - `seed` in [0, 2**63): each draw depends on the seed and the token's position alone. None: one is drawn.
    - `stop`: a string or several; the text ends before the first that appears. `stop_token_ids`: tokens that
      end the text, besides the model's own end-of-text tokens, which `ignore_eos` switches off.
    - `min_tokens`, `max_tokens`: no end-of-text, stop token or stop string counts before `min_tokens` tokens.
    - `n`: how many generations one call makes from a prompt.
    - `logprobs`: None for none, 0 for the chosen token's, k <= 20 for the k most likely alternatives too.
      `logprobs_mode`: of the model's own distribution (`raw_logprobs`), or after bias, penalties, temperature
      and filters (`processed_logprobs`).
    - `logit_bias`: token id to a number in [-100, 100] that is added to its logit. The mapping is copied; do
      not write to the copy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 256
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "temperature": _real("temperature", self.temperature, 0.0, math.inf),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": _whole("top_k", self.top_k, -1, "a positive number of tokens, or 0 or -1 for no limit"),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6),
            "seed": None if self.seed is None else _seed(self.seed),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0, "0 or more"),
            "max_tokens": _whole("max_tokens", self.max_tokens, 1, "1 or more"),
            "n": _number_of_samples(self.n),
            "logprobs": None if self.logprobs is None else _logprobs(self.logprobs),
            "logit_bias": None if self.logit_bias is None else _logit_bias(self.logit_bias),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise InvalidRequestError(
                "logprobs_mode", self.logprobs_mode, 'must be "raw_logprobs" or "processed_logprobs"'
            )
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", self.min_tokens, f"must not be more than max_tokens, which is {self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no random draw."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def make(cls, params: SamplingParams | None = None, /, **overrides: Any) -> SamplingParams:
        """`params` (or the defaults) with `overrides` in place of its fields, all checked."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequestError("params", params, "must be a SamplingParams or None")
        return (params if params is not None else cls()).replace(**overrides)

    def replace(self, **changes: Any) -> Self:
        """A checked copy with `changes`; an unknown name is refused with the closest one."""
        for name, value in changes.items():
            if name not in _FIELDS:
                close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.0)[0]
                raise InvalidRequestError(name, value, f"no such sampling parameter; did you mean {close}?")
        return dataclasses.replace(self, **changes) if changes else self

    def updated(self, **changes: Any) -> Self:
        """`replace` for a running generation: only `RUNNING_FIELDS` may change; a seed of None is drawn."""
        after = self.replace(**changes)
        for name, value in changes.items():
            if name not in RUNNING_FIELDS:
                raise InvalidRequestError(
                    name, value, "cannot change while generations run; start new ones with another call"
                )
        return after.with_seed()

    def with_seed(self, index: int = 0) -> Self:
        """A copy whose seed is concrete: drawn when there is none, else the seed plus `index` modulo 2**63.

        `index` tells the `n` generations of one call apart, as vLLM does.
        """
        if self.seed is not None and index == 0:
            return self
        seed = secrets.randbits(63) if self.seed is None else (self.seed + index) % 2**63
        copy = object.__new__(type(self))  # all fields are checked, and there may be a thousand copies
        for name in _FIELDS:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "seed", seed)
        return copy

    def validate_for(self, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Checks the token ids in `stop_token_ids` and `logit_bias` against a vocabulary of that size, and that one is
        left to draw before `min_tokens`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        name,
                        token_id,
                        f"is not in the vocabulary; this model's token ids are below {vocab_size}",
                    )
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.min_tokens and len(ends) >= vocab_size:
            raise InvalidRequestError(
                "min_tokens",
                self.min_tokens,
                f"no token is left to draw: stop_token_ids are all {vocab_size} there are",
            )


_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))

RUNNING_FIELDS = frozenset(_FIELDS) - {"n"}
"""What `Generation.update` may change: everything that the next draw or the next test for an end reads.

`n` is read once, when a call makes its generations. A new seed holds from the next draw on: a draw depends on
(seed, position) alone, so nothing of the old one is left over.
"""


def _scalar(value: object) -> object:
    """A numpy scalar or a zero-dimensional array or tensor as the Python number that it holds."""
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "ndim", None) == 0 else value


def _real(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a finite float in [low, high], or in (low, high] when `above`."""
    if math.isinf(high):
        wanted = f"must be a finite number {'above' if above else 'of at least'} {low:g}"
    else:
        wanted = f"must be a number {f'above {low:g} and at most' if above else f'from {low:g} to'} {high:g}"
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise InvalidRequestError(name, value, wanted)
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not low <= result <= high or (above and result == low):
        raise InvalidRequestError(name, value, wanted)
    return result


def _whole(name: str, value: object, low: int, wanted: str) -> int:
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or int(number) < low:
        raise InvalidRequestError(name, value, f"must be a whole number, {wanted}")
    return int(number)


def _number_of_samples(value: object) -> int:
    n = _whole("n", value, 1, f"from 1 to {MAX_N}")
    if n > MAX_N:
        raise InvalidRequestError("n", value, f"must be a whole number, from 1 to {MAX_N}")
    return n


def _seed(value: object) -> int:
    seed = _whole("seed", value, 0, "from 0 to 2**63 - 1, or None to have one drawn")
    if seed >= 2**63:
        raise InvalidRequestError("seed", value, "must be a whole number, from 0 to 2**63 - 1")
    return seed


def _logprobs(value: object) -> int:
    wanted = f"from 0 to {MAX_LOGPROBS}, or None for no log-probabilities"
    count = _whole("logprobs", value, 0, wanted)
    if count > MAX_LOGPROBS:
        raise InvalidRequestError("logprobs", value, f"must be a whole number, {wanted}")
    return count


def _flag(name: str, value: object) -> bool:
    flag = _scalar(value)
    if not isinstance(flag, bool):
        raise InvalidRequestError(name, value, "must be True or False")
    return flag


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if strings is None:
        return ()
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequestError("stop", value, "must be a string or a list of strings")
    if not all(strings):
        raise InvalidRequestError("stop", value, "must not hold an empty string, which would end every text at once")
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    tolist = getattr(value, "tolist", None)
    ids = tolist() if tolist is not None else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidRequestError(name, value, "must be a list of token ids")
    return tuple(_whole(name, token_id, 0, "a token id") for token_id in ids)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", value, "must map token ids to numbers, for example {42: -100}")
    return {
        _whole("logit_bias", token_id, 0, "a token id"): _real("logit_bias", bias, -100.0, 100.0)
        for token_id, bias in value.items()
    }
