"""From a model to the parts of an engine, put together and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import attach
from interactive_infer.core.device import CPUDevice
from interactive_infer.core.flight import FlightQueue
from interactive_infer.core.kv_cache import KVCache
from interactive_infer.core.loader import LoadedModel, load_model
from interactive_infer.core.packing import pack_linears
from interactive_infer.core.parity import check_parity, find_layers, pages_for_check
from interactive_infer.core.rope import fix_rope
from interactive_infer.core.runner import LayerShape, Runner
from interactive_infer.core.scheduler import Scheduler
from interactive_infer.errors import InvalidRequestError
from interactive_infer.info import EngineInfo
from interactive_infer.prompts import Prompts
from interactive_infer.timeline import Timeline

_DEFAULT_CACHE_BYTES = 1 << 30
_DEFAULT_CACHE_TOKENS = 32_768


class Parts:
    """A model made ready, and what runs it. `close` undoes all of it."""

    def __init__(self, loaded: LoadedModel, *, options: dict[str, Any], undo: list[Callable[[], None]]) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.name = loaded.name
        self.owned = loaded.owned
        self.eos_token_ids = loaded.eos_token_ids
        self._undo = undo
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        layers, shapes = find_layers(self.model)
        self.page_size: int = options["page_size"]
        # Models without a limit of their own (None) are limited by the cache alone.
        context = getattr(config, "max_position_embeddings", None)
        tokens = options["kv_cache_tokens"] or _default_tokens(shapes, self.model.dtype)
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
        self.max_batch_size: int = options["max_batch_size"] or 64
        self.max_step_tokens: int = options["max_step_tokens"] or 256
        self.steps_in_flight: int = options["steps_in_flight"]
        if self.owned:
            self._undo.append(pack_linears(self.model))
        self.device = CPUDevice()
        self._undo.append(self.device.close)
        self.runner = Runner(
            self.model,
            layers,
            shapes,
            self.device,
            num_pages=max(num_pages, pages_for_check(self.page_size)),
            page_size=self.page_size,
            max_batch_size=self.max_batch_size,
            vocab_size=self.vocab_size,
        )
        self.parity_error = check_parity(self.model, self.runner, self.page_size, self.vocab_size)
        self.timeline = Timeline(device="CPU device")
        self._undo.append(self.timeline.recorder.watch_gc().close)
        self.cache = KVCache(num_pages, self.page_size)
        self.scheduler = Scheduler(self.cache, max_batch_size=self.max_batch_size, max_step_tokens=self.max_step_tokens)
        self.flights = FlightQueue(
            self.scheduler, self.runner, self.timeline.recorder, max_in_flight=self.steps_in_flight
        )

    @property
    def weights_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters()) + sum(b.nbytes for b in self.model.buffers())

    def info(self, waiting: str) -> EngineInfo:
        scheduler = self.scheduler
        return EngineInfo(
            model=self.name,
            model_type=self.model.config.model_type,
            device=str(self.device.torch_device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            attention="pages gathered, scaled_dot_product_attention",
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
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.runner.close()
        del self.model
        return freed


def assemble(
    source: Any,
    *,
    tokenizer: Any,
    device: Any,
    dtype: Any,
    progress: Callable[[str, float], None],
    **options: Any,
) -> Parts:
    """Load `source` and put an engine's parts together; runs on a worker thread."""
    loaded = load_model(source, tokenizer=tokenizer, device=device, dtype=dtype, progress=progress)
    if loaded.model.device.type != "cpu":
        raise InvalidRequestError("device", str(loaded.model.device), 'only "cpu" can run for now')
    progress("checking", 0.0)
    undo: list[Callable[[], None]] = [_in_eval_mode(loaded.model), attach(loaded.model)]
    try:
        parts = Parts(loaded, options=options, undo=undo)
    except BaseException as error:
        for step in reversed(undo):
            step()
        if isinstance(error, MemoryError):
            tokens = options["kv_cache_tokens"]
            raise InvalidRequestError("kv_cache_tokens", tokens, f"does not fit into memory: {error}") from error
        raise
    progress("checking", 1.0)
    return parts


def _in_eval_mode(model: PreTrainedModel) -> Callable[[], None]:
    """Switch dropout and the like off; returns the function that puts an owner's training mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()

    def undo() -> None:
        for module in training:
            module.training = True

    return undo


def _default_tokens(shapes: list[LayerShape], dtype: torch.dtype) -> int:
    """Tokens of the default KV cache: 32,768, or what fits in 1 GiB if that is less."""
    per_token = sum(2 * shape.kv_heads * shape.head_dim for shape in shapes) * dtype.itemsize
    return min(_DEFAULT_CACHE_TOKENS, _DEFAULT_CACHE_BYTES // per_token)
