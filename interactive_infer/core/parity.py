"""The check at load time that a model gives the same logits packed and paged as it does alone.

Models are transformers' own and only attention is ours, so nearly every decoder works unseen. What would not is
refused here, by name and reason, instead of writing wrong text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from interactive_infer.core.attention.interface import running, windows_up_to
from interactive_infer.core.attention.sdpa import RowSpan
from interactive_infer.core.pools import LayerShape
from interactive_infer.core.rope import fixed_rope
from interactive_infer.core.step import StepRunner
from interactive_infer.errors import UnsupportedModelError

# A window must be shorter than the check's texts to be seen at all; longer ones are cut to this by the check.
_WINDOW = 8
# Three texts of unequal length, fed in three steps: whole, chunked with context before, and one token at a time.
_STEPS = (((0, 0, 10), (1, 0, 17), (2, 0, 5)), ((0, 10, 11), (1, 17, 29), (2, 5, 6)), ((2, 6, 21),))
_LENGTHS = (11, 29, 21)
# Mean over positions of |ours - reference| / |reference|, by the dtype's rounding. A wrong mask or position makes
# it 0.1 to 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 0.03, torch.bfloat16: 0.1}


class _Probe:
    """Attends to nothing, and notes which modules call the attention function and with what."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, int] = {}
        self.shapes: list[LayerShape] = []
        self.refusal: str | None = None

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        if module in self.layers:
            self.refusal = "an attention layer is called more than once in a forward pass"
        if key.shape[-1] != value.shape[-1]:
            self.refusal = f"its keys and values have different head sizes ({key.shape[-1]} and {value.shape[-1]})"
        if kwargs.get("position_bias") is not None:
            self.refusal = "its attention adds a learned position bias"
        self.layers[module] = len(self.shapes)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3]))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))


@torch.no_grad()
def find_layers(model: PreTrainedModel) -> tuple[dict[nn.Module, int], list[LayerShape]]:
    """The model's attention modules, numbered in the order they run, and their shapes; or UnsupportedModelError."""
    probe = _Probe()
    input_ids = torch.zeros((1, 4), dtype=torch.int64, device=model.device)
    try:
        with running(probe):
            model(
                input_ids=input_ids,
                position_ids=torch.arange(4, device=model.device)[None],
                attention_mask=torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=model.device),
                use_cache=False,
            )
    except Exception as error:
        if not probe.layers:
            raise _refuse(model, f"its forward does not take packed texts ({type(error).__name__}: {error})") from error
        if probe.refusal is None:
            raise _refuse(model, f"its forward failed: {type(error).__name__}: {error}") from error
    if probe.refusal is not None:
        raise _refuse(model, probe.refusal)
    expected = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise _refuse(
            model,
            "its attention ignores transformers' AttentionInterface (models with ALiBi, with recurrent state and "
            "some older ones do)",
        )
    if len(probe.layers) < expected:
        raise _refuse(
            model,
            f"only {len(probe.layers)} of its {expected} layers attend; the others keep a recurrent state, which "
            "cannot be paged",
        )
    return probe.layers, probe.shapes


def pages_for_check(page_size: int) -> int:
    """Pages that `check_parity` uses."""
    return len(_LENGTHS) * -(-max(_LENGTHS) // page_size)


@torch.no_grad()
def check_parity(model: PreTrainedModel, runner: StepRunner, page_size: int, vocab_size: int) -> float:
    """Compare packed, paged logits with the model's plain forward; returns the mean relative error.

    Uses the runner's first pages, so nothing else may run. Raises UnsupportedModelError when they differ.
    """
    texts = _texts(model, vocab_size)
    with windows_up_to(_WINDOW):
        with fixed_rope():
            reference = [model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        if any(logits.isnan().any() for logits in reference):
            raise _refuse(
                model,
                f"its own logits hold NaN in {str(model.dtype).removeprefix('torch.')} (a damaged file, or float16 "
                "overflow: then load it with dtype='bfloat16' or 'float32')",
            )
        ours = [torch.empty_like(logits) for logits in reference]
        for text, start, stop, logits in _packed_logits(texts, runner, page_size):
            ours[text][start:stop] = logits.float()
    errors = torch.cat(
        [(a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30) for a, b in zip(ours, reference, strict=True)]
    )
    error = float(errors.mean())
    if not error <= _TOLERANCE.get(model.dtype, 0.1):  # NaN is refused too
        raise _refuse(
            model,
            f"packed and paged, its logits differ from its own forward by {error:.1%} on average; something in it "
            "looks beyond one text, or at positions in a way that paging does not keep (ALiBi, recurrent state, a mask "
            "of its own)",
        )
    return error


def rehearse_check(model: PreTrainedModel, runner: StepRunner, page_size: int, vocab_size: int) -> None:
    """The packed half of `check_parity`, whose results nobody looks at."""
    with windows_up_to(_WINDOW):
        for _ in _packed_logits(_texts(model, vocab_size), runner, page_size):
            pass


def _texts(model: PreTrainedModel, vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).to(model.device) for length in _LENGTHS]


def _packed_logits(
    texts: list[torch.Tensor], runner: StepRunner, page_size: int
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Logits of texts in packed steps, as (text, from, to, `[to - from, vocab_size]`)."""
    pages_each = pages_for_check(page_size) // len(_LENGTHS)
    tables = [list(range(1 + i * pages_each, 1 + (i + 1) * pages_each)) for i in range(len(texts))]
    for step in _STEPS:
        spans, write_to, positions, first = [], [], [], 0
        for text, start, stop in step:
            spans.append(RowSpan(first, stop - start, start, tables[text][: -(-stop // page_size)]))
            position = np.arange(start, stop)
            positions.append(position)
            write_to.append(np.array(tables[text])[position // page_size] * page_size + position % page_size)
            first += stop - start
        input_ids = torch.cat([texts[text][start:stop] for text, start, stop in step])
        logits = runner.forward(
            input_ids,
            np.concatenate(positions),
            np.concatenate(write_to),
            spans,
            torch.arange(first, device=input_ids.device),
        )
        for span, (text, start, stop) in zip(spans, step, strict=True):
            yield text, start, stop, logits[span.first : span.first + span.count]


def _refuse(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model.config.model_type!r} cannot run here: {reason}. Use model.generate for it"
    )
