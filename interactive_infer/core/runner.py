"""One step on the device: inputs, forward, sampling, tokens back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.sdpa import PagedSDPA, RowSpan
from interactive_infer.core.decoder import FusedDecoder
from interactive_infer.core.device import Device
from interactive_infer.core.kernels.torch_ops import StepOps, store
from interactive_infer.core.kv_cache import NULL_PAGE
from interactive_infer.core.own_forward import OwnForward, PackedStep
from interactive_infer.core.pools import KVPools, LayerShape
from interactive_infer.core.sampler import Sampled, Sampler, SamplingInputs, SamplingTable
from interactive_infer.core.scheduler import Plan
from interactive_infer.core.step import History, StepResult, below_min_tokens, keep_table, layers_in_words
from interactive_infer.waiting import Completion


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step needs, built on the loop as small host arrays; the device's thread makes tensors of it."""

    input_ids: np.ndarray
    from_device: np.ndarray
    from_slots: np.ndarray
    positions: np.ndarray
    write_to: np.ndarray
    spans: list[RowSpan]
    logits_at: np.ndarray
    sampled_rows: list[int]
    sampled_slots: np.ndarray
    sampling: SamplingInputs | None
    histories: list[History]
    num_rows: int


class Runner:
    """Puts planned steps on the device.

    State on the device: one key and one value pool a layer, `[pages + 1, page_size, kv_heads, head_dim]` (page 0 is the
    null page); the last sampled token of every slot, which feeds the next step before the host has seen it; the
    sampler's token counts. A `core.step.StepRunner`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[nn.Module, int],
        shapes: list[LayerShape],
        device: Device,
        decoder: FusedDecoder | str,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        vocab_size: int,
    ) -> None:
        self.page_size = page_size
        self.decoder = decoder
        self._layers = layers
        self._own_forward = OwnForward(model, layers)
        self._device = device
        torch_device = device.torch_device
        self._pools = KVPools(shapes, num_pages, page_size, model.dtype, torch_device)
        self._last_token = torch.zeros(max_batch_size, dtype=torch.int64, device=torch_device)
        self._table = SamplingTable(max_batch_size, vocab_size)
        self._sampler = Sampler(vocab_size, max_batch_size, torch_device)

    attention = "pages gathered, scaled_dot_product_attention"
    """How attention is computed, in words."""

    def launches(self) -> str:
        """How steps are launched, in words."""
        return "eager"

    def layers(self) -> str:
        """How layers are run, in words."""
        return layers_in_words(self.decoder)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key and value pools."""
        return self._pools.nbytes

    def launch(self, plan: Plan) -> Completion[StepResult]:
        """Put a step on the device; returns at once."""
        inputs = self._prepare(plan)

        def work() -> Callable[[], StepResult]:
            result = self._execute(inputs)
            return lambda: result

        return self._device.submit(work)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them (masked keys still meet their values)."""

        def work() -> Callable[[], None]:
            self._pools.scrub(pages)
            return lambda: None

        self._device.submit(work)

    def close(self) -> None:
        """Let go of model, pools and state; nothing may be in flight."""
        self._pools.free()
        self._layers = {}
        del self._own_forward, self._sampler, self._last_token, self.decoder

    def _prepare(self, plan: Plan) -> _Inputs:
        rows, size = plan.rows, self.page_size
        total = plan.num_tokens
        input_ids = np.zeros(total, np.int64)
        positions = np.empty(total, np.int64)
        write_to = np.empty(total, np.int64)
        from_device: list[int] = []
        from_slots: list[int] = []
        spans: list[RowSpan] = []
        logits_at: list[int] = []
        sampled_rows: list[int] = []
        histories = keep_table(self._table, rows)
        first = 0
        for index, row in enumerate(rows):
            sequence, start, count = row.sequence, row.start, row.count
            if count == 1:
                if row.from_device:
                    from_device.append(first)
                    from_slots.append(row.slot)
                else:
                    input_ids[first] = sequence.token_ids[start]
                positions[first] = start
                page = row.pages[start // size] if start >= row.write_from else NULL_PAGE
                write_to[first] = page * size + start % size
            else:
                stop = start + count
                known = sequence.token_ids[start:stop]
                input_ids[first : first + len(known)] = known
                if row.from_device:
                    from_device.append(first + count - 1)
                    from_slots.append(row.slot)
                position = np.arange(start, stop)
                positions[first : first + count] = position
                pages = np.array(row.pages)[position // size]
                write_to[first : first + count] = (
                    np.where(position >= row.write_from, pages, NULL_PAGE) * size + position % size
                )
            spans.append(RowSpan(first, count, start, row.pages[: -(-(start + count) // size)]))
            first += count
            if row.samples:
                logits_at.append(first - 1)
                sampled_rows.append(index)
        sampling, slots = None, np.array([rows[i].slot for i in sampled_rows], np.int64)
        if sampled_rows:
            positions_drawn = np.array([rows[i].start + rows[i].count for i in sampled_rows], np.int64)
            forbid_stop = np.array([below_min_tokens(rows[i]) for i in sampled_rows], bool)
            sampling = self._table.rows(slots, positions_drawn, forbid_stop)
        return _Inputs(
            input_ids,
            np.array(from_device, np.int64),
            np.array(from_slots, np.int64),
            positions,
            write_to,
            spans,
            np.array(logits_at, np.int64),
            sampled_rows,
            slots,
            sampling,
            histories,
            len(rows),
        )

    # no_grad rather than inference_mode, whose tensors the model's owner could never train or write.
    @torch.no_grad()
    def _execute(self, inputs: _Inputs) -> StepResult:
        for slot, prompt, output in inputs.histories:
            self._sampler.load_history(slot, prompt, output)
        input_ids = self._tensor(inputs.input_ids)
        if inputs.from_device.size:
            input_ids[self._tensor(inputs.from_device)] = self._last_token[self._tensor(inputs.from_slots)]
        logits = self.forward(
            input_ids, inputs.positions, inputs.write_to, inputs.spans, self._tensor(inputs.logits_at)
        )
        if inputs.sampling is None:
            return StepResult([-1] * inputs.num_rows, [], {})
        sampled = self._sampler(logits, inputs.sampling.to(logits.device))
        self._last_token[self._tensor(inputs.sampled_slots)] = sampled.token_ids
        rows = inputs.sampled_rows
        token_ids = [-1] * inputs.num_rows
        for row, token_id in zip(rows, sampled.token_ids.tolist(), strict=True):
            token_ids[row] = token_id
        invalid = [row for row, bad in zip(rows, sampled.invalid.tolist(), strict=True) if bad]
        return StepResult(token_ids, invalid, _logprobs(sampled, rows))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: np.ndarray,
        write_to: np.ndarray,
        spans: list[RowSpan],
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[len(logits_at), vocab_size]` of a packed batch, on this thread.

        `input_ids`, `positions` and `write_to` (slots of the flattened pools) are `[tokens]`; `spans` say which tokens
        belong to which pages; `logits_at` are indices into the tokens.
        """
        attention = PagedSDPA(spans, self.page_size, self._device.torch_device)
        at, slots = self._tensor(positions), self._tensor(write_to)
        decoder = self.decoder
        if isinstance(decoder, str) or decoder.change() is not None:
            step = PackedStep(self._layers, self._pools.layers, partial(store, write_to=slots), attention)
            return self._own_forward(step, input_ids, at, logits_at)

        def attend(
            layer: int,
            query: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            *,
            scaling: float,
            sliding_window: int | None,
        ) -> torch.Tensor:
            return attention(query, keys, values, scaling=scaling, sliding_window=sliding_window)

        decoder.refresh()
        ops = StepOps()
        hidden = decoder.hidden(input_ids, at, slots, self._pools.layers, attend, ops)
        return decoder.logits(hidden.index_select(0, logits_at), ops)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device.torch_device, non_blocking=True)


def _logprobs(sampled: Sampled, rows: list[int]) -> dict[int, tuple[float, int, list[int], list[float]]]:
    if sampled.logprobs is None or sampled.ranks is None:
        return {}
    chosen, ranks = sampled.logprobs.tolist(), sampled.ranks.tolist()
    ids: list[list[int]] = [[]] * len(rows)
    values: list[list[float]] = [[]] * len(rows)
    if sampled.alternative_ids is not None and sampled.alternative_logprobs is not None:
        ids, values = sampled.alternative_ids.tolist(), sampled.alternative_logprobs.tolist()
    return {row: (chosen[i], ranks[i], ids[i], values[i]) for i, row in enumerate(rows) if ranks[i]}
