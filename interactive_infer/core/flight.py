"""A step between `begin()` and `finish()`, and the queue that either of two drivers may work off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from interactive_infer.core.kv_cache import NULL_PAGE
from interactive_infer.core.output import FinishReason
from interactive_infer.core.runner import Runner, StepResult
from interactive_infer.core.scheduler import Plan, Scheduler
from interactive_infer.core.sequence import Sequence
from interactive_infer.errors import DeviceError, ReentrantStepError
from interactive_infer.timeline.recorder import Phase, Recorder
from interactive_infer.waiting import Completion


@dataclass(eq=False, slots=True)
class Flight:
    """A launched step. `completion` ends when the device has; `finished` once its tokens were committed."""

    number: int
    plan: Plan
    completion: Completion[StepResult]
    finished: bool = field(default=False)


class FlightQueue:
    """Steps in flight, oldest first.

    `begin` plans and launches one, `finish` commits the oldest. Both run on the thread of whoever drives: the loop's
    task, or `generate_sync` in its place. Each flight is committed exactly once, in launch order, by whichever driver
    comes first; the other finds it finished. Neither may be entered from inside the other (a hook of the user's that
    asks for a step): that raises ReentrantStepError.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, recorder: Recorder, *, max_in_flight: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._max_in_flight = max_in_flight
        self._flights: deque[Flight] = deque()
        self._number = 0
        self._busy = False

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def busy(self) -> bool:
        """Whether a step is being planned or committed at this moment, further up the stack."""
        return self._busy

    @property
    def oldest(self) -> Flight | None:
        return self._flights[0] if self._flights else None

    def begin(self) -> Flight | None:
        """Plan and launch the next step; None when as many are in flight as may be, or nothing can run."""
        if len(self._flights) >= self._max_in_flight:
            return None
        with self._exclusive():
            start = time.perf_counter_ns()
            plan = self._scheduler.plan()
            planned = time.perf_counter_ns()
            if plan is None:
                return None
            self._number += 1
            for row in plan.rows:
                if row.sequence.output.scheduled_ns is None:
                    row.sequence.output.scheduled_ns = planned
            self._recorder.record(Phase.PLAN, start, planned, self._number)
            flight = Flight(self._number, plan, self._runner.launch(plan))
            self._flights.append(flight)
            self._recorder.record(Phase.LAUNCH, planned, time.perf_counter_ns(), self._number)
            return flight

    def finish(self, flight: Flight) -> list[Sequence]:
        """Commit `flight`, whose completion is done, and any older one; returns the sequences that ended.

        Finished already: nothing happens.
        """
        ended: list[Sequence] = []
        with self._exclusive():
            while not flight.finished:
                oldest = self._flights.popleft()
                oldest.finished = True
                start = time.perf_counter_ns()
                ended += self._settle(oldest)
                self._recorder.record(Phase.COMMIT, start, time.perf_counter_ns(), oldest.number)
        return ended

    def _settle(self, flight: Flight) -> list[Sequence]:
        completion, plan = flight.completion, flight.plan
        if completion.start_ns is not None and completion.end_ns is not None:
            self._recorder.step(
                completion.start_ns,
                completion.end_ns,
                step_id=flight.number,
                batch_size=len(plan.rows),
                tokens=plan.num_tokens,
                prefill_tokens=plan.num_prefill_tokens,
                sampled=sum(row.samples for row in plan.rows),
            )
        try:
            result = completion.result()
        except Exception as error:
            # What failed is this step; its sequences cannot go on from it, all others can.
            failed = DeviceError(f"step {flight.number} failed on the device: {type(error).__name__}: {error}")
            failed.__cause__ = error
            ended = [row.sequence for row in plan.rows if not row.sequence.finished]
            for sequence in ended:
                self._end(sequence, "error", failed)
            self._scheduler.commit(plan, [-1] * len(plan.rows))
            return ended
        return self._commit(plan, result)

    def _commit(self, plan: Plan, result: StepResult) -> list[Sequence]:
        ended: list[Sequence] = []
        for index in result.invalid:
            sequence = plan.rows[index].sequence
            if not sequence.finished:
                self._runner.scrub([NULL_PAGE, *self._scheduler.cache.retract(sequence.pages)])
                error = DeviceError(
                    "the model's logits are not numbers for this text (often float16 overflow; try dtype='bfloat16' "
                    "or 'float32')"
                )
                self._end(sequence, "error", error)
                ended.append(sequence)
        now = time.perf_counter_ns()
        for index in self._scheduler.commit(plan, result.token_ids):
            sequence = plan.rows[index].sequence
            output, params = sequence.output, sequence.params
            token_id = result.token_ids[index]
            output.append(token_id, now, result.logprobs_of(index, params.logprobs))
            if token_id in sequence.stop_ids or output.reached_stop_string():
                self._end(sequence, "stop")
            elif len(sequence.token_ids) >= sequence.max_length:
                self._end(sequence, "length")
            else:
                output.notify()
                continue
            ended.append(sequence)
        return ended

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        self._scheduler.finish(sequence)
        sequence.output.finish(reason, error)
        sequence.output.notify()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._busy:
            raise ReentrantStepError(
                "this engine is in the middle of a step: a hook or callback that runs inside one cannot ask for "
                "another; hand the call to the event loop with loop.call_soon_threadsafe"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
