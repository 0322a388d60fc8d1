"""transformers, run quietly and one thread at a time.

While it builds a model, transformers changes process-wide state (torch's default dtype, the functions of
`torch.nn.init`), so two loads at once could leave one of them changed for good: a lock keeps them apart.
Its bars and warnings are meant for whoever called it; here that is this package, which reports progress
itself and turns what matters (missing weights, for instance) into errors. Other threads' bars and log records
pass through untouched, and every setting is as before when the scope ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Progress = Callable[[str, float], None]
"""`progress(stage, done)`: `done` runs from 0 to 1 within each stage. Called on the loading thread, or on a
download's worker thread."""

_one_at_a_time = threading.RLock()


@contextmanager
def quietly(stage: str, progress: Progress, *own_bars: ModuleType) -> Iterator[None]:
    """Hold transformers' loading for this thread; its bars become `progress(stage, done)`.

    Its warnings are dropped; records of level ERROR and above still reach the log. `own_bars` are modules of
    transformers that draw with a `tqdm` of their own instead of the library's.
    """
    from transformers.utils import logging as transformers_logging

    me = threading.get_ident()
    furthest = 0.0

    def report(done: float) -> None:
        nonlocal furthest
        if done > furthest:  # several bars follow one another in one stage: progress never runs backwards
            furthest = done
            progress(stage, done)

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() == me:
            return _Bar(report, *args, **kwargs)
        return previous(factory, args, kwargs) if previous is not None else factory(*args, **kwargs)

    def others_or_errors(record: logging.LogRecord) -> bool:
        return record.thread != me or record.levelno >= logging.ERROR

    with _one_at_a_time:
        transformers_logging.get_logger()  # sets up the library's handler if nobody has
        handlers = list(logging.getLogger("transformers").handlers)
        previous = transformers_logging.set_tqdm_hook(bar)
        own = {module: module.tqdm for module in own_bars}
        for module, factory in own.items():
            module.tqdm = lambda *args, factory=factory, **kwargs: bar(factory, args, kwargs)  # type: ignore[attr-defined]
        for handler in handlers:
            handler.addFilter(others_or_errors)
        try:
            yield
        finally:
            for module, factory in own.items():
                module.tqdm = factory  # type: ignore[attr-defined]
            for handler in handlers:
                handler.removeFilter(others_or_errors)
            transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """As much of tqdm as transformers' loading uses: counts, and prints nothing."""

    def __init__(
        self,
        report: Callable[[float], None],
        iterable: Iterable[Any] | None = None,
        total: int | None = None,
        **_: Any,
    ) -> None:
        self._report, self._iterable = report, iterable
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)  # type: ignore[arg-type]
        self._total, self._n = total, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def update(self, n: float = 1) -> None:
        before, self._n = self._n, self._n + int(n)
        # A callback per cent, not per weight: the reader may be an event loop.
        if self._total and 100 * self._n // self._total != 100 * before // self._total:
            self._report(min(1.0, self._n / self._total))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # set_description, set_postfix, close, ...: nothing to draw
