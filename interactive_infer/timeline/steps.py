"""A step as a person looks at it: from a token to the step that made it, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.analysis import Window, duration
from interactive_infer.timeline.recording import Recording, batch_numbers
from interactive_infer.timeline.tokens import tokens_of


@dataclass(frozen=True)
class Step:
    """One step of a device. Times are ns on `time.perf_counter_ns`.

    `drawn` maps each generation in it, by its number, to the index of the token that it drew (None: it only took in
    some of its prompt). `graph`: it was replayed from a CUDA graph.
    """

    step_id: int
    start_ns: int
    end_ns: int
    batch_size: int
    tokens: int
    prefill_tokens: int
    graph: bool
    stream: int
    device: int
    drawn: dict[int, int | None]

    @property
    def kind(self) -> str:
        return "prefill" if self.prefill_tokens else "decode"

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def around(self, seconds: float = 0.05) -> Window:
        """A window with that much on either side (0 to 1e9 s), for `summary` and `figure`."""
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not (is_number and 0 <= seconds <= 1e9):
            raise InvalidRequestError("seconds", seconds, "give a number of seconds, 0 to 1e9")
        return self.start_ns - round(seconds * 1e9), self.end_ns + round(seconds * 1e9)

    def __str__(self) -> str:
        how = "a graph's replay" if self.graph else "eager"
        tokens, texts = _counted(self.tokens, "token"), _counted(self.batch_size, "text")
        return f"step {self.step_id}: {self.kind} of {tokens} in {texts}, {how}, {duration(self.duration_ns)}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def step_by_number(recording: Recording, step_id: int) -> Step | None:
    """The newest step with that number, if it is still recorded."""
    found = np.flatnonzero(recording.steps["step_id"] == step_id)
    if not len(found):
        return None
    at = int(found[-1])
    generations, drawn, _ = batch_numbers(recording.batches[at : at + 1])
    names = ("start", "end", "batch_size", "tokens", "prefill_tokens", "graph", "stream", "device")
    start, end, batch_size, tokens, prefill, graph, stream, device = (int(recording.steps[at][name]) for name in names)
    indices = [index if index >= 0 else None for index in (drawn + step_id).tolist()]
    return Step(
        step_id,
        start,
        end,
        batch_size,
        tokens,
        prefill,
        bool(graph),
        stream,
        device,
        dict(zip(generations.tolist(), indices, strict=True)),
    )


def step_of_token(recording: Recording, generation: int, index: int) -> Step | None:
    """The step that drew this token, if it is still recorded."""
    tokens = tokens_of(recording)
    found = np.flatnonzero((tokens.generation == generation) & (tokens.place == index))
    return step_by_number(recording, int(tokens.step_id[found[-1]])) if len(found) else None
