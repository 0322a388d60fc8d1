"""A generation without a model or a loop, and a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from interactive_infer.core.output import Output
from interactive_infer.generation import Generation
from interactive_infer.sampling import SamplingParams
from interactive_infer.timeline import Timeline


class Words:
    """A detokenizer whose token `i` is the text `words[i]`."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def push(self, token_ids: list[int]) -> list[str]:
        return [self.words[token_id] for token_id in token_ids]

    holding = False

    def flush(self) -> str:
        return ""


class FakeSteps:
    """The step loop, driven by whoever calls `Writer.write`."""

    loop = None

    def __init__(self) -> None:
        self.held: list[Generation] = []

    def post(self, what: Callable[[], None]) -> None:
        what()

    def hold(self, generation: Generation) -> None:
        self.held.append(generation)


class FakeEngine:
    """What a display needs of an engine."""

    tokenizer = None
    closed = False

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._steps = FakeSteps()


class Writer:
    """Writes a text word by word into a real Generation, as the engine's driver would."""

    def __init__(self, words: list[str]) -> None:
        self.engine = FakeEngine()
        self.output = Output(Words(words), (), [])  # type: ignore[arg-type]
        self.generation = Generation(self.engine, 1, "", SamplingParams(), self.output)  # type: ignore[arg-type]
        self._num_words = len(words)

    def write(self, count: int = 1) -> None:
        """Append the next `count` words, one commit each."""
        for _ in range(count):
            index = len(self.output.token_ids)
            assert index < self._num_words
            self.output.append(index, 1_000_000 * index)
            self.output.notify()

    def finish(self, reason: str = "stop", error: BaseException | None = None) -> None:
        self.output.finish(reason, error)  # type: ignore[arg-type]
        self.generation._let_go()
        self.output.notify()


class Clock:
    """Simulated seconds with timers. With `fires=False` timers are accepted and never run: a loop nobody turns."""

    def __init__(self, *, fires: bool = True) -> None:
        self.now = 0.0
        self._fires = fires
        self._timers: list[tuple[float, Callable[[], None], list[bool]]] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> SimpleNamespace:
        alive = [True]
        self._timers.append((self.now + delay, callback, alive))
        return SimpleNamespace(cancel=lambda: alive.__setitem__(0, False))

    def advance(self, seconds: float) -> None:
        """Turn the clock, running each timer at its time."""
        end = self.now + seconds
        while self._fires and (due := [timer for timer in self._timers if timer[0] <= end]):
            timer = min(due, key=lambda timer: timer[0])
            self._timers.remove(timer)
            at, callback, (alive,) = timer
            if alive:
                self.now = max(self.now, at)
                callback()
        self.now = end
