"""One step on a CUDA card: a copy in, a graph, sampling that replies."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.batch import StepBatch
from interactive_infer.core.attention.sdpa import RowSpan
from interactive_infer.core.attention.triton_paged import paged_attention
from interactive_infer.core.cuda import CUDADevice
from interactive_infer.core.decoder import FusedDecoder, Ops
from interactive_infer.core.device import WorkThread
from interactive_infer.core.graphs import Graphs
from interactive_infer.core.kernels import triton_linear, triton_ops
from interactive_infer.core.kernels.launch import can_compile_ahead, compile_ahead, is_compiling_ahead
from interactive_infer.core.kernels.triton_reply import reply, write_clock
from interactive_infer.core.model_watch import ModelWatch
from interactive_infer.core.own_forward import OwnForward, PackedStep
from interactive_infer.core.pools import KVPools, LayerShape
from interactive_infer.core.sampler_triton import TritonSampler
from interactive_infer.core.sampling_packed import (
    Drawn,
    PackedBuffer,
    PackedInputs,
    PackedKey,
    PackedOutputs,
    TooShortError,
    padding,
)
from interactive_infer.core.sampling_table import LOGPROBS_ROOMS, SamplingTable
from interactive_infer.core.scheduler import Plan, Row
from interactive_infer.core.shapes import Shape, Shapes
from interactive_infer.core.staging import Layout, PageTables, exact_shape, fill
from interactive_infer.core.step import StepResult, below_min_tokens, keep_table, layers_in_words
from interactive_infer.core.step_memory import ENDED, CardMemory, FlightMemory, result_words
from interactive_infer.sampling import MAX_LOGPROBS
from interactive_infer.timeline.recorder import Phase, Recorder
from interactive_infer.waiting import Completion

_OPS = cast(
    Ops,
    SimpleNamespace(
        rms_norm=triton_ops.rms_norm,
        add_rms_norm=triton_ops.add_rms_norm,
        silu_mul=triton_ops.silu_mul,
        rope_store=triton_ops.rope_store,
        linear=triton_linear.linear,
        silu_mul_linear=triton_linear.silu_mul_linear,
    ),
)

_log = logging.getLogger(__name__)

_ROUND_S = 0.05
_SAMPLING_BYTES = 2 << 20
"""At least so much room for a step's sampling: one with hundreds of thousands of logit biases is sent on its own."""


class _ChangedError(Exception):
    """The model is not what is to be captured."""


class GraphRunner:
    """Puts planned steps on a card, most of them as replays of CUDA graphs.

    State on the card: one key and one value pool a layer, `[pages + 1, page_size, kv_heads, head_dim]` (page 0 is the
    null page); page tables and the last sampled token by slot; a step's inputs, logits and tokens; the sampler's state.
    All of it belongs to one stream, on which steps run in order. Each step in flight has pinned memory of its own.

    A graph is captured from a shape that has run once. `capture_all` does so for every shape that steps come in; what
    it was not asked for runs eagerly the first time, through the launch thread, and is captured on a thread meanwhile.
    No graph of a forward holds what its owner added to the model: while there is a hook none is captured or replayed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[nn.Module, int],
        shapes: list[LayerShape],
        device: CUDADevice,
        decoder: FusedDecoder | str,
        *,
        num_pages: int,
        page_size: int,
        max_length: int,
        max_batch_size: int,
        max_step_tokens: int,
        vocab_size: int,
        steps_in_flight: int,
        recorder: Recorder,
    ) -> None:
        self.page_size = page_size
        self._layers = layers
        self._device = device
        self._recorder = recorder
        self._own_watch = ModelWatch(model)
        self.decoder = decoder
        self._own_forward = OwnForward(model, layers)
        card = device.torch_device
        self._pools = KVPools(shapes, num_pages, page_size, model.dtype, card)
        self._tables = PageTables(max_batch_size, -(-max_length // page_size))
        self._page_table = torch.zeros((max_batch_size + 1, self._tables.width), dtype=torch.int32, device=card)
        self._last_token = torch.zeros(max_batch_size + 1, dtype=torch.int64, device=card)
        self._logits = torch.zeros((max_batch_size, vocab_size), dtype=model.dtype, device=card)
        self._table = SamplingTable(max_batch_size, vocab_size)
        self._sampler = TritonSampler(vocab_size, max_batch_size, card)
        self._shapes = Shapes(max_batch_size, max_step_tokens)
        self._layouts = {shape: self._layout(shape) for shape in self._shapes.all()}
        drawn = PackedKey(max_batch_size, logprobs=MAX_LOGPROBS).output_nbytes
        self._memory = CardMemory(self._layouts.values(), _SAMPLING_BYTES, drawn, card)
        self._flight_memories = [FlightMemory(self._memory) for _ in range(steps_in_flight)]
        self._next_memory = 0
        self._looked_at = 0.0
        self._graphs = Graphs(card)
        self._capturing = WorkThread(f"interactive_infer capture {card}")
        self._asked: set[Shape | PackedKey] = set()
        self._uncapturable: str | None = None
        self._closed = False

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key and value pools."""
        return self._pools.nbytes

    @property
    def attention(self) -> str:
        """How attention is computed, in words."""
        return "paged Triton kernels"

    def layers(self) -> str:
        """How layers are run, in words."""
        return layers_in_words(self.decoder)

    @property
    def _watch(self) -> ModelWatch | FusedDecoder:
        return self._own_watch if isinstance(self.decoder, str) else self.decoder

    def launches(self) -> str:
        """How steps are launched, in words."""
        if (change := self._watch.change()) is not None:
            return f"eager ({change})"
        if self._uncapturable is not None:
            return f"eager (its forward cannot be captured: {self._uncapturable})"
        return f"{len(self._graphs)} CUDA graphs"

    # -- a step ----------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Completion[StepResult]:
        """Put a step on the card; returns at once."""
        rows = plan.rows
        memory = self._flight_memories[self._next_memory]
        changed = self._changed()
        shape = exact_shape(plan)
        if not changed and self._uncapturable is None:
            shape = self._shapes.choose(shape)
        layout = self._layouts.get(shape) or self._layout(shape)
        leftover = fill(layout, memory.arrays(layout), rows, self._tables)
        histories = keep_table(self._table, rows)
        sampled = [index for index, row in enumerate(rows) if row.samples]
        key, large = self._pack_sampling([rows[index] for index in sampled], memory.sampling)
        captured = key is None or (key in self._graphs and large is None)
        replayed = not changed and shape in self._graphs and captured

        def work() -> Callable[[], StepResult]:
            memory.send(layout, key if large is None else None)
            sampling = self._memory.sampling
            if large is not None:
                sampling = torch.from_numpy(large).to(self._device.torch_device)
            if leftover[0]:
                self._change_page_table(*leftover)
            for slot, prompt, output in histories:
                self._sampler.load_history(slot, prompt, output)
            self._run(shape, lambda: self._forward(layout, changed), capture=not changed)
            if key is None:
                return lambda: StepResult([-1] * len(rows), [], {}, replayed)
            self._run(key, lambda: self._sample(key, sampling), capture=large is None)
            return lambda: _read(memory.drawn, key, sampled, len(rows), replayed)

        took = memory.took if replayed and key is not None else None
        self._next_memory = (self._next_memory + 1) % len(self._flight_memories)
        return self._device.submit(work, here=replayed and not leftover[0] and not histories, took=took)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them (masked keys still meet their values)."""

        def work() -> Callable[[], None]:
            self._pools.scrub(pages)
            return lambda: None

        self._device.submit(work)

    def _changed(self) -> bool:
        """Whether the model is not what was captured. Each step looks for hooks, and at as much of the rest (another
        module, another weight) as makes a whole round every 50 ms: after a pause at all of it."""
        now = time.monotonic()
        share, self._looked_at = (now - self._looked_at) / _ROUND_S, now
        return self._watch.look(share) is not None

    def _layout(self, shape: Shape) -> Layout:
        return Layout(shape, self.page_size, self._tables.num_slots, self._tables.width)

    def _pack_sampling(self, rows: list[Row], into: PackedBuffer) -> tuple[PackedKey | None, np.ndarray | None]:
        """The sampling of `rows` in their flight's buffer; or, if their logit bias does not fit, in one returned."""
        if not rows:
            return None, None
        slots = np.array([row.slot for row in rows], np.int64)
        positions = np.array([row.start + row.count for row in rows], np.int64)
        forbid_stop = None
        if any([row.sequence.params.min_tokens for row in rows]):
            forbid_stop = np.array([below_min_tokens(row) for row in rows], np.bool_)
            forbid_stop = forbid_stop if forbid_stop.any() else None
        padded = self._shapes.rows(len(rows))
        try:
            return self._table.pack(slots, positions, forbid_stop, padded, into), None
        except TooShortError:
            large = np.zeros(self._table.packed_nbytes(padded), np.uint8)
            return self._table.pack(slots, positions, forbid_stop, padded, PackedBuffer(large)), large

    def _change_page_table(self, at: list[int], to: list[int]) -> None:
        card = self._device.torch_device
        index, pages = torch.tensor(at, device=card), torch.tensor(to, dtype=torch.int32, device=card)
        self._page_table.view(-1).index_copy_(0, index, pages)

    def _run(self, key: Shape | PackedKey, work: Callable[[], object], *, capture: bool) -> None:
        """Replay the graph of `key`; without one launch `work`, and have it captured, if it may be."""
        if capture and key in self._graphs:
            self._graphs.replay(key)
            return
        with torch.no_grad():
            work()
        if capture and key not in self._asked and not (isinstance(key, Shape) and self._uncapturable is not None):
            self._asked.add(key)
            self._capturing.put(lambda: self._capture(key, work))

    @torch.no_grad()
    def _capture(self, key: Shape | PackedKey, work: Callable[[], object]) -> None:
        if self._closed:
            return
        forward = isinstance(key, Shape)

        def look() -> None:
            if forward and (change := self._watch.change()) is not None:
                raise _ChangedError(change)

        def look_work_look() -> None:  # its owner may add a hook at any moment
            look()
            if forward:
                write_clock(self._memory.begun)
            work()
            look()

        try:
            with self._recorder.span(Phase.CAPTURE):
                self._graphs.capture(key, look_work_look, uses_blas=forward)
        except Exception as error:
            if forward and (isinstance(error, _ChangedError) or self._watch.change() is not None):
                self._asked.discard(key)  # a step asks again once the model is what it was
                return
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'it says no more')}"
            if forward and not any(shape in self._graphs for shape in self._layouts):
                self._uncapturable = why
                warnings.warn(
                    f"the model's forward cannot be captured in a CUDA graph ({why}): steps are launched one kernel at "
                    "a time, which is several times slower than this card could be",
                    stacklevel=2,
                )
            else:  # this one alone
                _log.warning("steps of %s are launched kernel by kernel, their capture failed: %s", key, why)

    @torch.no_grad()
    def _forward(self, layout: Layout, by_modules: bool) -> None:
        """The forward of the step whose inputs are on the card; the first rows of the logits are those wanted."""
        sections = layout.tensors(self._memory.inputs(layout))
        table = self._page_table
        table.view(-1).index_copy_(0, sections["update_at"], sections["update_to"].to(torch.int32))
        source = sections["source"]
        input_ids = torch.where(source >= 0, self._last_token[source.clamp(min=0)], sections["ids"])
        batch = layout.batch(sections, table)
        wanted = self._logits_of(input_ids, batch, sections["logits_at"], by_modules)
        if layout.shape.samples:
            self._logits[: layout.shape.samples].copy_(wanted)

    def _logits_of(
        self, input_ids: torch.Tensor, batch: StepBatch, logits_at: torch.Tensor, by_modules: bool
    ) -> torch.Tensor:
        """Logits `[len(logits_at), vocab_size]` of a packed batch; of a chunk that samples nothing, nothing of use."""
        if not isinstance(self.decoder, str) and not by_modules:

            def attend(
                _: int,
                query: torch.Tensor,
                keys: torch.Tensor,
                values: torch.Tensor,
                *,
                scaling: float,
                sliding_window: int | None,
            ) -> torch.Tensor:
                return paged_attention(
                    query,
                    keys,
                    values,
                    batch,
                    scaling=scaling,
                    sliding_window=sliding_window,
                    softcap=None,
                    sinks=None,
                )

            hidden = self.decoder.hidden(
                input_ids,
                batch.positions,
                batch.write_to,
                self._pools.layers,
                attend,
                _OPS,
                one_of_each=is_compiling_ahead(),
            )
            rows = hidden.index_select(0, logits_at)
            return self.decoder.logits(rows, _OPS) if len(rows) else rows
        step = PackedStep(
            self._layers,
            self._pools.layers,
            partial(triton_ops.store, write_to=batch.write_to),
            partial(paged_attention, batch=batch),
        )
        return self._own_forward(step, input_ids, batch.positions, logits_at)

    def _sample(self, key: PackedKey, inputs: torch.Tensor) -> None:
        self._sampler(
            self._logits[: key.rows],
            PackedInputs.views(inputs, key),
            PackedOutputs.views(self._memory.drawn, key),
            self._last_token,
        )
        reply(self._memory.result, self._memory.reply_to, result_words(key), clock_at=ENDED)

    # -- before the first and after the last step ------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: np.ndarray,
        write_to: np.ndarray,
        spans: list[RowSpan],
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[len(logits_at), vocab_size]` of a packed batch, on this thread; as `Runner.forward`."""
        card = self._device.torch_device
        decodes = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
        # As wide as the longest: the check at load time has longer texts than the smallest caches admit.
        table = np.zeros((len(spans), max(len(span.pages) for span in spans)), np.int32)
        for row, span in enumerate(spans):
            table[row, : len(span.pages)] = span.pages
        ends = [span.first + span.count for span in spans[decodes:]]
        batch = StepBatch(
            num_decodes=decodes,
            positions=torch.from_numpy(positions).to(card),
            write_to=torch.from_numpy(write_to).to(card),
            query_start=torch.tensor([decodes, *ends], device=card),
            kv_len=torch.tensor([span.start + span.count for span in spans], device=card),
            row_slot=torch.arange(len(spans), device=card),
            page_table=torch.from_numpy(table).to(card),
            page_size=self.page_size,
        )
        with torch.cuda.device(card):  # Triton launches on the current one
            return self._logits_of(input_ids, batch, logits_at, False)

    @torch.no_grad()
    def compile_ahead(self, check: Callable[[], object], begin: Callable[[], object]) -> None:
        """Compile and load what `check` and `capture_all` will launch, many kernels at a time; calls `begin` before,
        unless nothing can be compiled ahead.

        Runs a layer of each kind with kernels that write nothing. Only of the fused forward: a model's own modules,
        which may look at what they get (and hooks, which must not see this), are left alone, and compile as they go.
        """
        if isinstance(self.decoder, str) or self.decoder.change() is not None or not can_compile_ahead():
            return

        def launch_all() -> None:
            check()
            for _, work in self._works():
                work()

        begin()
        card = self._device.torch_device
        with torch.cuda.device(card), torch.cuda.stream(self._device.stream):
            compile_ahead(card, launch_all)

    @torch.no_grad()
    def capture_all(self, progress: Callable[[float], None]) -> None:
        """Run each shape once, without a row, and capture it; then the usual kinds of sampling. Before the first step.

        A model that cannot be captured is found out at the first shape, and warned of. One with a hook is not captured
        here, nor does the hook see padding: steps have their shapes captured once it is gone.
        """
        done = 0
        with torch.cuda.device(self._device.torch_device), torch.cuda.stream(self._device.stream):
            for key, work in self._works():
                if isinstance(key, Shape):
                    done += 1
                    if self._uncapturable is not None or self._watch.change() is not None:
                        continue
                work()
                torch.cuda.current_stream().synchronize()
                if key is not None:
                    self._asked.add(key)
                    self._capture(key, work)
                progress(done / (len(self._layouts) + 1))
        progress(1.0)

    def _works(self) -> Iterator[tuple[Shape | PackedKey | None, Callable[[], object]]]:
        """What is run and, under its key, captured before the first step: each shape of a forward, without a row, then
        the usual kinds of sampling, of padding. Each with its inputs on the card until the next is asked for.

        The clock's reading and log-probabilities have no key: they are run only, so that their first use does not wait
        for a compiler. Those of penalties and bias would take memory for good, `[max_batch_size, vocab_size]` twice,
        from engines that never have any.
        """
        yield None, partial(write_clock, self._memory.begun)
        for shape in self._shapes.all():
            layout = self._layouts[shape]
            self._memory.inputs(layout).copy_(torch.from_numpy(layout.padding))
            yield shape, partial(self._forward, layout, False)
        kinds = [
            PackedKey(shape.decodes, all_greedy=greedy, filtered=filtered)
            for shape in self._shapes.all()
            if not shape.chunks
            for greedy, filtered in ((True, False), (False, False), (False, True))
        ]
        with_logprobs = [
            PackedKey(1, filtered=filtered, logprobs=room) for filtered, room in product((False, True), LOGPROBS_ROOMS)
        ]
        for key in kinds + with_logprobs:
            sampling = self._memory.sampling
            sampling[: key.input_nbytes].copy_(torch.from_numpy(padding(key, self._tables.num_slots)))
            yield key if key.logprobs is None else None, partial(self._sample, key, sampling)

    def close(self) -> None:
        """Let go of model, pools, graphs and state; nothing may be in flight."""
        self._closed = True
        self._capturing.close()
        with contextlib.suppress(torch.AcceleratorError):
            self._device.stream.synchronize()  # a loop that was closed left steps in flight, which write to their host
        if self._device.lost:
            # torch records an event when it frees pinned memory, and ends the process where that fails.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._flight_memories))
        self._graphs.clear()
        del self.decoder, self._own_watch, self._own_forward, self._sampler, self._flight_memories
        del self._page_table, self._last_token, self._logits, self._memory
        self._pools.free()
        self._layers = {}


def _read(host: np.ndarray, key: PackedKey, sampled: list[int], num_rows: int, graph: bool) -> StepResult:
    """The result of a step of `num_rows` rows, of which `sampled` drew a token."""
    drawn = Drawn.read(host, key, len(sampled))
    tokens = drawn.token_ids.tolist()
    if len(sampled) < num_rows:
        spread = [-1] * num_rows
        for row, token_id in zip(sampled, tokens, strict=True):
            spread[row] = token_id
        tokens = spread
    logprobs = {sampled[index]: value for index, value in drawn.logprobs.items()}
    return StepResult(tokens, [sampled[index] for index in drawn.invalid], logprobs, graph)
