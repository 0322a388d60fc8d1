"""When each token was drawn and reached the host, and how long people waited for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interactive_infer.timeline.analysis import Window, match
from interactive_infer.timeline.recorder import Phase
from interactive_infer.timeline.recording import Recording, batch_numbers


class Tokens(NamedTuple):
    """Tokens that steps drew, int64 arrays of one length: generation, index in it, the step's number, and when the
    token was on the host (the end of the step's commit; of the step itself where no commit is recorded)."""

    generation: NDArray[np.int64]
    place: NDArray[np.int64]
    step_id: NDArray[np.int64]
    at: NDArray[np.int64]


def tokens_of(recording: Recording) -> Tokens:
    """Every token whose step is recorded, in no particular order; surplus ones after a stop too."""
    steps, spans = recording.steps, recording.spans
    generation, drawn, sizes = batch_numbers(recording.batches)
    at = steps["end"].copy()
    commits = spans[spans["phase"] == Phase.COMMIT]
    found, commit = match(steps["step_id"], commits["ref"])
    at[found] = commits["end"][commit]
    step_id, at = np.repeat(steps["step_id"], sizes), np.repeat(at, sizes)
    index = drawn + step_id
    kept = index >= 0
    return Tokens(generation[kept], index[kept], step_id[kept], at[kept])


def first_token_ns(recording: Recording, window: Window) -> NDArray[np.int64]:
    """From being asked for to the first token, of the generations whose first token came in the window."""
    tokens, asked = tokens_of(recording), recording.asked
    found, which = match(tokens.generation, asked["generation"])
    first = (tokens.place[found] == asked["first"][which]) & _inside(tokens.at[found], window)
    waited: NDArray[np.int64] = (tokens.at[found] - asked["at"][which])[first]
    return waited


def between_tokens_ns(recording: Recording, window: Window) -> NDArray[np.int64]:
    """From one token to the next of the same generation, where the latter came in the window."""
    tokens = tokens_of(recording)
    order = np.lexsort((tokens.place, tokens.generation))
    generation, index, at = tokens.generation[order], tokens.place[order], tokens.at[order]
    follows = (np.diff(generation) == 0) & (np.diff(index) == 1) & _inside(at[1:], window)
    gaps: NDArray[np.int64] = np.diff(at)[follows]
    return gaps


def _inside(at: NDArray[np.int64], window: Window) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = (at > window[0]) & (at <= window[1])
    return result
