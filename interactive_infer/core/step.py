"""What a step is to those who plan, launch and commit it, whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from interactive_infer.core.attention.sdpa import RowSpan
from interactive_infer.core.decoder import FusedDecoder
from interactive_infer.core.output import TokenLogprobs
from interactive_infer.core.sampling_table import SamplingTable, penalized
from interactive_infer.core.scheduler import Plan, Row
from interactive_infer.waiting import Completion


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's outcome on the host, one entry a row of the plan.

    `token_ids` holds -1 where the row did not sample. `invalid` lists rows whose logits were not numbers. `logprobs`
    maps the rows for which log-probabilities were computed to (chosen, rank, alternative ids, their values). `graph`:
    the step was replayed from CUDA graphs.
    """

    token_ids: list[int]
    invalid: list[int]
    logprobs: dict[int, tuple[float, int, list[int], list[float]]]
    graph: bool = False

    def logprobs_of(self, row: int, k: int | None) -> TokenLogprobs | None:
        """What a row that asked for `k` alternatives gets; None when it asked for nothing."""
        if k is None or row not in self.logprobs:
            return None
        logprob, rank, ids, values = self.logprobs[row]
        return TokenLogprobs(logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))


class StepRunner(Protocol):
    """Puts planned steps on a device.

    `decoder` runs the layers, or says in words why the model's own forward does; it may be changed while nothing is in
    flight.
    """

    page_size: int
    decoder: FusedDecoder | str

    @property
    def attention(self) -> str:
        """How attention is computed, in words."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key and value pools."""
        ...

    def layers(self) -> str:
        """How layers are run, in words."""
        ...

    def launches(self) -> str:
        """How steps are launched, in words."""
        ...

    def launch(self, plan: Plan) -> Completion[StepResult]:
        """Put a step on the device; returns at once."""
        ...

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them (masked keys still meet their values)."""
        ...

    def forward(
        self, input_ids: Tensor, positions: np.ndarray, write_to: np.ndarray, spans: list[RowSpan], logits_at: Tensor
    ) -> Tensor:
        """Logits `[len(logits_at), vocab_size]` of a packed batch, on this thread.

        `input_ids`, `positions` and `write_to` (slots of the flattened pools) are `[tokens]`; `spans` say which tokens
        belong to which pages; `logits_at` are indices into the tokens.
        """
        ...

    def close(self) -> None:
        """Let go of model, pools and state; nothing may be in flight."""
        ...


def layers_in_words(decoder: FusedDecoder | str) -> str:
    """How a step's layers are run, as `StepRunner.layers` says it."""
    reason = decoder if isinstance(decoder, str) else decoder.change()
    return "fused" if reason is None else f"the model's own, since {reason}"


History = tuple[int, list[int], list[int]]
"""A slot, and the prompt's and the output's token ids of the sequence that holds it."""


def keep_table(table: SamplingTable, rows: list[Row]) -> list[History]:
    """Bring `table` up to date for a step of `rows`; returns the histories that the sampler's penalties need anew."""
    histories: list[History] = []
    for row in rows:
        sequence = row.sequence
        if not (row.load_history or sequence.params_dirty):
            continue
        if row.load_history:
            table.release(row.slot)
            table.assign(row.slot, sequence.params, tuple(sequence.stop_ids))
            if penalized(sequence.params):
                prompt = sequence.token_ids[: sequence.prompt_length]
                histories.append((row.slot, prompt, sequence.token_ids[sequence.prompt_length :]))
        else:
            table.update(row.slot, sequence.params, tuple(sequence.stop_ids))
        sequence.params_dirty = False
    return histories


def below_min_tokens(row: Row) -> bool:
    """Whether the token that this row draws comes before `min_tokens` are reached."""
    sequence = row.sequence
    return bool(row.start + row.count - sequence.prompt_length < sequence.params.min_tokens)
