"""One step on the device: inputs, forward, sampling, tokens back."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import running
from interactive_infer.core.attention.sdpa import PagedSDPA, RowSpan
from interactive_infer.core.device import Device
from interactive_infer.core.kv_cache import NULL_PAGE
from interactive_infer.core.output import TokenLogprobs
from interactive_infer.core.sampler import Sampled, Sampler, SamplingInputs, SamplingTable, penalized
from interactive_infer.core.scheduler import Plan, Row
from interactive_infer.waiting import Completion


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer: heads and head size (the same for both)."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's outcome on the host, one entry a row of the plan.

    `token_ids` holds -1 where the row did not sample. `invalid` lists rows whose logits were not numbers. `logprobs`
    maps the rows for which log-probabilities were computed to (chosen, rank, alternative ids, their values).
    """

    token_ids: list[int]
    invalid: list[int]
    logprobs: dict[int, tuple[float, int, list[int], list[float]]]

    def logprobs_of(self, row: int, k: int | None) -> TokenLogprobs | None:
        """What a row that asked for `k` alternatives gets; None when it asked for nothing."""
        if k is None or row not in self.logprobs:
            return None
        logprob, rank, ids, values = self.logprobs[row]
        return TokenLogprobs(logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))


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
    histories: list[tuple[int, list[int], list[int]]]
    num_rows: int


class PackedStep:
    """The attention of a running step: stores each layer's keys and values in its pool, then attends over pages."""

    def __init__(
        self,
        layers: dict[nn.Module, int],
        pools: list[tuple[torch.Tensor, torch.Tensor]],
        write_to: torch.Tensor,
        attention: PagedSDPA,
    ) -> None:
        self._layers = layers
        self._pools = pools
        self._write_to = write_to
        self._attention = attention

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        keys, values = self._pools[self._layers[module]]
        keys.flatten(0, 1).index_copy_(0, self._write_to, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self._write_to, value[0].transpose(0, 1))
        out = self._attention(
            query[0], keys, values, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return out[None]


class Runner:
    """Puts planned steps on the device.

    State on the device: one key and one value pool a layer, `[pages + 1, page_size, kv_heads, head_dim]` (page 0 is the
    null page); the last sampled token of every slot, which feeds the next step before the host has seen it; the
    sampler's token counts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[nn.Module, int],
        shapes: list[LayerShape],
        device: Device,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        vocab_size: int,
    ) -> None:
        self.page_size = page_size
        self._model = model
        self._layers = layers
        self._modules = frozenset(layers)
        self._device = device
        self._select_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        torch_device = device.torch_device
        # Zeros rather than uninitialized: masked positions still meet values, and 0 * NaN is NaN.
        sizes = [(num_pages + 1, page_size, shape.kv_heads, shape.head_dim) for shape in shapes]
        self._pools = [
            (_zeros(size, model.dtype, torch_device), _zeros(size, model.dtype, torch_device)) for size in sizes
        ]
        self._last_token = torch.zeros(max_batch_size, dtype=torch.int64, device=torch_device)
        self._table = SamplingTable(max_batch_size, vocab_size)
        self._sampler = Sampler(vocab_size, max_batch_size, torch_device)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key and value pools."""
        return sum(k.nbytes + v.nbytes for k, v in self._pools)

    def launch(self, plan: Plan) -> Completion[StepResult]:
        """Put a step on the device; returns at once."""
        inputs = self._prepare(plan)
        return self._device.submit(lambda: self._execute(inputs))

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them (masked keys still meet their values)."""
        index = torch.tensor(pages, device=self._device.torch_device)

        def work() -> None:
            for keys, values in self._pools:
                keys.index_fill_(0, index, 0)
                values.index_fill_(0, index, 0)

        self._device.submit(work)

    def close(self) -> None:
        """Let go of model, pools and state; nothing may be in flight."""
        self._pools = []
        self._layers = {}
        self._modules = frozenset()
        del self._model, self._sampler, self._last_token

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
        histories: list[tuple[int, list[int], list[int]]] = []
        first = 0
        for index, row in enumerate(rows):
            sequence, start, count = row.sequence, row.start, row.count
            if row.load_history:
                self._table.release(row.slot)
                self._table.assign(row.slot, sequence.params, tuple(sequence.stop_ids))
                if penalized(sequence.params):
                    prompt = sequence.token_ids[: sequence.prompt_length]
                    histories.append((row.slot, prompt, sequence.token_ids[sequence.prompt_length :]))
            elif sequence.params_dirty:
                self._table.update(row.slot, sequence.params, tuple(sequence.stop_ids))
            sequence.params_dirty = False
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
            spans.append(RowSpan(first, count, start, row.pages))
            first += count
            if row.samples:
                logits_at.append(first - 1)
                sampled_rows.append(index)
        sampling, slots = None, np.array([rows[i].slot for i in sampled_rows], np.int64)
        if sampled_rows:
            positions_drawn = np.array([rows[i].start + rows[i].count for i in sampled_rows], np.int64)
            forbid_stop = np.array([_below_min_tokens(rows[i]) for i in sampled_rows], bool)
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
        step = PackedStep(self._layers, self._pools, self._tensor(write_to), attention)
        select: dict[str, torch.Tensor] = {}
        if self._select_logits:  # 0 would mean all of them: a chunk that samples nothing asks for one
            select["logits_to_keep"] = logits_at if logits_at.numel() else logits_at.new_zeros(1)
        with running(step, self._modules):
            output = self._model(
                input_ids=input_ids[None],
                position_ids=self._tensor(positions)[None],
                # A mask of four dimensions is passed through as it is: none is built, and no packing is looked for.
                attention_mask=torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device),
                use_cache=False,
                **select,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if select else logits.index_select(0, logits_at)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device.torch_device, non_blocking=True)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost memory only where they are written, on a CPU: NumPy asks the system for zero pages, while
    `torch.zeros` writes them all."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)


def _logprobs(sampled: Sampled, rows: list[int]) -> dict[int, tuple[float, int, list[int], list[float]]]:
    if sampled.logprobs is None or sampled.ranks is None:
        return {}
    chosen, ranks = sampled.logprobs.tolist(), sampled.ranks.tolist()
    ids: list[list[int]] = [[]] * len(rows)
    values: list[list[float]] = [[]] * len(rows)
    if sampled.alternative_ids is not None and sampled.alternative_logprobs is not None:
        ids, values = sampled.alternative_ids.tolist(), sampled.alternative_logprobs.tolist()
    return {row: (chosen[i], ranks[i], ids[i], values[i]) for i, row in enumerate(rows) if ranks[i]}


def _below_min_tokens(row: Row) -> bool:
    """Whether the token that this row draws comes before `min_tokens` are reached."""
    sequence = row.sequence
    return bool(row.start + row.count - sequence.prompt_length < sequence.params.min_tokens)
