"""Driving an engine's steps: as a task of the event loop, or inline in its place."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from interactive_infer.core.attention.interface import in_step
from interactive_infer.core.flight import Flight, FlightQueue
from interactive_infer.core.scheduler import Scheduler
from interactive_infer.errors import ReentrantStepError, WrongLoopError
from interactive_infer.interrupts import Interrupts, deferred_interrupts
from interactive_infer.ledger import Ledger
from interactive_infer.options import Waiting
from interactive_infer.timeline.recorder import Phase, Recorder

if TYPE_CHECKING:
    from interactive_infer.generation import Generation


_log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.02
_POLL_S = 0.005
_STALLED_POLLS = 10
"""A loop that leaves a landed step alone for so many polls does not drive: it is blocked, or about to be closed."""
_AFTER_CANCEL_S = 0.2
"""A loop whose tasks were all cancelled is probably about to be closed: a new task would be destroyed with it."""


class StepLoop:
    """The step loop of one engine.

    Who drives: one of
    - the loop's task, which exists while steps are in flight and keeps the engine alive meanwhile. Cancelled, it is
      started again by the heartbeat; another loop's task takes over when the engine moves there;
    - one thread in `drive_until`, which has `_wheel`: the one that runs the loop, in the task's place; or any other,
      when no loop drives. More of them wait for the wheel or their texts, whichever comes first.

    What they do to scheduler, pages and flights they do in a `turn`, so that they could all be at it at once: the rule
    above is for speed, turns are for safety. Other threads leave what they want in the inbox (`post`).

    - While anything is unfinished a heartbeat measures the loop's lag. It also wakes an otherwise idle loop, which is
      when the loop sees an interrupt. A loop that the engine has left keeps its own: it takes the engine back if the
      other stops.
    - Bound to one loop at a time; `bind` says when it may move to another.
    - What nobody could handle ends everything that is unfinished: nobody is left waiting.
    """

    def __init__(
        self,
        owner: object,
        scheduler: Scheduler,
        flights: FlightQueue,
        ledger: Ledger,
        recorder: Recorder,
        *,
        waiting: Waiting,
        name: str,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self._owner = weakref.ref(owner)
        self._scheduler = scheduler
        self._flights = flights
        self._ledger = ledger
        self._recorder = recorder
        self._waiting = waiting
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._beating: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._binding = threading.Lock()
        self._wheel = threading.Lock()
        self._turns = 0
        self._wake_is_due = False
        self._rest_until = 0.0  # on the loop's clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_filled = threading.Event()

    def hold(self, generation: Generation) -> None:
        """Somebody reads or displays it (see `Ledger`)."""
        self._ledger.hold(generation)

    # -- asking ------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind to the running loop. WrongLoopError while generations are read or displayed on another that runs."""
        loop = asyncio.get_running_loop()
        with self._binding:
            if self.loop is not loop:
                if self.loop is not None and self.loop.is_running() and self._ledger.num_held:
                    raise WrongLoopError(
                        f"this engine has {self._ledger.num_held} unfinished generations on another event loop; await "
                        "them there, or cancel them, before it is used from this one"
                    )
                self._move_to(loop)
        self._wake()

    def post(self, what: Callable[[], None]) -> None:
        """Have `what` done in a turn: at once where this thread may take one, else soon."""
        self._inbox.append(what)
        self._inbox_filled.set()
        here = _running_loop()
        if here is not None and here is not self.loop:
            with self._binding:
                if self.loop is None or not self.loop.is_running():
                    self._move_to(here)
        if here is self.loop or self.loop is None or not self.loop.is_running():
            self.turn(self.drain)
        self._wake_soon()

    def abandon(self, generation: Generation) -> None:
        """Nobody refers to it any more: cancel it. Called by the garbage collector, on any thread and in the middle of
        anything, so this only leaves a message."""
        self._inbox.append(partial(self._ledger.forgotten, generation))
        self._wake_soon()

    def _wake_soon(self) -> None:
        loop = self.loop
        if loop is not None and not self._wake_is_due:
            self._wake_is_due = True
            # A loop that was closed this moment has no more turns; the next driver empties the inbox.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        # The old loop's task sees that it is not the one any more, and ends.
        self.loop, self._task = loop, None
        self._wake_is_due, self._rest_until = False, 0.0

    # -- a turn ------------------------------------------------------------------------------------------------

    def turn(self, work: Callable[[], None], *, patience: float = 0.0) -> bool:
        """Do `work` as the only driver, and then what was posted meanwhile. False if another turn is under way.

        `patience`: seconds to wait for the other's end. An interrupt is held back until the turn is over. What the turn
        ends may have been the last to refer to the engine, which lives until it is over, too.
        """
        driver, owner, done = self._flights.driver, self._owner(), False
        # Once more if somebody who posted found the driver taken. Not without an engine: it is being collected.
        while not done or (self._inbox and owner is not None):
            with deferred_interrupts():
                if not driver.take(patience):  # also further up the stack: that turn does what is posted
                    break
                try:
                    work()
                finally:
                    self._turns += 1
                    driver.give_back()
            work, done = self.drain, True
        return done

    def drain(self) -> None:
        """In a turn: do what was asked for. What fails is logged, and the rest is done."""
        self._inbox_filled.clear()
        while self._inbox:
            what = self._inbox.popleft()
            try:
                what()
            except Exception:
                _log.exception("a request to engine %s failed: %r", self._name, what)
        self._recorder.runnable(time.perf_counter_ns(), self._scheduler.num_runnable)

    def settle(self, flight: Flight, *, patience: float = 0.0) -> bool:
        """Commit a flight that has landed, unless somebody has. False: another turn is under way."""
        return self.turn(partial(self._commit, flight), patience=patience)

    def _commit(self, landed: Flight) -> None:
        """In a turn."""
        try:
            self._flights.finish(landed)
        except Exception as error:
            self._fail(error)
        self._recorder.runnable(time.perf_counter_ns(), self._scheduler.num_runnable)

    def _advance(self) -> None:
        """In a turn, what every driver does next: what was asked, and launch."""
        try:
            self.drain()
            while not self.closed and self._flights.begin() is not None:
                pass
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """In a turn: what nobody could handle. What is unfinished may be in any state, so all of it ends."""
        _log.error("engine %s failed in a step; everything unfinished ends with it", self._name, exc_info=error)
        self._ledger.end_all("error", error)

    def check_not_inside(self) -> None:
        """ReentrantStepError where a step or a turn of this engine would have to wait for itself."""
        if in_step():
            raise ReentrantStepError(
                "a forward hook asked for a whole generation from inside a step: the step would wait for itself; use "
                "generate() there, which returns at once"
            )
        if self._flights.driver.mine:
            raise ReentrantStepError(
                "this engine is in the middle of a step: a callback that runs inside one cannot ask for another; hand "
                "the call to the event loop with loop.call_soon_threadsafe"
            )

    # -- the loop's task ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """On the loop: do what was asked, launch, and see to it that somebody drives while there are flights."""
        self._wake_is_due = False
        loop = self.loop
        if loop is None or _running_loop() is not loop:
            return
        self.turn(self._advance)
        if len(self._flights) and not self._driven(loop):
            # In a context of its own: what it starts belongs to no cell and no widget message.
            context = contextvars.Context()
            self._task = loop.create_task(
                self._run(self._owner()), name=f"interactive_infer {self._name}", context=context
            )
            self._task.add_done_callback(self._task_ended, context=context)
        if len(self._ledger) and loop not in self._beating:
            self._beating.add(loop)
            self._beat(loop, None)

    def _driven(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether somebody drives, or nobody should now."""
        return self._wheel.locked() or self._task is not None or loop.time() < self._rest_until

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Not left to the task itself: one that is cancelled before its first turn runs nothing."""
        if self._task is task:
            self._task = None
            if task.cancelled():
                self._rest_until = task.get_loop().time() + _AFTER_CANCEL_S

    async def _run(self, owner: object) -> None:
        """Await the oldest flight, commit it, launch the next; ends when nothing is in flight, or another drives.

        Holds the engine (`owner`) meanwhile. Each flight has a checkpoint in `_landed`, also where it has landed and
        another thread is about to commit it; and one between its commit and the next launch while the device has work,
        so that the loop stands still for one of them at a time.
        """
        task = asyncio.current_task()
        try:
            while self._task is task and not self._wheel.locked() and (flight := self._flights.oldest) is not None:
                start = time.perf_counter_ns()
                await self._landed(flight)
                self._recorder.record(Phase.AWAIT, start, time.perf_counter_ns(), flight.number)
                if self._task is task:
                    self.settle(flight)
                    following = self._flights.oldest
                    if following is not None and not following.completion.done():
                        await asyncio.sleep(0)
                    if self._task is task:
                        self.turn(self._advance)
            if self._task is task:
                self._task = None  # at once: what is asked for before its callback runs gets a task of its own
        except (KeyboardInterrupt, SystemExit) as interrupt:
            # From a callback it reaches whoever runs the loop, without a task that reports it again later.
            asyncio.get_running_loop().call_soon(_raise, interrupt)
        except Exception as error:
            self.post(partial(self._fail, error))

    async def _landed(self, flight: Flight) -> None:
        if self._waiting == "block":
            flight.completion.wait()
            await asyncio.sleep(0)
        elif self._waiting == "spin":
            await asyncio.sleep(0)
            while not flight.completion.done():
                await asyncio.sleep(0)
        else:
            with contextlib.suppress(Exception):  # how it ended is the commit's business; this only waits
                await flight.completion

    # -- in the task's place -----------------------------------------------------------------------------------

    def drive_until(self, generations: Sequence[Generation], interrupts: Interrupts) -> None:
        """Step the engine from this thread until all have ended, or wait while another drives.

        An interrupt is delivered between two steps; if its handler raises, they are cancelled.
        """
        self.check_not_inside()
        loop = _running_loop()
        if loop is not None and loop is self.loop and loop not in self._beating:
            self._beating.add(loop)
            self._beat(loop, None)  # due while this holds the loop: its lateness says for how long
        stalled = 0
        try:
            for generation in generations:
                while generation.finish_reason is None:
                    turns = self._turns
                    if self._on_another_thread() and stalled < _STALLED_POLLS:
                        time.sleep(_POLL_S)
                        flight = self._flights.oldest
                        working = flight is not None and not flight.completion.done()
                        stalled = 0 if working or self._turns != turns else stalled + 1
                    elif self._wheel.acquire(timeout=_POLL_S):
                        try:
                            self._drive(generation, interrupts)
                        finally:
                            self._wheel.release()
                    interrupts.deliver()
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        finally:
            self._wake_soon()  # the loop's task takes over what is left

    def _on_another_thread(self) -> bool:
        """Whether the loop that should drive runs on a thread other than this one."""
        loop = self.loop
        return loop is not None and loop.is_running() and _running_loop() is not loop

    def _drive(self, generation: Generation, interrupts: Interrupts) -> None:
        """With the wheel, what the task does, waiting in place for at most 50 ms at a time."""
        while generation.finish_reason is None:
            self.turn(self._advance, patience=_POLL_S)
            flight = self._flights.oldest
            if flight is None:
                self._inbox_filled.wait(0.05)  # paused, or its prompt is being tokenized
            elif flight.completion.wait(0.05):
                self.settle(flight, patience=_POLL_S)
            interrupts.deliver()

    # -- the heartbeat -----------------------------------------------------------------------------------------

    def _beat(self, loop: asyncio.AbstractEventLoop, due: float | None) -> None:
        now = loop.time()
        if due is not None and loop is self.loop:  # also when everything has ended: that may be what held the loop
            self._recorder.lag(time.perf_counter_ns(), int(max(0.0, now - due) * 1e9))
        if not len(self._ledger) or self.closed:
            self._beating.discard(loop)
            return
        loop.call_at(now + _HEARTBEAT_S, self._beat, loop, now + _HEARTBEAT_S, context=contextvars.Context())
        if due is None:
            return
        with self._binding:
            if self.loop is None or not self.loop.is_running():
                self._move_to(loop)  # readers are left here, and where the engine went nobody drives any more
        work = self._inbox or len(self._flights) or self._scheduler.num_runnable
        if work and loop is self.loop and not self._driven(loop):
            self._wake()

    def close(self) -> None:
        """No more steps; the heartbeat ends at its next beat."""
        self.closed = True


def _raise(error: BaseException) -> None:
    raise error


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
