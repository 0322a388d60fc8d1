"""Ways of waiting with the faults that `interactive_infer.waiting` must not have: the tests' counter-checks.

`PullRequestFuture` is written like the future of the pull request that this project began with: a Python
function in the device's stream resolves it, through the private queue of an event loop made for it. Its faults
are kept: it never resolves on any other loop, cannot be cancelled, knows no device errors and no closing, is
part of a reference cycle, keeps a Python function in the stream, and then blocks the loop for the copy to the
host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol


class Stream(Protocol):
    """What the two need of the simulated device."""

    def launch_host_function(self, fn: Callable[[], None]) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class PriorityLoop(asyncio.SelectorEventLoop):
    """The loop that the future needs: it takes a callback of another thread before all that it has to do."""

    def call_soon_first(self, callback: Callable[[], None]) -> None:
        self._ready.appendleft(asyncio.Handle(callback, (), self))
        self._write_to_self()


class PullRequestFuture:
    _asyncio_future_blocking = False  # asyncio's mark of a future

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._loop: Any = asyncio.get_running_loop()
        self._resolved = False
        self._callbacks: list[tuple[Callable[..., object], Any]] = []
        # The driver keeps only a pointer to the function, so the future must keep the function: a cycle.
        self._host_function = self._on_device
        stream.launch_host_function(self._host_function)

    def _on_device(self) -> None:
        self._loop.call_soon_first(self._resolve)

    def _resolve(self) -> None:
        self._resolved = True
        for callback, context in self._callbacks:
            self._loop.call_soon(callback, self, context=context)

    def get_loop(self) -> Any:
        return self._loop

    def add_done_callback(self, callback: Callable[..., object], *, context: Any = None) -> None:
        self._callbacks.append((callback, context))

    def cancel(self, msg: object = None) -> bool:
        return False

    def result(self) -> None:
        self._stream.synchronize()  # the copy of the sampled tokens

    def __await__(self) -> Generator[Any, None, None]:
        if not self._resolved:
            self._asyncio_future_blocking = True
            yield self
        self.result()


async def spin(stream: Stream) -> None:
    """What the pull request replaced."""
    while not stream.query():
        await asyncio.sleep(0)
