"""The engine's side of a generation: its token ids, its pages, and how far each has come."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from interactive_infer.core.kv_cache import KVCache
from interactive_infer.core.output import Output
from interactive_infer.sampling import SamplingParams


class State(enum.Enum):
    """Where a sequence is. WAITING, RUNNING and PAUSED are unfinished; FINISHED is for good."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Sequence:
    """Token ids and KV pages of one generation.

    Invariants, with `length = len(token_ids) + pending`:
    - `num_planned <= length`: keys and values of the first `num_planned` tokens are on the device or launched;
    - `num_cached <= num_planned`: those whose step has been committed;
    - `pending` sampled tokens are in flight; the host does not know them yet;
    - `num_indexed` pages from the front are in the prefix index, and `digest` is that of the last of them;
    - a slot (a row of the sampler's state) is held exactly while RUNNING;
    - the `preset` tokens after the prompt were not generated but given (a branch's shared part).
    """

    __slots__ = (
        "arrival",
        "digest",
        "history_loaded",
        "max_length",
        "num_cached",
        "num_indexed",
        "num_planned",
        "num_preemptions",
        "num_reused",
        "output",
        "pages",
        "params",
        "params_dirty",
        "pending",
        "prompt_length",
        "slot",
        "state",
        "stop_ids",
        "token_ids",
        "token_limit",
    )

    def __init__(
        self,
        arrival: int,
        prompt_ids: list[int],
        params: SamplingParams,
        output: Output,
        *,
        preset: Iterable[int] = (),
        token_limit: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.arrival = arrival
        self.token_ids = [*prompt_ids, *preset]
        self.prompt_length = len(prompt_ids)
        self.output = output
        self.token_limit = token_limit
        self.state = State.WAITING
        self.pages: list[int] = []
        self.slot = -1
        self.history_loaded = False
        self.num_preemptions = 0
        self.num_reused = 0
        self.pending = 0
        self.forget_pages()
        self.set_params(params, stop_ids)

    def set_params(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """From the next step on. `max_length` is the length at which the generation ends with `length`."""
        self.params = params
        self.params_dirty = True
        self.stop_ids = stop_ids
        self.max_length = min(self.prompt_length + params.max_tokens, self.token_limit)

    def forget_pages(self) -> None:
        """Start again from nothing: the pages went to somebody else."""
        self.pages = []
        self.num_planned = 0
        self.num_cached = 0
        self.num_indexed = 0
        self.digest = b""

    @property
    def length(self) -> int:
        """Tokens there are, those in flight included."""
        return len(self.token_ids) + self.pending

    @property
    def num_todo(self) -> int:
        """Tokens the next step could process: 1 while decoding, more in prefill, 0 while the last are in flight."""
        length = len(self.token_ids) + self.pending
        if length >= self.max_length and self.pending:
            return 0
        return length - self.num_planned

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def index_pages(self, cache: KVCache) -> None:
        """Put the pages that have become full and committed into the prefix index."""
        size = cache.page_size
        full = min(self.num_cached, len(self.token_ids)) // size
        while self.num_indexed < full:
            start = self.num_indexed * size
            page = self.pages[self.num_indexed]
            self.digest = cache.commit(page, self.digest, self.token_ids[start : start + size])
            self.num_indexed += 1
