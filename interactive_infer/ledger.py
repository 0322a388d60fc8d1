"""The generations that an engine owes an end: queued, steered and ended here, and who keeps whom until then."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING

from interactive_infer.core.flight import FlightQueue
from interactive_infer.core.output import FinishReason, Output
from interactive_infer.core.sampler import penalized
from interactive_infer.core.scheduler import Scheduler
from interactive_infer.core.sequence import Sequence
from interactive_infer.errors import twin
from interactive_infer.sampling import SamplingParams

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

_log = logging.getLogger(__name__)


class Ledger:
    """Every unfinished generation of an engine, by its number.

    | a generation                      | keeps its engine | is kept by its engine                              |
    |-----------------------------------|------------------|----------------------------------------------------|
    | that nobody has read or displayed | yes              | no: once nothing refers to it, it is cancelled     |
    | read or displayed (`hold`)        | yes              | yes                                                |
    | paused, whatever came before      | yes              | no: if nothing refers to it, nobody can resume it  |
    | ended                             | no               | no                                                 |

    `enter`, `hold` and `unfinished` may be called from any thread. All else happens in a turn of the driver's. What is
    asked of a generation whose prompt is still being tokenized holds from the moment at which it is queued.
    """

    def __init__(
        self, scheduler: Scheduler, flights: FlightQueue, *, eos_token_ids: frozenset[int], max_length: int
    ) -> None:
        self._scheduler = scheduler
        self._flights = flights
        self._eos_token_ids = eos_token_ids
        self._max_length = max_length
        self._unfinished: dict[int, Output] = {}
        self._sequences: dict[int, Sequence] = {}
        self._held: dict[int, Generation] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._unfinished)

    @property
    def num_held(self) -> int:
        return len(self._held)

    # -- who keeps whom ----------------------------------------------------------------------------------------

    def enter(self, generation: Generation) -> None:
        """A new generation: an end is owed to it."""
        number, output = generation.number, generation._output
        output.parted = partial(self._part, number, weakref.ref(generation))
        self._unfinished[number] = output

    def hold(self, generation: Generation) -> None:
        """Somebody reads or displays it: it lives until it ends, or is paused."""
        generation._was_held = True
        if generation.state != "paused":
            self._held[generation.number] = generation
            if generation.number not in self._unfinished:  # it has ended this moment, on another thread
                self._held.pop(generation.number, None)

    def _part(self, number: int, reference: weakref.ref[Generation]) -> None:
        """It has ended: generation and engine let go of each other."""
        self._unfinished.pop(number, None)
        self._sequences.pop(number, None)
        self._held.pop(number, None)
        generation = reference()
        if generation is not None:
            generation._let_go()

    # -- what generations ask for ------------------------------------------------------------------------------

    def queue(self, generation: Generation, prompt_ids: list[int], preset: list[int]) -> None:
        """Give the scheduler its sequence, the prompt's tokens and those given beyond it, unless it has ended."""
        if generation.number not in self._unfinished:
            return
        if self._closed:
            self.end(generation.number, "cancelled")
            return
        params = generation.params
        sequence = Sequence(
            generation.number,
            prompt_ids,
            params,
            generation._output,
            preset=preset,
            token_limit=self._max_length,
            stop_ids=self._stop_ids(params),
        )
        generation._sequence = self._sequences[generation.number] = sequence
        self._scheduler.add(sequence)
        if len(sequence.token_ids) >= sequence.max_length:  # a branch at its very end
            self.end(generation.number, "length")
        elif generation._paused_early:
            self._scheduler.pause(sequence)

    def pause(self, generation: Generation) -> None:
        if generation.finish_reason is not None:
            return
        if generation._sequence is None:
            generation._paused_early = True
            generation._output.spent.go("paused")
        else:
            self._scheduler.pause(generation._sequence)
        self._held.pop(generation.number, None)
        generation._output.notify()

    def resume(self, generation: Generation) -> None:
        if generation.finish_reason is not None:
            return
        if generation._paused_early:
            generation._paused_early = False
            generation._output.spent.go("queue")
        if generation._sequence is not None:
            self._scheduler.resume(generation._sequence)
        if generation._was_held:
            self.hold(generation)
        generation._output.notify()

    def update(self, generation: Generation, params: SamplingParams) -> None:
        if generation.finish_reason is not None:
            return
        generation._output.watch_for(params.stop, params.min_tokens)
        generation._output.notify()  # who shows its parameters, paused ones' too
        sequence = generation._sequence
        if sequence is None:
            return
        if penalized(params) and not penalized(sequence.params):
            sequence.history_loaded = False
        sequence.set_params(params, self._stop_ids(params))
        if len(sequence.token_ids) >= sequence.max_length:
            self.end(generation.number, "length")

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self._eos_token_ids

    # -- ends --------------------------------------------------------------------------------------------------

    def end(self, number: int, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a generation now. Ended already: nothing."""
        output, sequence = self._unfinished.get(number), self._sequences.get(number)
        if sequence is not None:
            self._flights.end(sequence, reason, error)
        elif output is not None:
            output.finish(reason, error)

    def end_all(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End every generation, each with an `error` of its own; not even a broken scheduler keeps one waiting."""
        for number, output in tuple(self._unfinished.items()):
            own = twin(error) if error is not None else None
            try:
                self.end(number, reason, own)
            except Exception:
                _log.exception("generation %d could not be taken out of the scheduler", number)
                output.finish(reason, own)

    def close(self) -> None:
        """Cancel everything, and what is queued from now on."""
        self._closed = True
        self.end_all("cancelled")

    def forgotten(self, generation: Generation) -> None:
        """Only a message (`StepLoop.abandon`) refers to it any more: cancel it, and tell its views a last time."""
        self.end(generation.number, "cancelled")
        generation._output.notify()  # where the engine has gone with it, and has ended it
