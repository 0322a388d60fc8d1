"""What `Engine.info()` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What `Engine.info()` shows. Sizes are in bytes, the KV cache's capacity in tokens."""

    model: str
    model_type: str
    device: str
    dtype: str
    attention: str
    layers: str
    launches: str
    weights_bytes: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    page_size: int
    max_length: int
    max_batch_size: int
    max_step_tokens: int
    waiting: str
    steps_in_flight: int
    parity_error: float
    num_waiting: int
    num_running: int
    num_paused: int
    kv_tokens_in_use: int

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As a cell's last line."""
        printer.text(str(self))

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.model_type}, {self.dtype}, {self.device}): "
            f"weights {self.weights_bytes / 1e6:,.0f} MB; "
            f"KV cache {self.kv_cache_tokens:,} tokens ({self.kv_cache_bytes / 1e6:,.0f} MB), "
            f"{self.kv_tokens_in_use:,} in use; texts up to {self.max_length:,} tokens; "
            f"{self.num_running} running, {self.num_waiting} waiting, {self.num_paused} paused; "
            f"attention: {self.attention}; layers: {self.layers}; launches: {self.launches}; "
            f"packed logits within {self.parity_error:.1e} of the model's own"
        )
