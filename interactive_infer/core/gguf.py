"""A GGUF file, converted once into a folder that loads in seconds.

transformers unpacks GGUF's quantized blocks slowly (14 s for 135 million weights), so the result is kept as
safetensors beside its tokenizer and chat template, in `cache_folder()`. A folder appears there by one atomic
rename when it is complete: a crashed conversion leaves nothing that looks valid, and of two processes that
convert at once one wins and the other uses the winner's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError, UnsupportedModelError
from .quiet import Progress, quietly

if TYPE_CHECKING:
    import torch

FORMAT = 1
"""Raised when what a conversion writes changes, so that older folders are left aside."""

_HEAD_BYTES = 16 << 20
_PIECES, _PIECE_BYTES = 64, 64 << 10
_ABANDONED_AFTER_S = 24 * 3600


def cache_folder() -> Path:
    """Where conversions are kept.

    $INTERACTIVE_INFER_CACHE, else interactive_infer/ in $XDG_CACHE_HOME, else in ~/.cache.
    """
    chosen = os.environ.get("INTERACTIVE_INFER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interactive_infer"


def converted_folder(path: Path) -> Path:
    """The folder that `path`'s conversion has, or will have.

    Named after what the file holds, wherever it lies, and after the version of transformers (5.17 and 5.24 build
    different tokenizers from one file).
    """
    import transformers

    key = f"{FORMAT} {transformers.__version__} {path.name} {_fingerprint(path)}"
    return cache_folder() / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _fingerprint(path: Path) -> str:
    """Of its size, its first 16 MiB, where all but the weights are, and 64 pieces of the rest: files of other weights
    differ nearly everywhere, and a file of gigabytes takes no longer to look at than a small one."""
    size = path.stat().st_size
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        seen.update(file.read(_HEAD_BYTES))
        for piece in range(1, _PIECES + 1):
            file.seek(max(size * piece // _PIECES - _PIECE_BYTES, 0))
            seen.update(file.read(_PIECE_BYTES))
    return seen.hexdigest()


def convert(path: Path, progress: Progress) -> Path:
    """A folder with `path`'s model and tokenizer in transformers' format, written now if it is not there yet.

    Weights keep the file's float type; quantized ones become bfloat16.

    Raises:
        ModelLoadError: not a GGUF file, truncated, the `gguf` extra is missing, or the cache is read-only.
        UnsupportedModelError: transformers does not read this architecture from GGUF.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelLoadError(
                f"model={str(path)!r}: this is not a GGUF file (its first bytes are not 'GGUF'). "
                "Download it again, or give a model folder or a Hub id."
            )
    final = converted_folder(path)
    if final.is_dir():
        return final
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ModelLoadError(
            f"model={str(path)!r}: reading GGUF needs the package{'s' * (len(absent) > 1)} "
            f"{' and '.join(absent)}. "
            "Run: pip install gguf accelerate"
        )
    progress("converting", 0.0)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=final.parent))
    except OSError as error:
        raise ModelLoadError(
            f"model={str(path)!r}: the conversion cannot be kept in {final.parent} ({error}). "
            "Set INTERACTIVE_INFER_CACHE to a folder that can be written."
        ) from error
    try:
        _write(path, unfinished, progress)
        try:
            unfinished.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process has finished first
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    progress("converting", 1.0)
    return final


def _write(path: Path, folder: Path, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    metadata, dtype = _read_metadata(path)
    with quietly("converting", progress, modeling_gguf_pytorch_utils):
        try:
            # Without `dequantize` transformers looks on the Hub for kernels that compute on packed blocks.
            model = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=dtype,
                quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:
            if "not supported" in str(error):
                raise UnsupportedModelError(
                    f"model={str(path)!r}: transformers does not read the GGUF architecture "
                    f"{metadata['general.architecture']!r} ({error}). Give the model's own folder or "
                    "Hub id instead."
                ) from error
            raise ModelLoadError(
                f"model={str(path)!r}: the GGUF file cannot be read ({error}). It may be damaged: download it again."
            ) from error
        _take_special_tokens(metadata, model, tokenizer)
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except OSError as error:
            raise ModelLoadError(
                f"model={str(path)!r}: the conversion cannot be written to {folder.parent} ({error}). "
                "Make room there, or set INTERACTIVE_INFER_CACHE to another folder."
            ) from error


_WANTED = (
    "general.architecture",
    "tokenizer.chat_template",
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
)


def _read_metadata(path: Path) -> tuple[dict[str, Any], torch.dtype]:
    """The file's metadata that we use, and the float type of its weights. Fails on a truncated file."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        reader = GGUFReader(path)  # maps every tensor, so a file that ends early is noticed here
        fields = {name: reader.get_field(name) for name in _WANTED}
        metadata = {name: field.contents() for name, field in fields.items() if field is not None}
        kinds = {tensor.tensor_type for tensor in reader.tensors}
    except Exception as error:
        raise ModelLoadError(
            f"model={str(path)!r}: the GGUF file is damaged or truncated ({error}). Download it again."
        ) from error
    if "general.architecture" not in metadata or not kinds:
        raise ModelLoadError(
            f"model={str(path)!r}: the GGUF file holds no model (no general.architecture, or no tensors)."
        )
    whole = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
    }
    floats = {whole.get(kind, torch.bfloat16) for kind in kinds} - {torch.float32}
    # Norms are stored as float32 whatever the rest is, so the narrower type is the model's.
    return metadata, floats.pop() if len(floats) == 1 else (torch.bfloat16 if floats else torch.float32)


def _take_special_tokens(metadata: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Set special tokens, ends of text and the chat template as the file says.

    transformers 5.17 takes the tokenizer's end of text from the wrong place (`<|im_start|>` for SmolLM2).
    """
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for short, attribute in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{short}_token_id")
        if token_id is not None:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(int(token_id)))
    ends = [metadata.get(f"tokenizer.ggml.{short}_token_id") for short in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(int(token_id) for token_id in ends if token_id is not None))
    if ends:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    tokenizer.clean_up_tokenization_spaces = False  # else decoding would drop spaces before punctuation
    if tokenizer.chat_template is None:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")


def _remove_abandoned(folder: Path) -> None:
    """Delete what conversions that were killed have left behind."""
    for left in folder.glob(".unfinished-*"):
        try:
            age_s = time.time() - left.stat().st_mtime
        except FileNotFoundError:
            continue  # another process was quicker
        if age_s > _ABANDONED_AFTER_S:
            shutil.rmtree(left, ignore_errors=True)
