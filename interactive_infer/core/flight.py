"""A step between `begin()` and `finish()`, the queue of them, and who may work it off."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from interactive_infer.core.kv_cache import NULL_PAGE
from interactive_infer.core.output import FinishReason
from interactive_infer.core.scheduler import Plan, Row, Scheduler
from interactive_infer.core.sequence import Sequence
from interactive_infer.core.step import StepResult, StepRunner
from interactive_infer.errors import DeviceError, twin
from interactive_infer.timeline.recorder import Phase, Recorder
from interactive_infer.waiting import Completion


@dataclass(eq=False, slots=True)
class Flight:
    """A launched step. `completion` ends when the device has; `finished` once its tokens were committed."""

    number: int
    plan: Plan
    completion: Completion[StepResult]
    finished: bool = field(default=False)


class Driver:
    """The right to touch scheduler, pages and flights: one thread has it at a time, for one turn, and not twice.

    A lock that knows its owner. Nobody waits for the device while holding it.
    """

    __slots__ = ("_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0

    @property
    def mine(self) -> bool:
        """Whether this thread has it: a turn is further up the stack."""
        return self._owner == threading.get_ident()

    def take(self, timeout: float = 0.0) -> bool:
        """Take it, waiting `timeout` seconds at most. False: another thread is in a turn, or this one is."""
        if self.mine or not self._lock.acquire(timeout=timeout):
            return False
        self._owner = threading.get_ident()
        return True

    def give_back(self) -> None:
        self._owner = 0
        self._lock.release()


class FlightQueue:
    """Steps in flight, oldest first.

    `begin` plans and launches one, `finish` commits the oldest, `end` ends a sequence; whoever calls one of them has
    `driver`: the loop's task, `generate_sync` in its place, or a thread that asks while no loop runs. Each flight is
    committed exactly once, in launch order, by whoever comes first; others find it finished.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner, recorder: Recorder, *, max_in_flight: int) -> None:
        self.driver = Driver()
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._max_in_flight = max_in_flight
        self._flights: deque[Flight] = deque()
        self._number = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def oldest(self) -> Flight | None:
        return self._flights[0] if self._flights else None

    def begin(self) -> Flight | None:
        """Plan and launch the next step; None when as many are in flight as may be, or nothing can run."""
        if len(self._flights) >= self._max_in_flight:
            return None
        start = time.perf_counter_ns()
        plan = self._scheduler.plan()
        planned = time.perf_counter_ns()
        if plan is None:
            return None
        self._number += 1
        for row in plan.admitted:
            self._takes_up(row, planned)
        self._recorder.record(Phase.PLAN, start, planned, self._number)
        flight = Flight(self._number, plan, self._runner.launch(plan))
        self._flights.append(flight)
        self._recorder.record(Phase.LAUNCH, planned, time.perf_counter_ns(), self._number)
        return flight

    def _takes_up(self, row: Row, planned: int) -> None:
        """A row of a sequence that has waited until now."""
        sequence, output = row.sequence, row.sequence.output
        if output.scheduled_ns is None:
            output.scheduled_ns = planned
            self._recorder.asked(output.created_ns, sequence.arrival, len(sequence.token_ids) - sequence.prompt_length)
        # One token of one that has tokens already: it goes on where it was.
        goes_on = row.count == 1 and row.samples and len(output.times_ns) > 0
        output.spent.go("decode" if goes_on else "prefill", planned)

    def finish(self, flight: Flight) -> None:
        """Commit `flight`, whose completion is done, and any older one. Finished already: nothing happens."""
        while not flight.finished:
            oldest = self._flights.popleft()
            oldest.finished = True
            start = time.perf_counter_ns()
            self._settle(oldest)
            self._recorder.record(Phase.COMMIT, start, time.perf_counter_ns(), oldest.number)

    def end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        """The only way a sequence ends: its pages come back, then its output ends. Ended already: nothing happens."""
        self._scheduler.finish(sequence)
        sequence.output.finish(reason, error)

    def _settle(self, flight: Flight) -> None:
        completion, plan = flight.completion, flight.plan
        try:
            result = completion.result()
        except Exception as error:
            # What failed is this step; its sequences cannot go on from it, all others can.
            failed = DeviceError(f"step {flight.number} failed on the device: {type(error).__name__}: {error}")
            failed.__cause__ = error
            for row in plan.rows:
                if not row.sequence.finished:
                    self.end(row.sequence, "error", twin(failed))
            self._scheduler.commit(plan, [-1] * len(plan.rows))
            self._record(flight, graph=False)
        else:
            self._record(flight, graph=result.graph)
            self._commit(plan, result)

    def _record(self, flight: Flight, *, graph: bool) -> None:
        completion, plan = flight.completion, flight.plan
        if completion.launched_ns is not None:  # on a thread, later than the launch that is recorded already
            self._recorder.record(Phase.LAUNCH, *completion.launched_ns, flight.number)
        if completion.start_ns is not None and completion.end_ns is not None:
            drawn = [row.start + row.count - row.sequence.prompt_length if row.samples else -1 for row in plan.rows]
            self._recorder.step(
                completion.start_ns,
                completion.end_ns,
                step_id=flight.number,
                batch_size=len(plan.rows),
                tokens=plan.num_tokens,
                prefill_tokens=plan.num_prefill_tokens,
                sampled=len(drawn) - drawn.count(-1),
                graph=graph,
                generations=[row.sequence.arrival for row in plan.rows],
                drawn=drawn,
            )

    def _commit(self, plan: Plan, result: StepResult) -> None:
        for index in result.invalid:
            row = plan.rows[index]
            sequence = row.sequence
            # It may have ended or lost its pages meanwhile: then those that are nobody else's yet.
            holders = 1 if row.pages is sequence.pages else 0
            self._runner.scrub([NULL_PAGE, *self._scheduler.cache.retract(row.pages, holders=holders)])
            if not sequence.finished:
                error = DeviceError(
                    "the model's logits are not numbers for this text (often float16 overflow; try dtype='bfloat16' "
                    "or 'float32')"
                )
                self.end(sequence, "error", error)
        now = time.perf_counter_ns()
        rows, token_ids, any_logprobs = plan.rows, result.token_ids, bool(result.logprobs)
        for index in self._scheduler.commit(plan, token_ids):
            sequence = rows[index].sequence
            output, token_id = sequence.output, token_ids[index]
            try:
                logprobs = result.logprobs_of(index, sequence.params.logprobs) if any_logprobs else None
                stopped = output.append(token_id, now, logprobs) or token_id in sequence.stop_ids
            except Exception as error:  # a tokenizer of the user's that cannot decode this: the others go on
                self.end(sequence, "error", error)
                continue
            if stopped:
                self.end(sequence, "stop")
            elif len(sequence.token_ids) >= sequence.max_length:
                self.end(sequence, "length")
            else:
                output.notify()
