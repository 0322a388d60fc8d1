from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from interactive_infer import Engine
from interactive_infer.interrupts import deferred_interrupts
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def handler_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_interrupt_comes_at_the_end() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        interrupt()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_or_where_it_is_delivered_and_only_once() -> None:
    with deferred_interrupts() as interrupts:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver()
        interrupts.deliver()


def test_the_outer_block_delivers() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        with deferred_interrupts():
            interrupt()
        order.append("after the inner block")
    assert order


def test_a_handler_of_the_users_own_is_called() -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with deferred_interrupts():
        interrupt()
        assert not calls
    assert calls == [signal.SIGINT]


def test_a_handler_that_puts_another_in_place() -> None:
    def another(number: object, frame: object) -> None: ...

    signal.signal(signal.SIGINT, lambda number, frame: signal.signal(signal.SIGINT, another))
    with deferred_interrupts() as interrupts:
        interrupt()
        interrupts.deliver()
    assert signal.getsignal(signal.SIGINT) is another


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "handled by the process"])
def test_generate_sync_goes_on_where_the_handler_does_not_raise(ignored: bool) -> None:
    calls = []
    handler = signal.SIG_IGN if ignored else lambda number, frame: calls.append(number)
    signal.signal(signal.SIGINT, handler)
    with Engine.load_sync(tiny_model("llama"), kv_cache_tokens=512, progress=False, freeze_gc=False) as engine:
        timer = threading.Timer(0.02, interrupt)
        timer.start()
        done = engine.generate_sync([1, 2, 3], max_tokens=400, ignore_eos=True)
        timer.join()
    assert len(done.token_ids) == 400
    assert calls == ([] if ignored else [signal.SIGINT])
    assert signal.getsignal(signal.SIGINT) is handler
