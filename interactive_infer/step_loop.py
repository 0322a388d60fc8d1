"""Driving an engine's steps: as a task of the event loop, or inline in its place.

Everything that touches scheduler and pages happens on one thread, the *driver*'s: the loop's, or that of whoever calls
`drive_until` while the loop stands still. Other threads leave what they want in an inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from interactive_infer.core.attention.interface import in_step
from interactive_infer.core.flight import Flight, FlightQueue
from interactive_infer.core.scheduler import Scheduler
from interactive_infer.errors import ReentrantStepError, WrongLoopError
from interactive_infer.interrupts import deferred_interrupts
from interactive_infer.timeline.recorder import Phase, Recorder

if TYPE_CHECKING:
    from interactive_infer.generation import Generation

Waiting = Literal["thread", "spin", "block"]

_HEARTBEAT_S = 0.02


class StepLoop:
    """The step loop of one engine, and the generations that it owes an end.

    - While steps are in flight there is a task, which keeps the engine alive; while nothing is, there is none.
    - While anything is unfinished a heartbeat measures the loop's lag. It also wakes an otherwise idle loop, which is
      when the loop sees an interrupt.
    - Bound to one loop at a time; `bind` says when it may move to another.
    """

    def __init__(
        self,
        owner: object,
        scheduler: Scheduler,
        flights: FlightQueue,
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
        self._recorder = recorder
        self._waiting = waiting
        self._name = name
        self._thread_id = 0
        self._task: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_filled = threading.Event()
        self._held: dict[int, Generation] = {}
        self._unfinished: dict[int, weakref.ref[Generation]] = {}
        # Of the engine's own: what its task starts belongs to no cell and no widget message.
        self._context = contextvars.Context()

    # -- generations -------------------------------------------------------------------------------------------

    def register(self, generation: Generation) -> None:
        """A new generation: known until it ends, and cancelled if nobody reads it and nothing refers to it."""
        self._unfinished[generation.number] = weakref.ref(generation)
        weakref.finalize(generation, _abandon, weakref.ref(self), generation.number).atexit = False

    def hold(self, generation: Generation) -> None:
        """Somebody reads or displays it: it lives until it ends."""
        if generation.number in self._unfinished:
            generation._was_held = True
            self._held[generation.number] = generation

    def rest(self, generation: Generation) -> None:
        """It is paused: unless something else refers to it nobody can resume it, and it goes."""
        self._held.pop(generation.number, None)

    def release(self, number: int) -> None:
        """It has ended: engine and generation let go of each other."""
        self._held.pop(number, None)
        reference = self._unfinished.pop(number, None)
        generation = reference() if reference is not None else None
        if generation is not None:
            generation._let_go()

    def unfinished(self) -> list[Generation]:
        """The unfinished generations that still exist."""
        return [g for reference in list(self._unfinished.values()) if (g := reference()) is not None]

    def _abandoned(self, number: int) -> None:
        self._unfinished.pop(number, None)
        scheduler = self._scheduler
        for sequence in (*scheduler.waiting, *scheduler.running, *scheduler.paused):
            if sequence.arrival == number:
                scheduler.finish(sequence)
                sequence.output.finish("cancelled")

    # -- asking ------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind to the running loop. WrongLoopError if another, running one still has unfinished generations."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            if self.loop is not None and self.loop.is_running() and self._unfinished:
                raise WrongLoopError(
                    f"this engine has {len(self._unfinished)} unfinished generations on another event loop; await "
                    "them there, or cancel them, before it is used from this one"
                )
            self._move_to(loop)
        self._wake()

    def post(self, what: Callable[[], None]) -> None:
        """Have `what` done by the driver: at once on its thread, between two steps; soon from any other."""
        self._inbox.append(what)
        self._inbox_filled.set()
        if self.loop is None or self.loop.is_closed():
            try:
                self._move_to(asyncio.get_running_loop())
            except RuntimeError:
                return  # no loop yet: the first driver does it
        if threading.get_ident() == self._thread_id and not self._flights.busy:
            with deferred_interrupts():
                self.drain()
        self._wake_soon()

    def _wake_soon(self) -> None:
        # A loop that was closed this moment has no more turns; the next driver empties the inbox.
        with contextlib.suppress(RuntimeError):
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._wake)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._thread_id, self._task = loop, threading.get_ident(), None
        self._stop_heartbeat()

    # -- driving -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Do what was asked for. On the driver's thread, between two steps."""
        self._inbox_filled.clear()
        while self._inbox:
            self._inbox.popleft()()

    def settle(self, flight: Flight) -> None:
        """Commit a flight that has landed, if nobody has."""
        for sequence in self._flights.finish(flight):
            self.release(sequence.arrival)

    def _wake(self) -> None:
        """On the loop: do what was asked, launch, and see to it that there is a task while there are flights."""
        loop = self.loop
        if self.closed or loop is None or loop.is_closed() or threading.get_ident() != self._thread_id:
            return
        self.drain()
        self._launch()
        if len(self._flights) and (self._task is None or self._task.done()):
            self._task = loop.create_task(
                self._run(self._owner()), name=f"interactive_infer {self._name}", context=self._context
            )
        if self._unfinished and self._heartbeat is None:
            self._beat(None)

    def _launch(self) -> None:
        while not self.closed and self._flights.begin() is not None:
            pass
        self._recorder.runnable(time.perf_counter_ns(), self._scheduler.num_runnable)

    async def _run(self, owner: object) -> None:
        """Await the oldest flight, commit it, launch the next; ends when nothing is in flight.

        Holds the engine (`owner`) meanwhile. Each turn has one checkpoint, in `_landed`.
        """
        while (flight := self._flights.oldest) is not None:
            start = time.perf_counter_ns()
            await self._landed(flight)
            self._recorder.record(Phase.AWAIT, start, time.perf_counter_ns(), flight.number)
            self.settle(flight)
            self.drain()
            self._launch()

    async def _landed(self, flight: Flight) -> None:
        if self._waiting == "block":
            flight.completion.wait()
        elif self._waiting == "spin":
            while not flight.completion.done():
                await asyncio.sleep(0)
        else:
            with contextlib.suppress(Exception):  # how it ended is the commit's business; this only waits
                await flight.completion

    def drive_until(self, generations: list[Generation], interrupted: Callable[[], bool]) -> None:
        """Step the engine from this thread until all have ended, or wait if another thread's loop drives.

        `interrupted()` true between two steps: they are cancelled, and the caller raises.
        """
        if in_step():
            raise ReentrantStepError(
                "a forward hook asked for a whole generation from inside a step: the step would wait for itself; use "
                "generate() there, which returns at once"
            )
        elsewhere = self.loop is not None and self.loop.is_running() and threading.get_ident() != self._thread_id
        for generation in generations:
            while generation.finish_reason is None:
                if elsewhere:
                    time.sleep(0.005)
                else:
                    self._step_inline()
                if interrupted():
                    for unfinished in generations:
                        unfinished.cancel()
                    if not elsewhere:
                        self.drain()
                    return

    def _step_inline(self) -> None:
        """What the task does in one turn, waiting in place for at most 50 ms."""
        self.drain()
        self._launch()
        flight = self._flights.oldest
        if flight is None:
            self._inbox_filled.wait(0.05)  # paused, or its prompt is being tokenized
        elif flight.completion.wait(0.05):
            self.settle(flight)

    # -- the heartbeat -----------------------------------------------------------------------------------------

    def _beat(self, due: float | None) -> None:
        loop = self.loop
        if loop is None or not self._unfinished or self.closed:
            self._heartbeat = None
            return
        now = loop.time()
        if due is not None:
            self._recorder.lag(time.perf_counter_ns(), int(max(0.0, now - due) * 1e9))
        self._heartbeat = loop.call_at(now + _HEARTBEAT_S, self._beat, now + _HEARTBEAT_S, context=self._context)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None

    def close(self) -> None:
        """No more steps, no more beats."""
        self.closed = True
        self._stop_heartbeat()


def _abandon(reference: weakref.ref[StepLoop], number: int) -> None:
    """Called by the garbage collector, on any thread and in the middle of anything: only leaves a message."""
    steps = reference()
    if steps is not None and number in steps._unfinished and not steps.closed:
        steps._inbox.append(lambda: steps._abandoned(number))
        steps._wake_soon()
