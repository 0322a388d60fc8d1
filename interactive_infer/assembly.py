"""From a model to the parts of an engine, put together and checked."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import attach
from interactive_infer.core.decoder import FusedDecoder, WeightLayout, fuse
from interactive_infer.core.device import CPUDevice
from interactive_infer.core.flight import FlightQueue
from interactive_infer.core.kv_cache import KVCache
from interactive_infer.core.loader import LoadedModel, load_model
from interactive_infer.core.packing import forget_packed, pack_linears
from interactive_infer.core.parity import check_parity, find_layers, pages_for_check, rehearse_check
from interactive_infer.core.pools import LayerShape
from interactive_infer.core.rope import fix_rope
from interactive_infer.core.runner import Runner
from interactive_infer.core.scheduler import Scheduler
from interactive_infer.core.step import StepRunner
from interactive_infer.errors import InvalidRequestError, UnsupportedModelError
from interactive_infer.info import EngineInfo
from interactive_infer.options import EngineOptions
from interactive_infer.prompts import Prompts
from interactive_infer.timeline import Timeline
from interactive_infer.timeline.recorder import CPU, Phase, Recorder

if TYPE_CHECKING:
    from interactive_infer.core.cuda import CUDADevice

_CPU_CACHE_BYTES = 1 << 30
_CPU_CACHE_TOKENS = 32_768
_CUDA_CACHE_SHARE = 0.3
"""Of the memory that is free once the model is there, what the KV cache takes: the rest is the user's."""


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What options are where the caller says nothing, by kind of device."""

    page_size: int
    max_batch_size: int
    max_step_tokens: int


_DEFAULTS = {"cpu": _Defaults(16, 64, 256), "cuda": _Defaults(64, 256, 2048)}


_live: weakref.WeakSet[Parts] = weakref.WeakSet()
"""Of this process: who may hold the memory that somebody else lacks."""


class Parts:
    """A model made ready, and what runs it. `close` undoes all of it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        options: EngineOptions,
        undo: list[Callable[[], None]],
        progress: Callable[[str, float], None],
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.name = loaded.name
        self.owned = loaded.owned
        self.eos_token_ids = loaded.eos_token_ids
        self._undo = undo
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        layers, shapes = find_layers(self.model)
        kind = _kind_of_device(self.model)
        defaults = _DEFAULTS[kind]
        self.page_size: int = options.page_size or defaults.page_size
        # Models without a limit of their own (None) are limited by the cache alone.
        context = getattr(config, "max_position_embeddings", None)
        tokens = options.kv_cache_tokens or _default_tokens(shapes, self.model)
        num_pages = max(tokens // self.page_size, 1)
        self.kv_cache_tokens = num_pages * self.page_size
        self.context_length: int = context or self.kv_cache_tokens
        self.max_length = min(self.context_length, self.kv_cache_tokens)
        self.prompts = Prompts(
            self.tokenizer,
            loaded.tokenizer_problem,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            limits=f"the model's context is {self.context_length:,} tokens, the KV cache holds "
            f"{self.kv_cache_tokens:,}",
        )
        self._undo.append(fix_rope(self.model, self.max_length))
        self.max_batch_size: int = options.max_batch_size or defaults.max_batch_size
        self.max_step_tokens: int = options.max_step_tokens or defaults.max_step_tokens
        self.steps_in_flight: int = options.steps_in_flight
        self._waiting = options.waiting
        index = CPU if kind == "cpu" else self.model.device.index or 0
        self.timeline = Timeline(Recorder(device=index), device="CPU device" if kind == "cpu" else "GPU")
        prepare: Callable[[Callable[[float], None]], None] | None
        if kind == "cuda":
            self._undo.append(_capturable_experts(self.model))
        self.device: CPUDevice | CUDADevice
        self.runner, prepare = self._on_device(
            layers, shapes, max(num_pages, pages_for_check(self.page_size)), progress
        )
        self.parity_error = self._check()
        if prepare is not None:
            prepare(lambda done: progress("capturing", done))
        self.timeline.clock = self.device.clock
        self._undo.append(self.timeline.recorder.watch_gc().close)
        self.cache = KVCache(num_pages, self.page_size)
        self.scheduler = Scheduler(self.cache, max_batch_size=self.max_batch_size, max_step_tokens=self.max_step_tokens)
        self.flights = FlightQueue(
            self.scheduler, self.runner, self.timeline.recorder, max_in_flight=self.steps_in_flight
        )

    def _on_device(
        self,
        layers: dict[nn.Module, int],
        shapes: list[LayerShape],
        num_pages: int,
        progress: Callable[[str, float], None],
    ) -> tuple[StepRunner, Callable[[Callable[[float], None]], None] | None]:
        """The runner that suits the device, and what that has to do before the first step, if anything."""
        place = self.model.device
        device: CPUDevice | CUDADevice
        if _kind_of_device(self.model) == "cpu":
            self.device = device = CPUDevice()
            decoder = self._fused(layers, "packed" if self.owned else "as they are")
            if isinstance(decoder, str) and self.owned:
                self._undo.append(pack_linears(self.model))
        else:
            from interactive_infer.core.cuda import CUDADevice, missing_for_kernels

            self.device = device = CUDADevice(place, self._waiting)
            self._undo.append(device.give_back)  # last: its runner waits for what is on its streams
            missing = missing_for_kernels(place)
            if missing is None:
                from interactive_infer.core.graph_runner import GraphRunner

                decoder = self._fused(layers, "joined")
                self._undo.append(device.close)
                runner = GraphRunner(
                    self.model,
                    layers,
                    shapes,
                    device,
                    decoder,
                    num_pages=num_pages,
                    page_size=self.page_size,
                    max_length=self.max_length,
                    max_batch_size=self.max_batch_size,
                    max_step_tokens=self.max_step_tokens,
                    vocab_size=self.vocab_size,
                    steps_in_flight=self.steps_in_flight,
                    recorder=self.timeline.recorder,
                )
                self._undo.insert(-1, runner.close)  # after the device's end, and before the decoder's
                rehearse = partial(rehearse_check, self.model, runner, self.page_size, self.vocab_size)
                runner.compile_ahead(rehearse, partial(progress, "compiling kernels", 0.0))
                progress("checking", 0.0)
                return runner, runner.capture_all
            warnings.warn(
                f"{missing}: attention gathers pages and steps are launched one kernel at a time, which is several "
                "times slower than this card could be",
                stacklevel=2,
            )
            decoder = self._fused(layers, "joined")
        self._undo.append(device.close)
        gathering = Runner(
            self.model,
            layers,
            shapes,
            device,
            decoder,
            num_pages=num_pages,
            page_size=self.page_size,
            max_batch_size=self.max_batch_size,
            vocab_size=self.vocab_size,
        )
        self._undo.insert(-1, gathering.close)
        return gathering, None

    def _fused(self, attentions: dict[nn.Module, int], layout: WeightLayout) -> FusedDecoder | str:
        """The model's fused forward, or why it has none."""
        decoder = fuse(self.model, attentions, max_length=self.max_length, layout=layout)
        if isinstance(decoder, FusedDecoder):
            self._undo.append(lambda: None if self.device.lost else decoder.undo())
        return decoder

    def _check(self) -> float:
        """The check at load time; where the fused forward fails it, the model's own has another try."""
        try:
            return check_parity(self.model, self.runner, self.page_size, self.vocab_size)
        except UnsupportedModelError as error:
            if isinstance(self.runner.decoder, str):
                raise
            self.runner.decoder = f"fused, {error}"
            return check_parity(self.model, self.runner, self.page_size, self.vocab_size)

    @property
    def weights_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters()) + sum(b.nbytes for b in self.model.buffers())

    def weights_changed(self) -> None:
        """Forget what was computed from the weights: reusable pages, packed copies."""
        self.cache.clear()
        forget_packed(self.model)
        if not isinstance(self.runner.decoder, str):
            self.runner.decoder.forget_copies()

    def info(self, waiting: str) -> EngineInfo:
        scheduler = self.scheduler
        return EngineInfo(
            model=self.name,
            model_type=self.model.config.model_type,
            device=str(self.device.torch_device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            attention=self.runner.attention,
            layers=self.runner.layers(),
            launches=self.runner.launches(),
            weights_bytes=self.weights_bytes,
            kv_cache_tokens=self.kv_cache_tokens,
            kv_cache_bytes=self.runner.cache_bytes,
            page_size=self.page_size,
            max_length=self.max_length,
            max_batch_size=self.max_batch_size,
            max_step_tokens=self.max_step_tokens,
            waiting=waiting,
            steps_in_flight=self.steps_in_flight,
            parity_error=self.parity_error,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_paused=len(scheduler.paused),
            kv_tokens_in_use=self.cache.num_held * self.page_size,
        )

    def close(self) -> int:
        """Stop the device's thread, give the model back to its owner, free the cache; returns the bytes freed."""
        freed = self.runner.cache_bytes + (self.weights_bytes if self.owned else 0)
        place = self.device.torch_device
        undo, self._undo = self._undo, []
        try:
            _undo_all(undo)
        finally:
            del self.model
            _live.discard(self)
        if place.type == "cpu":
            _give_back_to_system()
        elif not self.device.lost:
            torch.cuda.synchronize(place)
            torch.cuda.empty_cache()
        return freed


def assemble(
    source: Any,
    *,
    tokenizer: Any,
    device: Any,
    dtype: Any,
    progress: Callable[[str, float], None],
    options: EngineOptions,
) -> Parts:
    """Load `source` and put an engine's parts together; runs on a worker thread."""
    start = time.perf_counter_ns()
    loaded = load_model(source, tokenizer=tokenizer, device=device, dtype=dtype, progress=progress)
    progress("checking", 0.0)
    undo: list[Callable[[], None]] = [_in_eval_mode(loaded.model), attach(loaded.model)]
    try:
        parts = Parts(loaded, options=options, undo=undo, progress=progress)
    except BaseException as error:
        _undo_all(undo)
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        place = loaded.model.device
        # Whoever keeps the error (IPython does) would keep the model, and the next try would find less room.
        traceback.clear_frames(error.__traceback__)
        del loaded, undo
        raise _too_large(options.kv_cache_tokens, place, error) from error
    _live.add(parts)
    parts.timeline.recorder.record(Phase.LOAD, start, time.perf_counter_ns(), name=parts.name)
    progress("checking", 1.0)
    return parts


def _give_back_to_system() -> None:
    """Have the C library return what was freed: glibc keeps it, hundreds of megabytes of a model's, for the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _undo_all(undo: list[Callable[[], None]]) -> None:
    """The last first, and all of them: what one raises is raised at the end."""
    with contextlib.ExitStack() as stack:
        for step in undo:
            stack.callback(step)
    undo.clear()


def _too_large(tokens: int | None, place: torch.device, error: BaseException) -> InvalidRequestError:
    """What is said when there is no room for the engine: the numbers, who has the memory, what to change."""
    why = str(error).split(". ")[0]
    if place.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(place)
        why = f"{place} has {free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB ({why})"
    others = [
        f"{parts.name} ({(parts.weights_bytes + parts.runner.cache_bytes) / 2**30:.1f} GiB)"
        for parts in list(_live)
        if parts.device.torch_device == place
    ]
    holders = f"; other engines here: {', '.join(others)}, close those you do not need" if others else ""
    return InvalidRequestError(
        "kv_cache_tokens", tokens, f"does not fit into memory: {why}{holders}; or give a smaller one"
    )


def _capturable_experts(model: PreTrainedModel) -> Callable[[], None]:
    """Have a mixture of experts compute them in groups, not in a loop over those that got tokens, which would wait for
    the card; returns the function that puts the owner's way back."""
    config: Any = model.config.get_text_config()
    if getattr(config, "_experts_implementation", None) != "eager":
        return lambda: None
    config._experts_implementation = "grouped_mm"

    def undo() -> None:
        config._experts_implementation = "eager"

    return undo


def _in_eval_mode(model: PreTrainedModel) -> Callable[[], None]:
    """Switch dropout and the like off; returns the function that puts an owner's training mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()

    def undo() -> None:
        for module in training:
            module.training = True

    return undo


def _kind_of_device(model: PreTrainedModel) -> str:
    return model.device.type


def _default_tokens(shapes: list[LayerShape], model: PreTrainedModel) -> int:
    """Tokens of the default KV cache. On a CPU 32,768, or what fits in 1 GiB if that is less; on a card what fits in
    three tenths of the memory that is free now."""
    per_token = sum(2 * shape.kv_heads * shape.head_dim for shape in shapes) * model.dtype.itemsize
    if _kind_of_device(model) == "cpu":
        return min(_CPU_CACHE_TOKENS, _CPU_CACHE_BYTES // per_token)
    return int(torch.cuda.mem_get_info(model.device)[0] * _CUDA_CACHE_SHARE) // per_token
