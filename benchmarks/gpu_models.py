"""Qwen3 shapes with random weights, made on the card in a moment: nothing is downloaded, and speed asks for no more.

A step takes the same time whatever the weights are. There is no tokenizer: prompts are lists of token ids.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # Says nothing about speed: only that the scripts run.
    "tiny": {
        **_QWEN3,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def make(shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model of one of SHAPES on `device`, its matrices normal with a standard deviation of 0.02, its norms one."""
    config = Qwen3Config(**SHAPES[shape], eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(device), no_init_weights():
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids, no two alike."""
    draw = random.Random(f"{seed} {length}")
    return [[draw.randrange(1, vocab_size) for _ in range(length)] for _ in range(count)]


def step_bytes(model: PreTrainedModel, batch: int, context: int) -> int:
    """What a decode step has to read: every weight once, and the keys and values of `batch` texts of `context` tokens.

    Of an embedding table that is not the output matrix too, only the batch's rows are read: it is left out.
    """
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return weights + batch * context * per_token


@contextmanager
def on_disk(model: PreTrainedModel) -> Iterator[Path]:
    """`model` as a folder of safetensors with a tokenizer of a few words, deleted at the end. The files are in the
    system's cache afterwards if memory suffices."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"<unk>": 0, "once": 1, "upon": 2, "a": 3, "time": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    folder = Path(tempfile.mkdtemp(prefix="interactive_infer_benchmark_"))
    try:
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
        yield folder
    finally:
        shutil.rmtree(folder)
