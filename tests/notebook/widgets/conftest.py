from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from interactive_infer import Engine
from interactive_infer.notebook.widgets.panel import Panel
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a kernel that hears messages while a cell awaits."""
    monkeypatch.setattr(Panel, "answers_at_once", True)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    async with await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False) as engine:
        yield engine


class Wire:
    """What a panel sends, and the way back."""

    def __init__(self, panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.panel = panel
        self.sent: list[dict[str, Any]] = []
        self.renewed = 0
        monkeypatch.setattr(panel, "send", lambda content, buffers=None: self.sent.append(content), raising=False)
        monkeypatch.setattr(panel, "renew", self._renew, raising=False)

    def _renew(self) -> None:
        self.renewed += 1

    def of(self, key: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if key in message]

    def say(self, **message: Any) -> None:
        self.panel._handle_custom_msg(message, [])

    async def until(self, holds: Callable[[], Any]) -> None:
        """Give the loop turns until something holds."""
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Panel], Wire]:
    return lambda panel: Wire(panel, monkeypatch)
