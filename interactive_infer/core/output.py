"""What a generation has produced so far, shared by the engine that writes it and the handles that read it."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from interactive_infer.core.detokenizer import Detokenizer, StopStrings

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position: the chosen token's, its rank (1 = most likely), and the
    `k` most likely tokens as pairs of token id and log-probability."""

    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


class Output:
    """Token ids, and their text once somebody asks.

    Written by the engine's driver only; may be read from any thread. Invariants:
    - token ids are only ever appended, and nothing is appended once `finish_reason` is set;
    - `text` only ever grows: text that may turn out to belong to a stop string, or to a character whose last bytes
      have not come, is held back until it is decided. A token is *visible* once its text is;
    - the texts of all tokens, joined, are the text;
    - the `preset` tokens were not generated but given (a branch's shared part): `times_ns`, on
      `time.perf_counter_ns`, begins after them. No stop string is looked for in them, nor in the first `min_tokens`.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, stop: tuple[str, ...], preset: list[int], min_tokens: int = 0
    ) -> None:
        self._stops_from = max(len(preset), min_tokens)
        self.token_ids: list[int] = list(preset)
        self.times_ns = array("q")
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.created_ns = time.perf_counter_ns()
        self.scheduled_ns: int | None = None
        self.finished_ns: int | None = None
        self.listeners: list[Callable[[], None]] = []
        self.detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._flushed = False
        self._joined = ""
        self._num_joined = 0

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

    def append(self, token_id: int, at_ns: int, logprobs: TokenLogprobs | None = None) -> None:
        if logprobs is not None:
            self.logprobs[len(self.token_ids)] = logprobs
        self.token_ids.append(token_id)
        self.times_ns.append(at_ns)

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """The end, once. `error` is what every reader gets when `reason` is "error"."""
        self.finish_reason = reason
        self.error = error
        self.finished_ns = time.perf_counter_ns()

    def notify(self) -> None:
        """Tell whoever listens that there is something new. A listener must not raise, and must not take long."""
        for listener in tuple(self.listeners):
            listener()

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
        pieces, new = self._pieces, self.token_ids[len(self._pieces) :]
        detokenizer, stop = self.detokenizer, self._stop
        if detokenizer is None:
            pieces += [""] * len(new)
            return len(pieces)
        for text in detokenizer.push(new):
            if stop is not None and text and len(pieces) >= self._stops_from:
                text = stop.push(text)
            pieces.append(text)
        if ended and not self._flushed and pieces:
            self._flushed = True
            rest = detokenizer.flush()
            if stop is not None:
                rest = stop.push(rest) + stop.flush()
            pieces[-1] += rest
        # Text that is held back goes to a later token, or at the end to the last: until then that one is undecided.
        held = not self._flushed and (detokenizer.holding or (stop is not None and stop.holding))
        return len(pieces) - held
