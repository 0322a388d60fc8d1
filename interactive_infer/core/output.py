"""What a generation has produced so far, shared by the engine that writes it and the handles that read it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from interactive_infer.core.detokenizer import Detokenizer, StopStrings
from interactive_infer.core.spent import Spent

FinishReason = Literal["stop", "length", "cancelled", "error"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position: the chosen token's, its rank (1 = most likely), and the
    `k` most likely tokens as pairs of token id and log-probability."""

    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


class Listeners(list[Callable[[], None]]):
    """Who is told when there is something new. They go with the handle that keeps them: an output refers to it weakly.

    A view refers to its generation. Did the output, which the scheduler refers to, keep the view, then a paused text
    that everybody has forgotten would stay for ever.
    """

    __slots__ = ("__weakref__",)


class Output:
    """Token ids, and their text once somebody asks.

    Written by the engine's driver only; may be read from any thread. Invariants:
    - token ids are only ever appended, and nothing is appended once `finish_reason` is set;
    - `text` only ever grows: text that may turn out to belong to a stop string, or to a character whose last bytes
      have not come, is held back until it is decided. A token is *visible* once its text is;
    - the texts of all tokens, joined, are the text;
    - the `preset` tokens were not generated but given (a branch's shared part): `times_ns`, on
      `time.perf_counter_ns`, begins after them. No stop string is looked for in them, nor in the first `min_tokens`.
    - `changes` counts the notifications: who reads it before anything else and finds it the same later has missed none.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, stop: Sequence[str], preset: list[int], min_tokens: int = 0
    ) -> None:
        self._num_preset = len(preset)
        self._stops_from = max(len(preset), min_tokens)
        self.token_ids: list[int] = list(preset)
        self.times_ns = array("q")
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.created_ns = time.perf_counter_ns()
        self.spent = Spent(self.created_ns)
        self.scheduled_ns: int | None = None
        self.finished_ns: int | None = None
        self.changes = 0
        self.parted: Callable[[], None] | None = None
        """Called once at the end, before the listeners: whoever keeps something for this text lets go of it."""
        self._listeners: Callable[[], Listeners | None] = lambda: None
        self.detokenizer = detokenizer
        self._stop_strings = tuple(stop)
        self._stop = StopStrings(stop) if stop else None
        self._released = ""  # text that a former stop string held back; it goes to the next token
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._flushed = False
        self._joined = ""
        self._num_joined = 0

    def attach(self, listeners: Listeners) -> None:
        """Tell these from now on, as long as somebody else keeps them."""
        self._listeners = weakref.ref(listeners)

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Who is told; nobody once the generation is gone."""
        listeners = self._listeners()
        return listeners if listeners is not None else []

    def watch_for(self, stop: Sequence[str], min_tokens: int) -> None:
        """Other stop strings from the next token on: text that is there already is no part of a match."""
        stop = tuple(stop)
        with self._lock:
            stops_from = max(self._num_preset, min_tokens)
            if stop or self._stop is not None:
                there = self._decode_new()
                if stop != self._stop_strings or stops_from > there:
                    if self._stop is not None:
                        self._released += self._stop.flush()
                    self._stop = StopStrings(stop) if stop else None
                    stops_from = max(stops_from, there)
            self._stop_strings, self._stops_from = stop, stops_from

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been completed (up to the tokens decoded so far)."""
        return self._stop is not None and self._stop.matched is not None

    def reached_stop_string(self) -> bool:
        """Whether the tokens so far complete a stop string; decodes only where there is one to look for."""
        if self._stop is None:
            return False
        self.decode()
        return self.stopped

    def append(self, token_id: int, at_ns: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Take one more token; says whether it completes a stop string."""
        if logprobs is not None:
            self.logprobs[len(self.token_ids)] = logprobs
        self.token_ids.append(token_id)
        self.times_ns.append(at_ns)
        if self.spent.doing == "prefill":
            self.spent.go("decode", at_ns)
        return self._stop is not None and self.reached_stop_string()

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """The end; a second one changes nothing. `error` is what every reader gets when `reason` is "error".

        In this order: the end is there to be seen, whoever keeps something lets go, the listeners are told.
        """
        if self.finish_reason is not None:
            return
        self.error = error
        self.finished_ns = time.perf_counter_ns()
        self.spent.go(None, self.finished_ns)
        self.finish_reason = reason
        parted, self.parted = self.parted, None
        if parted is not None:
            parted()
        self.notify()

    def notify(self) -> None:
        """Tell whoever listens that there is something new. A listener must not take long.

        One that raises is logged and told no more: it runs in the middle of a commit, which must go on for the others.
        """
        self.changes += 1
        listeners = self._listeners()
        if not listeners:
            return
        for listener in tuple(listeners):
            try:
                listener()
            except BaseException:
                _log.exception("a listener of a generation failed, and is told no more: %r", listener)
                if listener in listeners:
                    listeners.remove(listener)

    def decode(self) -> int:
        """Decode what has come since the last call; returns the number of visible tokens."""
        with self._lock:
            return self._decode()

    def piece(self, index: int) -> str:
        """The text of visible token `index`."""
        return self._pieces[index]

    @property
    def text(self) -> str:
        with self._lock:
            visible = self._decode()
            if visible > self._num_joined:
                self._joined += "".join(self._pieces[self._num_joined : visible])
                self._num_joined = visible
            return self._joined

    def _decode(self) -> int:
        ended = self.finish_reason is not None  # read first: it is set after the last append
        there, detokenizer, stop = self._decode_new(), self.detokenizer, self._stop
        if detokenizer is None:
            return there
        if ended and not self._flushed and there:
            self._flushed = True
            rest = detokenizer.flush()
            if stop is not None:
                rest = stop.push(rest) + stop.flush()
            self._pieces[-1] += self._released + rest
            self._released = ""
        # Text that is held back goes to a later token, or at the end to the last: until then that one is undecided.
        holding = detokenizer.holding or self._released or (stop is not None and stop.holding)
        return there - bool(holding and not self._flushed)

    def _decode_new(self) -> int:
        """Decode what has come, without the end's rest; returns the number of tokens decoded."""
        pieces, new = self._pieces, self.token_ids[len(self._pieces) :]
        detokenizer, stop = self.detokenizer, self._stop
        if detokenizer is None:
            pieces += [""] * len(new)
            return len(pieces)
        for text in detokenizer.push(new):
            if stop is not None and text and len(pieces) >= self._stops_from:
                text = stop.push(text)
            if self._released:
                text, self._released = self._released + text, ""
            pieces.append(text)
        return len(pieces)
