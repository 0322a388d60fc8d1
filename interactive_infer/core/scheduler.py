"""Who runs in the next step, with how many tokens: continuous batching, first come first served."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from interactive_infer.core.kv_cache import KVCache
from interactive_infer.core.sequence import Sequence, State


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: tokens `start .. start + count` of it.

    `samples` says that the row ends at the sequence's last token, so that a next one is drawn. `from_device` says
    that this last token is itself still in flight and is read from the slot's last sampled token. Keys and values of
    tokens before `write_from` are on a shared page already and are not written again. `pages` is the sequence's page
    table, which may have grown since; `slot` the sampler row. `load_history` asks for the slot's sampler state to be
    built anew. `epoch` counts the sequence's preemptions, so that a step launched before one is not taken for the pages
    it has now.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    from_device: bool
    write_from: int
    pages: list[int]
    slot: int
    load_history: bool
    epoch: int


@dataclass(slots=True)
class Plan:
    """One step. Rows that decode come first, so that a step of only decodes has one token a row.

    `admitted` are those of the rows whose sequence did not run until now.
    """

    rows: list[Row]
    num_tokens: int
    num_prefill_tokens: int
    admitted: list[Row]


class Scheduler:
    """Plans steps over the sequences of one engine; whoever calls a method has the driver (see `FlightQueue`).

    A sequence is in exactly one place: `waiting` (in order of arrival), `running` (likewise), `paused`, or none once
    finished. Decoding sequences are planned before prefill chunks, so a long prompt never holds up a stream; both
    share `max_step_tokens`. When pages run out, paused sequences lose theirs first, then the latest arrival; they are
    recomputed later, from their tokens, in order of arrival. Nobody is admitted while a running sequence lacks pages,
    so the oldest always gets on and nobody starves.
    """

    def __init__(self, cache: KVCache, *, max_batch_size: int, max_step_tokens: int) -> None:
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paused: set[Sequence] = set()
        self._slots = deque(range(max_batch_size))

    @property
    def num_runnable(self) -> int:
        return len(self.waiting) + len(self.running)

    # -- what generations ask for ------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._enqueue(sequence)

    def pause(self, sequence: Sequence) -> None:
        """No further step is planned for it; it keeps its pages as long as nobody needs them."""
        if sequence.state in (State.WAITING, State.RUNNING):
            self._leave(sequence)
            sequence.state = State.PAUSED
            sequence.output.spent.go("paused")
            self.paused.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        if sequence.state is State.PAUSED:
            self.paused.remove(sequence)
            self._enqueue(sequence)
            sequence.output.spent.go("queue")

    def finish(self, sequence: Sequence) -> None:
        """Take it out for good. Its pages are free for the next plan; what is in flight will be dropped."""
        if sequence.finished:
            return
        self._leave(sequence)
        sequence.index_pages(self.cache)
        self.cache.release(sequence.pages)
        sequence.forget_pages()
        sequence.state = State.FINISHED

    # -- a step ------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run now (all is in flight, paused, or there is nothing)."""
        rows: list[Row] = []
        admitted: list[Row] = []
        prefilling: list[Sequence] = []
        budget, size = self.max_step_tokens, self.cache.page_size
        stuck = False  # somebody who runs cannot go on

        for sequence in tuple(self.running):  # some of them may be preempted on the way
            todo = sequence.num_todo
            if todo > 1:
                prefilling.append(sequence)
            elif todo and budget:
                # What is asked first holds nearly always: this is done for every token.
                room = sequence.num_planned < len(sequence.pages) * size and sequence.history_loaded
                if room or self._can_go_on(sequence, 1, rows):
                    rows.append(self._row(sequence, 1))
                    budget -= 1
                else:
                    stuck = True
        num_decoding = len(rows)
        for sequence in prefilling:
            count = min(sequence.num_todo, budget)
            if count and self._can_go_on(sequence, count, rows):
                rows.append(self._row(sequence, count))
                num_decoding += count == 1
                budget -= count
            elif count:
                stuck = True

        # With no row, whoever was short of pages has given them up to an older one that waits. Nothing may be in flight
        # that would bring another plan, so it is admitted now.
        while self.waiting and self._slots and budget > 0 and not (stuck and rows):
            sequence = self.waiting[0]
            if sequence.pending:  # preempted or resumed with tokens still in flight: known at the next commit
                break
            if not sequence.pages:
                self._reuse_prefix(sequence)
            count = min(sequence.num_todo, budget)
            if not self._grow(sequence, sequence.num_planned + count, rows, admitting=True):
                break
            self.waiting.pop(0)
            sequence.state = State.RUNNING
            sequence.slot = self._slots.popleft()
            sequence.history_loaded = False
            bisect.insort(self.running, sequence, key=_arrival)
            admitted.append(self._row(sequence, count))
            rows.append(admitted[-1])
            budget -= count

        if not rows:
            return None
        num_tokens = self.max_step_tokens - budget
        if num_tokens > len(rows):
            rows.sort(key=lambda row: row.count > 1)  # stable: one-token rows first
        return Plan(rows, num_tokens, num_tokens - num_decoding, admitted)

    def commit(self, plan: Plan, token_ids: list[int]) -> list[int]:
        """Take a finished step's tokens (one a row, meaningless where the row did not sample) to their sequences.

        Sequences that ended meanwhile drop theirs. Returns the indices of the rows whose sequence got a token.
        """
        advanced = []
        size, finished = self.cache.page_size, State.FINISHED
        for index, (row, token_id) in enumerate(zip(plan.rows, token_ids, strict=True)):
            sequence = row.sequence
            if row.samples:
                sequence.pending -= 1
            if sequence.state is finished:
                continue
            if row.samples:
                sequence.token_ids.append(token_id)
                advanced.append(index)
            end = row.start + row.count
            if end > sequence.num_cached and row.epoch == sequence.num_preemptions:
                sequence.num_cached = end
                if end // size > sequence.num_indexed:
                    sequence.index_pages(self.cache)
        return advanced

    # -- inside ------------------------------------------------------------------------------------------------

    def _can_go_on(self, sequence: Sequence, count: int, planned: list[Row]) -> bool:
        """Whether a sequence that was running can have `count` more tokens processed now; sees to it that it can."""
        if sequence.state is not State.RUNNING:
            return False  # it has just given its pages to another
        if not sequence.history_loaded and sequence.pending:
            return False  # its penalties were just switched on: the host must know every token first
        return self._grow(sequence, sequence.num_planned + count, planned)

    def _row(self, sequence: Sequence, count: int) -> Row:
        start, pending = sequence.num_planned, sequence.pending
        end, known = start + count, len(sequence.token_ids)
        samples = end == known + pending
        row = Row(
            sequence,
            start,
            count,
            samples,
            end > known,
            sequence.num_indexed * self.cache.page_size,
            sequence.pages,
            sequence.slot,
            not sequence.history_loaded,
            sequence.num_preemptions,
        )
        sequence.num_planned = end
        sequence.history_loaded = True
        if samples:
            sequence.pending = pending + 1
        return row

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Start from the pages that somebody else computed.

        The last token is always computed, since its logits are wanted: when the pages hold it too, it runs alone and
        its keys and values, already there, are not written (`Row.write_from`).
        """
        sequence.pages, sequence.digest = self.cache.match(sequence.token_ids)
        sequence.num_indexed = len(sequence.pages)
        reused = sequence.num_indexed * self.cache.page_size
        sequence.num_planned = sequence.num_cached = min(reused, len(sequence.token_ids) - 1)
        if sequence.output.scheduled_ns is None:  # after a preemption it finds its own pages again
            sequence.num_reused = sequence.num_cached

    def _grow(self, sequence: Sequence, tokens: int, planned: list[Row], *, admitting: bool = False) -> bool:
        """Pages for the first `tokens` tokens, taken if need be from others that are not in `planned`; False when there
        are none to take."""
        if tokens <= len(sequence.pages) * self.cache.page_size:
            return True
        missing = self.cache.pages_for(tokens) - len(sequence.pages)
        while (pages := self.cache.allocate(missing)) is None:
            victim = self._victim(sequence, planned, admitting)
            if victim is None:
                if not admitting and self._gives_way(sequence):
                    self._preempt(sequence)
                return False
            self._preempt(victim)
        sequence.pages.extend(pages)
        return True

    def _victim(self, asking: Sequence, planned: list[Row], admitting: bool) -> Sequence | None:
        holders = [paused for paused in self.paused if paused.pages]
        if holders:
            return max(holders, key=_arrival)
        # Resumed or half-admitted sequences wait with pages of their own.
        holders = [waiting for waiting in self.waiting if waiting.pages and waiting.arrival > asking.arrival]
        if holders:
            return max(holders, key=_arrival)
        if admitting:
            return None
        last = self.running[-1]
        if last.arrival <= asking.arrival or any(row.sequence is last for row in planned):
            return None
        return last

    def _gives_way(self, sequence: Sequence) -> bool:
        """Whether somebody older holds pages: running, or waiting with pages that it kept through a pause."""
        oldest_waiting = next((waiting for waiting in self.waiting if waiting.pages), sequence)
        return sequence is not self.running[0] or oldest_waiting.arrival < sequence.arrival

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.release(sequence.pages)
        sequence.forget_pages()
        sequence.num_preemptions += 1
        if sequence.state is not State.PAUSED:
            sequence.output.spent.go("preempted")
        if sequence.state is State.RUNNING:
            self._leave(sequence)
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_arrival)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PAUSED:
            self.paused.discard(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
