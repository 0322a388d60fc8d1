"""GGUF files: converted once, whole or not at all, with the ends of text and the chat template they state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from interactive_infer.core import gguf
from interactive_infer.core.loader import load_model
from interactive_infer.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from tests.tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"


def write_gguf(
    path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, *, architecture: str = "llama"
) -> Path:
    """The tiny llama as llama.cpp's converter would write it."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    config = model.config
    out = GGUFWriter(path, architecture)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10_000.0)
    out.add_vocab_size(config.vocab_size)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens += ["ab", "cd"]  # what the merges make
    tokens += [f"<unused{i}>" for i in range(len(tokens), config.vocab_size)]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    out.add_token_merges(["a b", "c d"])  # 5.17 does not read a list of one
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_eot_token_id(7)
    out.add_unk_token_id(3)
    out.add_pad_token_id(0)
    out.add_chat_template(TEMPLATE)
    names = {
        "embed_tokens": "token_embd",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "lm_head": "output",
        "layers": "blk",
        "norm": "output_norm",
    }
    for name, weight in model.state_dict().items():
        short = name.removeprefix("model.").removesuffix(".weight")
        for theirs in sorted(names, key=len, reverse=True):
            if short == theirs or short.endswith(f".{theirs}") or short.startswith(f"{theirs}."):
                short = short.replace(theirs, names[theirs])
        array = weight.numpy()
        if "attn_q" in short or "attn_k" in short:  # llama.cpp interleaves the two halves of a rotary head
            heads = config.num_attention_heads if "attn_q" in short else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        array = np.ascontiguousarray(array)
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            out.add_tensor(f"{short}.weight", array)
        else:
            out.add_tensor(f"{short}.weight", quantize(array, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERACTIVE_INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestConversion:
    def test_weights_tokenizer_and_ends(self, cache: Path, tmp_path: Path) -> None:
        loaded = load_model(write_gguf(tmp_path / "tiny.F32.gguf"), dtype="float32")
        original = tiny_model("llama")
        for name, weight in loaded.model.named_parameters():
            assert torch.equal(weight, original.get_parameter(name)), name
        tokenizer = loaded.tokenizer
        assert tokenizer is not None
        assert tokenizer.decode(tokenizer("Hello, you!").input_ids) == "Hello, you!"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 3)
        assert tokenizer.pad_token_id == 0
        assert tokenizer.chat_template == TEMPLATE
        assert loaded.eos_token_ids == frozenset({2, 7})
        assert loaded.name == "tiny.F32"

    @pytest.mark.parametrize(
        ("kind", "stored"),
        [
            (GGMLQuantizationType.F32, "F32"),
            (GGMLQuantizationType.F16, "F16"),
            (GGMLQuantizationType.BF16, "BF16"),
            (GGMLQuantizationType.Q8_0, "BF16"),
        ],
    )
    def test_stored_type(self, cache: Path, tmp_path: Path, kind: GGMLQuantizationType, stored: str) -> None:
        from safetensors import safe_open

        folder = gguf.convert(write_gguf(tmp_path / "tiny.gguf", kind), lambda stage, done: None)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118

    def test_once(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        load_model(path)
        monkeypatch.setattr(gguf, "_write", None)
        stages: list[str] = []
        load_model(path, progress=lambda stage, done: stages.append(stage))
        assert "converting" not in stages

    def test_again_when_the_file_changes(self, cache: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        first = gguf.converted_folder(path)
        os.utime(path, ns=(1, 1))
        copied = tmp_path / "elsewhere" / "tiny.gguf"
        copied.parent.mkdir()
        copied.write_bytes(path.read_bytes())
        assert gguf.converted_folder(path) == gguf.converted_folder(copied) == first
        held = bytearray(path.read_bytes())
        held[-1] ^= 1
        path.write_bytes(held)
        assert gguf.converted_folder(path) != first

    @pytest.mark.parametrize("damage", ["truncated", "emptied"])
    def test_again_when_the_cache_is_damaged(self, cache: Path, tmp_path: Path, damage: str) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        load_model(path)
        weights = gguf.converted_folder(path) / "model.safetensors"
        if damage == "truncated":
            weights.write_bytes(weights.read_bytes()[:1000])
        else:
            weights.unlink()
        assert load_model(path).eos_token_ids == frozenset({2, 7})

    def test_a_crash_leaves_nothing(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")

        def crash(path: Path, folder: Path, progress: object) -> None:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(gguf, "_write", crash)
            with pytest.raises(KeyboardInterrupt):
                load_model(path)
        assert list(cache.iterdir()) == []
        load_model(path)
        assert list(cache.iterdir()) == [gguf.converted_folder(path)]

    def test_what_a_killed_process_left_is_removed(self, cache: Path, tmp_path: Path) -> None:
        old, new = cache / ".unfinished-old", cache / ".unfinished-new"
        for left in (old, new):
            left.mkdir(parents=True)
        os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
        load_model(write_gguf(tmp_path / "tiny.gguf"))
        assert not old.exists()
        assert new.exists()  # perhaps another process is at it

    def test_two_processes_at_once(self, cache: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        code = (
            "import sys; from interactive_infer.core.loader import load_model; "
            "print(sorted(load_model(sys.argv[1]).eos_token_ids))"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(gguf.__file__).parents[2])}
        command = [sys.executable, "-c", code, str(path)]
        both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [process.communicate(timeout=120)[0].strip() for process in both] == ["[2, 7]"] * 2
        assert list(cache.iterdir()) == [gguf.converted_folder(path)]

    def test_the_loser_of_a_race_takes_the_winners(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        real = gguf._write

        def overtaken(path: Path, folder: Path, progress: gguf.Progress) -> None:
            real(path, folder, progress)
            winner = gguf.converted_folder(path)
            winner.mkdir()
            for file in folder.iterdir():
                (winner / file.name).write_bytes(file.read_bytes())

        monkeypatch.setattr(gguf, "_write", overtaken)
        load_model(path)
        assert list(cache.iterdir()) == [gguf.converted_folder(path)]

    def test_silence(self, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        capfd.readouterr()
        load_model(path)
        assert capfd.readouterr() == ("", "")


class TestBadFiles:
    def test_no_such_file(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"model='/no/such\.gguf'"):
            load_model("/no/such.gguf")

    @pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all", b"\x00" * 100])
    def test_not_gguf(self, cache: Path, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelLoadError, match="not a GGUF file"):
            load_model(tmp_path / "x.gguf")

    @pytest.mark.parametrize("keep", [4, 20, 200, 5_000, 60_000, -4])
    def test_truncated(self, cache: Path, tmp_path: Path, keep: int) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelLoadError, match="damaged or truncated") as caught:
            load_model(path)
        assert caught.value.__cause__ is not None
        assert list(cache.iterdir()) == []

    def test_unknown_architecture(self, cache: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "tiny.gguf", architecture="unheardof")
        with pytest.raises(UnsupportedModelError, match="'unheardof'"):
            load_model(path)

    @pytest.mark.parametrize("absent", [{"gguf"}, {"accelerate"}, {"gguf", "accelerate"}])
    def test_missing_extra(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: set[str]
    ) -> None:
        path = write_gguf(tmp_path / "tiny.gguf")
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
        with pytest.raises(ModelLoadError) as caught:
            load_model(path)
        assert "pip install gguf accelerate" in str(caught.value)
        assert all(name in str(caught.value) for name in absent)

    def test_cache_that_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("INTERACTIVE_INFER_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelLoadError, match="INTERACTIVE_INFER_CACHE"):
            load_model(write_gguf(tmp_path / "tiny.gguf"))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("INTERACTIVE_INFER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gguf.cache_folder() == tmp_path / ".cache" / "interactive_infer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert gguf.cache_folder() == tmp_path / "xdg" / "interactive_infer"
    monkeypatch.setenv("INTERACTIVE_INFER_CACHE", str(tmp_path / "mine"))
    assert gguf.cache_folder() == tmp_path / "mine"


@pytest.mark.slow
def test_the_default_model() -> None:
    """SmolLM2 as it comes: the second load is quick (printed), turns end at <|im_end|>, chat works."""
    load_model()
    start = time.perf_counter()
    loaded = load_model(dtype="float32")
    print(f"second load of the default model: {time.perf_counter() - start:.2f} s")
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert loaded.eos_token_ids == frozenset({tokenizer.convert_tokens_to_ids("<|im_end|>")})
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        written = loaded.model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = tokenizer.decode(written[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
