"""Parts put together and taken apart: whatever fails on the way, the rest is undone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from interactive_infer import Engine, InvalidRequestError, assembly
from interactive_infer.core.decoder import FusedDecoder
from interactive_infer.core.runner import Runner
from tests.tiny_models import tiny_model, tiny_tokenizer


async def test_what_cannot_be_undone_keeps_nothing_else_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    before = model.config._attn_implementation
    closed: list[Runner] = []
    close = Runner.close

    def broken(_: FusedDecoder) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(FusedDecoder, "undo", broken)
    monkeypatch.setattr(Runner, "close", lambda self: (closed.append(self), close(self)))
    engine = await Engine.load(model, kv_cache_tokens=64, page_size=4, progress=False, freeze_gc=False)
    with pytest.raises(RuntimeError, match="planted"):
        await engine.close()
    assert closed, "the cache's memory comes back"
    assert model.training
    assert model.config._attn_implementation == before
    assert not [parts for parts in assembly._live if parts.name == engine.name]


async def test_a_load_that_finds_no_room_keeps_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    loaded: list[weakref.ref[torch.nn.Module]] = []

    def no_room(self: assembly.Parts, *_: object) -> None:
        loaded.append(weakref.ref(self.model))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(assembly.Parts, "_on_device", no_room)
    with pytest.raises(InvalidRequestError, match=r"kv_cache_tokens.*smaller") as held:
        await Engine.load(tmp_path, tokenizer=tiny_tokenizer(), progress=False, freeze_gc=False)
    gc.collect()
    assert loaded[0]() is None, "while the error is held, as IPython does"
    assert "out of memory" in str(held.value)
