"""A model folder as `save_pretrained` writes it: config.json, weights, tokenizer.

Each part is looked for before transformers is asked to read it, so that what is missing is named with its
folder and the remedy; what transformers raises on damaged files is chained to one `ModelLoadError`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from .quiet import Progress, quietly

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)


def read_config(folder: Path, name: str) -> Any:
    """The configuration of a causal language model. `name` is what the user called the model."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = content["model_type"]
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"model={name!r}: there is no config.json in {folder}. A model folder holds config.json, the "
            "weights (*.safetensors) and the tokenizer, as save_pretrained() of each writes them."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"model={name!r}: {path} is no model configuration ({type(error).__name__}: {error}). Replace the file."
        ) from error
    if kind not in CONFIG_MAPPING:
        remedy = (
            "It needs code of its own: load it with trust_remote_code=True yourself and give the object."
            if "auto_map" in content
            else "A newer transformers may know it."
        )
        raise UnsupportedModelError(
            f"model={name!r}: transformers {__version__} does not know the model type {kind!r}. {remedy}"
        )
    try:
        with quietly("finding", lambda stage, done: None):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"model={name!r}: {path} cannot be used ({_first_line(error)}).") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"model={name!r}: the model type {kind!r} is not a causal language model; it cannot continue a text."
        )
    return config


def check_weights(folder: Path, name: str) -> None:
    """Raise ModelNotFoundError unless every file of weights is there."""
    present = [file for file in _WEIGHTS if (folder / file).is_file()]
    if not present:
        raise ModelNotFoundError(
            f"model={name!r}: there are no weights in {folder} (looked for {', '.join(_WEIGHTS)}). "
            "Copy or download them there."
        )
    index = folder / present[0]
    if index.suffix != ".json":
        return
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"model={name!r}: {index} is no index of weights ({error}). Replace the file.") from error
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ModelNotFoundError(
            f"model={name!r}: {len(absent)} of {len(shards)} weight files are missing in {folder}: "
            f"{', '.join(absent[:3])}{', ...' * (len(absent) > 3)}. Download them again."
        )


def read_weights(folder: Path, name: str, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    """The model in `dtype` on the CPU, with every weight from the checkpoint."""
    from transformers import AutoModelForCausalLM

    progress("loading weights", 0.0)
    with quietly("loading weights", progress):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except Exception as error:
            raise ModelLoadError(
                f"model={name!r}: the weights in {folder} cannot be loaded ({_first_line(error)}). "
                "A file may be truncated or damaged: download it again."
            ) from error
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lacking:  # transformers would only warn, and compute with random weights
        raise ModelLoadError(
            f"model={name!r}: the checkpoint in {folder} lacks {len(lacking)} weights of the model, or has "
            f"them in another shape ({', '.join(lacking[:3])}{', ...' * (len(lacking) > 3)}). It belongs to "
            "another config.json, or is incomplete."
        )
    progress("loading weights", 1.0)
    return model


def read_tokenizer(folder: Path, progress: Progress) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, with its chat template where there is one."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelNotFoundError(
            f"tokenizer=None: there is no tokenizer in {folder} (looked for {', '.join(_TOKENIZERS)}). "
            "Put the model's tokenizer files there, or give tokenizer= a folder, a Hub id or an object."
        )
    progress("loading tokenizer", 0.0)
    with quietly("loading tokenizer", progress):
        try:
            found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ModelLoadError(
                f"tokenizer: the tokenizer in {folder} cannot be loaded ({_first_line(error)}). "
                "Its files may be damaged or incomplete, or need a package named above: replace them, or "
                "give tokenizer=."
            ) from error
    progress("loading tokenizer", 1.0)
    return found


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
