"""What a widget's callback prints, caught on its way to the kernel's log, where nobody would look for it."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

KEPT = 4_000
"""Characters: the last ones of what one callback prints."""


class _Catch:
    """In the place of `sys.stdout` or `sys.stderr`: keeps what its own thread writes. All else is the stream's."""

    def __init__(self, stream: Any, written: list[str]) -> None:
        self._stream = stream
        self._written = written
        self._thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        self._written.append(text[-KEPT:])
        if len(self._written) > KEPT:
            self._written[:] = ["".join(self._written)[-KEPT:]]
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def end(self) -> Any:
        """Catch no more; returns the stream that is to be in this one's place."""
        self._thread = None
        # Of two threads, the one that began later may end later, and would put this one back.
        under = self._stream
        while isinstance(under, _Catch) and under._thread is None:
            under = under._stream
        return under

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def prints_caught(tell: Callable[[str], None]) -> Iterator[None]:
    """Hand what this thread prints in the block, warnings among it, to `tell`: the last `KEPT` characters, at its end.

    What other threads print meanwhile goes where it always goes.
    """
    written: list[str] = []
    caught = {name: _Catch(getattr(sys, name), written) for name in ("stdout", "stderr") if getattr(sys, name)}
    for name, catch in caught.items():
        setattr(sys, name, catch)
    try:
        yield
    finally:
        for name, catch in caught.items():
            under = catch.end()
            if getattr(sys, name) is catch:
                setattr(sys, name, under)
        if written:
            tell("".join(written)[-KEPT:])


@types.coroutine
def step_by_step(
    work: Coroutine[Any, Any, None], around: Callable[[], AbstractContextManager[None]]
) -> Generator[Any, Any, None]:
    """Run a coroutine with `around()` about each of its steps, and not while it waits."""
    step, value = work.send, None
    while True:
        with around():
            try:
                waited = step(value)
            except StopIteration:
                return
        try:
            step, value = work.send, (yield waited)
        except BaseException as error:  # a cancellation among them: the coroutine's to handle
            step, value = work.throw, error
