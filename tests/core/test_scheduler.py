"""Scheduler, KV cache and flights under arbitrary use, on a device that keeps books instead of computing.

The simulated device executes a step the moment it is launched, as the one stream of a real device would. In place of
keys and values it writes what they would depend on: the tokens up to that position, and the version of the weights. So
a row that would read a page of another text, an unwritten or an overwritten one, is found at once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from interactive_infer.core import kv_cache
from interactive_infer.core.flight import FlightQueue
from interactive_infer.core.kv_cache import NULL_PAGE, KVCache
from interactive_infer.core.output import Output
from interactive_infer.core.scheduler import Plan, Row, Scheduler
from interactive_infer.core.sequence import Sequence, State
from interactive_infer.core.step import StepResult
from interactive_infer.errors import DeviceError
from interactive_infer.sampling import SamplingParams
from interactive_infer.timeline.recorder import Recorder
from interactive_infer.waiting import Completion

EOS = 9
TOKENS = st.integers(0, 3)
# Prompts share long prefixes often: mostly one token, now and then another.
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 1]), min_size=1, max_size=24)
RECORDER = Recorder()


class Text:
    """What really happened to one sequence, as the device knows it."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.tokens = list(sequence.token_ids)  # those in flight included
        self.penalties = False
        self.weights = 0  # their version when it took its first page


class Device:
    """A stand-in for the runner: checks every row that is launched and notes what it would write."""

    def __init__(self, cache: KVCache, limits: tuple[int, int]) -> None:
        self.cache = cache
        self.max_batch_size, self.max_step_tokens = limits
        self.weights = 0
        self.texts: dict[Sequence, Text] = {}
        self.content: dict[tuple[int, int], tuple[Any, ...] | None] = {}
        self.writers: dict[tuple[int, int], int] = {}
        self.last_token: dict[int, int] = {}
        self.counted: dict[int, list[int]] = {}
        self.launched: list[tuple[Plan, Completion[StepResult], StepResult]] = []
        self.num_launched = 0
        self.num_landed = 0
        self.draw: list[int] = [0]
        self.held_by: dict[int, set[Sequence]] = {}

    def launch(self, plan: Plan) -> Completion[StepResult]:
        self.num_launched += 1
        assert 1 <= len(plan.rows) <= self.max_batch_size, "batch limit"
        assert plan.num_tokens == sum(row.count for row in plan.rows) <= self.max_step_tokens, "token budget"
        assert len({row.sequence for row in plan.rows}) == len(plan.rows), "a sequence is planned twice"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot is planned twice"
        assert all(0 <= row.slot < self.max_batch_size for row in plan.rows)
        counts = [row.count for row in plan.rows]
        assert counts == sorted(counts, key=lambda count: count > 1), "rows of one token come first"
        self.held_by = defaultdict(set)
        for text in self.texts.values():
            for page in text.sequence.pages:
                self.held_by[page].add(text.sequence)
        for row in plan.rows:
            self._check(row)
        for row in plan.rows:
            self._load(row)
        for row in plan.rows:  # all rows write, then all read: one packed forward
            self._write(row)
        for row in plan.rows:
            self._read(row)
        tokens = [self._sample(index, row) if row.samples else -1 for index, row in enumerate(plan.rows)]
        completion: Completion[StepResult] = Completion()
        self.launched.append((plan, completion, StepResult(tokens, [], {})))
        return completion

    def scrub(self, pages: list[int]) -> None:
        holders = [page for text in self.texts.values() for page in set(text.sequence.pages)]
        for page in pages:
            if page != NULL_PAGE:
                assert page not in self.cache._digest, "a page is zeroed that the index offers"
                assert holders.count(page) <= 1, "a page is zeroed that another sequence reads"
            for offset in range(self.cache.page_size):
                self.content[page, offset] = None

    def land(self, error: Exception | None = None, invalid: int | None = None) -> None:
        _, completion, result = self.launched.pop(0)
        self.num_landed += 1
        if invalid is not None:
            result.token_ids[invalid] = -1
            result.invalid.append(invalid)
        if error is None:
            completion.set_result(result)
            return
        for where, writer in self.writers.items():
            if writer == self.num_landed:
                self.content[where] = None
        completion.set_exception(error)

    def _check(self, row: Row) -> None:
        sequence, text = row.sequence, self.texts[row.sequence]
        end = row.start + row.count
        assert sequence.state is State.RUNNING, "only running sequences are planned"
        assert row.count >= 1
        assert end <= len(text.tokens), "tokens are planned that nobody has drawn"
        assert row.samples == (end == len(text.tokens)), "a row samples exactly at the end of its text"
        assert row.pages == sequence.pages[: len(row.pages)]
        assert len(row.pages) == self.cache.pages_for(end), "a row has the pages that it needs and no more"
        assert len(set(row.pages)) == len(row.pages)
        assert NULL_PAGE not in row.pages
        assert end <= sequence.max_length, "a text grows past its limit"

    def _load(self, row: Row) -> None:
        sequence, text = row.sequence, self.texts[row.sequence]
        if row.load_history:
            assert sequence.token_ids == text.tokens, "the history is loaded while tokens of it are in flight"
            self.counted[row.slot] = list(sequence.token_ids)
        known = sequence.token_ids[row.start : row.start + row.count]
        if row.from_device:
            known = [*known, self.last_token[row.slot]]
        assert known == text.tokens[row.start : row.start + row.count], "wrong input tokens"

    def _write(self, row: Row) -> None:
        text, size = self.texts[row.sequence], self.cache.page_size
        for position in range(max(row.start, row.write_from), row.start + row.count):
            page = row.pages[position // size]
            assert page not in self.cache._digest, "a page is written that the index offers"
            assert self.cache._refs[page] == 1, "a shared page is written"
            assert self.held_by[page] == {row.sequence}, "a page is written that another sequence holds"
            context = [self._at(row, p) for p in range(position) if p < row.start]
            weights = min([self.weights, *(entry[1] for entry in context if entry is not None)])
            self.content[page, position % size] = (tuple(text.tokens[: position + 1]), weights)
            self.writers[page, position % size] = self.num_launched

    def _read(self, row: Row) -> None:
        text = self.texts[row.sequence]
        for position in range(row.start + row.count):
            entry = self._at(row, position)
            assert entry is not None, "a page is read that was never written, or whose step failed"
            assert entry[0] == tuple(text.tokens[: position + 1]), "a page is read that holds another text"
            assert entry[1] >= text.weights, "a page of old weights is reused"

    def _at(self, row: Row, position: int) -> tuple[Any, ...] | None:
        size = self.cache.page_size
        return self.content.get((row.pages[position // size], position % size))

    def _sample(self, index: int, row: Row) -> int:
        text = self.texts[row.sequence]
        if text.penalties:
            assert self.counted[row.slot] == text.tokens, "penalties count the wrong tokens"
        token = self.draw[index % len(self.draw)]
        text.tokens.append(token)
        self.last_token[row.slot] = token
        if text.penalties:  # without penalties the device counts nothing
            self.counted[row.slot].append(token)
        return token


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancels, pauses, resumes, branches, stops and failures in any order, with few pages."""

    scheduler_class: ClassVar[type[Scheduler]] = Scheduler
    cache_class: ClassVar[type[KVCache]] = KVCache

    @initialize(
        num_pages=st.integers(2, 8),
        page_size=st.integers(1, 4),
        max_batch_size=st.integers(1, 4),
        max_step_tokens=st.integers(1, 9),
        steps_in_flight=st.sampled_from([2, 2, 1, 3]),
    )
    def build(
        self, num_pages: int, page_size: int, max_batch_size: int, max_step_tokens: int, steps_in_flight: int
    ) -> None:
        machine = self

        class Watched(self.cache_class):  # type: ignore[misc, name-defined]
            def commit(self, page: int, parent: bytes, token_ids: Any) -> bytes:
                machine.on_commit(page)
                return super().commit(page, parent, token_ids)

        self.cache = Watched(num_pages, page_size)
        self.scheduler = self.scheduler_class(
            self.cache, max_batch_size=max_batch_size, max_step_tokens=max_step_tokens
        )
        self.device = Device(self.cache, (max_batch_size, max_step_tokens))
        self.flights = FlightQueue(
            self.scheduler,
            self.device,
            RECORDER,
            max_in_flight=steps_in_flight,  # type: ignore[arg-type]
        )
        self.max_length = num_pages * page_size
        self.count = 0
        self.steps = 0

    def on_commit(self, page: int) -> None:
        for offset in range(self.cache.page_size):
            writer = self.device.writers.get((page, offset), 0)
            assert writer, "a page is indexed that nobody wrote"
            assert writer <= self.device.num_landed, "a page is indexed whose step has not been committed"

    # -- what users do -----------------------------------------------------------------------------------------

    def start(self, prompt: list[int], max_tokens: int) -> None:
        self.count += 1
        sequence = Sequence(
            self.count,
            prompt,
            SamplingParams(max_tokens=max_tokens),
            Output(None, (), []),
            token_limit=self.max_length,
            stop_ids=frozenset([EOS]),
        )
        self.device.texts[sequence] = Text(sequence)
        self.scheduler.add(sequence)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.device.texts if not sequence.finished]

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 40))
    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        if self.count < 12:
            self.start(prompt[: self.max_length - 1], max_tokens)

    @precondition(lambda self: self.device.texts and self.count < 12)
    @rule(data=st.data(), token=st.none() | TOKENS, max_tokens=st.integers(1, 40))
    def branch(self, data: st.DataObject, token: int | None, max_tokens: int) -> None:
        parent = data.draw(st.sampled_from(list(self.device.texts)))
        at = data.draw(st.integers(parent.prompt_length, len(parent.token_ids)))
        shared = parent.token_ids[:at] + ([] if token is None else [token])
        if len(shared) < self.max_length:
            self.start(shared, max_tokens)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), what=st.sampled_from(["pause", "pause", "resume", "resume", "finish"]))
    def steer(self, data: st.DataObject, what: str) -> None:
        sequence = data.draw(st.sampled_from(self.unfinished))
        getattr(self.scheduler, what)(sequence)
        if what == "pause":
            assert sequence.state is State.PAUSED
        if what == "finish":
            assert not sequence.pages, "pages come back at the next plan"

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), on=st.booleans())
    def update_penalties(self, data: st.DataObject, on: bool) -> None:
        text = self.device.texts[data.draw(st.sampled_from(self.unfinished))]
        if on and not text.penalties:
            text.sequence.history_loaded = False
        text.penalties = on

    @rule()
    def change_weights(self) -> None:
        """What `Engine.reset_prefix_cache` is for."""
        self.device.weights += 1
        self.cache.clear()

    # -- what the engine does ----------------------------------------------------------------------------------

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=4), stop=st.integers(0, 15))
    def launch(self, tokens: list[int], stop: int) -> None:
        if stop < len(tokens):
            tokens[stop] = EOS
        self.device.draw = tokens
        before = set(self.scheduler.paused)
        flight = self.flights.begin()
        if flight is not None:
            assert not before & {row.sequence for row in flight.plan.rows}, "a paused sequence is planned"

    @precondition(lambda self: len(self.flights))
    @rule()
    def land(self) -> None:
        self.device.land()
        self.settle()

    @precondition(lambda self: len(self.flights))
    @rule()
    def fail(self) -> None:
        flight = self.flights.oldest
        assert flight is not None
        hit = [row.sequence for row in flight.plan.rows if not row.sequence.finished]
        self.device.land(error=RuntimeError("the device failed"))
        self.settle()
        for sequence in hit:
            assert sequence.finished
            assert isinstance(sequence.output.error, DeviceError)

    @precondition(lambda self: len(self.flights))
    @rule(data=st.data())
    def overflow(self, data: st.DataObject) -> None:
        """A row's logits are NaN."""
        flight = self.flights.oldest
        assert flight is not None
        sampling = [index for index, row in enumerate(flight.plan.rows) if row.samples]
        if not sampling:
            return
        index = data.draw(st.sampled_from(sampling))
        sequence = flight.plan.rows[index].sequence
        ended = sequence.finished
        self.device.land(invalid=index)
        self.settle()
        assert sequence.finished
        assert ended or isinstance(sequence.output.error, DeviceError)

    def settle(self) -> None:
        flight = self.flights.oldest
        assert flight is not None
        finished = {sequence: len(sequence.token_ids) for sequence in self.device.texts if sequence.finished}
        self.flights.finish(flight)
        for sequence, length in finished.items():
            assert len(sequence.token_ids) == length, "a finished sequence got a token"

    # -- what must always hold ---------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        texts = self.device.texts
        self.cache.check(held=[sequence.pages for sequence in texts])
        running, waiting, paused = self.scheduler.running, self.scheduler.waiting, self.scheduler.paused
        for place, state in ((running, State.RUNNING), (waiting, State.WAITING), (paused, State.PAUSED)):
            assert set(place) == {sequence for sequence in texts if sequence.state is state}
            assert len(set(place)) == len(place)
        for queue in (running, waiting):
            assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots)
        assert all(sequence.slot == -1 for sequence in texts if sequence not in running)
        for sequence, text in texts.items():
            assert sequence.token_ids == text.tokens[: len(sequence.token_ids)], "tokens reached the wrong text"
            assert sequence.output.token_ids == sequence.token_ids[sequence.prompt_length :]
            if not sequence.pages:
                text.weights = self.device.weights
            if sequence.finished:
                assert not sequence.pages
                continue
            assert EOS not in sequence.token_ids[sequence.prompt_length :]
            assert sequence.length == len(text.tokens)
            assert 0 <= sequence.pending <= len(self.flights)
            assert sequence.num_cached <= sequence.num_planned <= sequence.length

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.device.draw = [2, 3]
        self.drain()  # paused ones keep their pages as long as nobody needs them, and no longer
        for sequence in list(self.scheduler.paused):
            self.scheduler.resume(sequence)
        self.drain()
        assert not (self.scheduler.waiting or self.scheduler.running or self.scheduler.paused)
        for sequence in self.device.texts:
            if sequence.output.finish_reason == "length":
                assert len(sequence.token_ids) == sequence.max_length
        assert self.cache.num_held == 0, "a page has leaked"
        assert len(self.scheduler._slots) == self.scheduler.max_batch_size, "a slot has leaked"

    def drain(self) -> None:
        """Run as the engine does until nothing can: everyone who may run ends, in a bounded number of steps."""
        bound = 20 + 4 * self.max_length * len(self.device.texts) * (len(self.device.texts) + 1)
        for _ in range(bound):
            while self.flights.begin() is not None:
                self.books_agree()
            if not len(self.flights):
                break
            self.device.land()
            self.settle()
            self.books_agree()
        assert not len(self.flights), "somebody starves"
        assert self.scheduler.num_runnable == 0, "nothing is in flight, nothing is planned, and somebody waits"


SETTINGS = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_order_of_events_keeps_every_page_and_ends_everyone() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


def sequence_of(arrival: int, prompt: list[int], *, token_limit: int) -> Sequence:
    return Sequence(
        arrival,
        prompt,
        SamplingParams(max_tokens=100),
        Output(None, (), []),
        token_limit=token_limit,
        stop_ids=frozenset([EOS]),
    )


def run(scheduler: Scheduler, steps: int) -> list[list[tuple[int, int, int]]]:
    """Plan and commit that many steps at most; returns (arrival, start, count) of each step's rows."""
    seen = []
    for _ in range(steps):
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan, [7] * len(plan.rows))
        for row in plan.rows:
            if len(row.sequence.token_ids) >= row.sequence.max_length:
                scheduler.finish(row.sequence)
        seen.append([(row.sequence.arrival, row.start, row.count) for row in plan.rows])
    return seen


def test_one_that_waits_with_its_pages_gets_on_though_a_younger_one_runs_out_of_them() -> None:
    scheduler = Scheduler(KVCache(6, 2), max_batch_size=1, max_step_tokens=8)
    old, young = sequence_of(1, [1] * 5, token_limit=12), sequence_of(2, [2] * 3, token_limit=12)
    scheduler.add(old)
    run(scheduler, 1)
    scheduler.pause(old)
    scheduler.add(young)
    run(scheduler, 1)
    scheduler.resume(old)  # it still has its pages, and waits for the only slot
    run(scheduler, 100)
    assert old.finished
    assert young.finished
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0


def test_decoding_goes_first_and_a_long_prompt_takes_what_is_left() -> None:
    scheduler = Scheduler(KVCache(100, 4), max_batch_size=4, max_step_tokens=8)
    scheduler.add(sequence_of(1, [1] * 3, token_limit=100))
    run(scheduler, 1)
    scheduler.add(sequence_of(2, [2] * 20, token_limit=100))
    scheduler.add(sequence_of(3, [3] * 3, token_limit=100))
    assert run(scheduler, 4) == [
        [(1, 3, 1), (2, 0, 7)],
        [(1, 4, 1), (2, 7, 7)],
        [(1, 5, 1), (3, 0, 1), (2, 14, 6)],
        [(1, 6, 1), (2, 20, 1), (3, 1, 2)],
    ]


def test_who_is_preempted_comes_back_in_order_of_arrival() -> None:
    scheduler = Scheduler(KVCache(6, 2), max_batch_size=4, max_step_tokens=32)
    texts = [sequence_of(i, [i] * 3, token_limit=12) for i in (1, 2, 3)]
    for text in texts:
        scheduler.add(text)
    ended: list[int] = []
    for _ in range(100):
        if not run(scheduler, 1):
            break
        ended += [text.arrival for text in texts if text.finished and text.arrival not in ended]
    assert ended == [1, 2, 3]
    assert texts[0].num_preemptions == 0
    assert texts[2].num_preemptions > 0


def test_the_paused_lose_their_pages_first() -> None:
    scheduler = Scheduler(KVCache(6, 2), max_batch_size=4, max_step_tokens=32)
    texts = [sequence_of(i, [i] * 3, token_limit=12) for i in (1, 2, 3)]
    for text in texts:
        scheduler.add(text)
    run(scheduler, 1)
    scheduler.pause(texts[0])
    run(scheduler, 3)
    assert not texts[0].pages
    assert texts[1].num_preemptions == texts[2].num_preemptions == 0


# -- the machine must be able to fail --------------------------------------------------------------------------


class ForgetsToRelease(Scheduler):
    def finish(self, sequence: Sequence) -> None:
        if not sequence.finished:
            self._leave(sequence)
            sequence.forget_pages()
            sequence.state = State.FINISHED


class ReleasesTwice(Scheduler):
    def _preempt(self, sequence: Sequence) -> None:
        pages = list(sequence.pages)
        super()._preempt(sequence)
        self.cache.release(pages)


class WritesSharedPages(Scheduler):
    def _row(self, sequence: Sequence, count: int) -> Row:
        row = super()._row(sequence, count)
        row.write_from = 0
        return row


class IndexesBeforeCommit(Scheduler):
    def plan(self) -> Plan | None:
        plan = super().plan()
        for row in plan.rows if plan is not None else ():
            row.sequence.num_cached = row.sequence.num_planned
            row.sequence.index_pages(self.cache)
        return plan


class TakesOldStepsForNew(Scheduler):
    def commit(self, plan: Plan, token_ids: list[int]) -> list[int]:
        for row in plan.rows:
            row.epoch = row.sequence.num_preemptions
        return super().commit(plan, token_ids)


class NeverPreempts(Scheduler):
    def _victim(self, asking: Sequence, planned: set[Sequence], admitting: bool) -> Sequence | None:
        return None


class OverspendsItsBudget(Scheduler):
    def plan(self) -> Plan | None:
        self.max_step_tokens += 1
        try:
            return super().plan()
        finally:
            self.max_step_tokens -= 1


class KeepsStaleHistory(Scheduler):
    def _row(self, sequence: Sequence, count: int) -> Row:
        row = super()._row(sequence, count)
        row.load_history &= sequence.num_preemptions == 0
        return row


class RunsThePaused(Scheduler):
    def pause(self, sequence: Sequence) -> None:
        self.paused.add(sequence)


class HandsOutHeldPages(KVCache):
    def allocate(self, count: int) -> list[int] | None:
        pages = super().allocate(count)
        if pages and any(refs == 1 for refs in self._refs[1 : pages[0]]):
            held = next(page for page in range(1, pages[0]) if self._refs[page] == 1)
            self._refs[held] += 1
            self._refs[pages[0]] -= 1
            self._free.append(pages[0])
            pages[0] = held
        return pages


class ForgetsNoWeights(KVCache):
    def clear(self) -> None:
        pass


class KeepsItsRoot(KVCache):
    def clear(self) -> None:
        root = self._root
        super().clear()
        self._root = root


def _digest_without_parent(parent: bytes, token_ids: Any) -> bytes:
    return _page_digest(b"", token_ids)


_page_digest = kv_cache.page_digest

MUTANTS = (
    ForgetsToRelease,
    ReleasesTwice,
    WritesSharedPages,
    IndexesBeforeCommit,
    TakesOldStepsForNew,
    NeverPreempts,
    OverspendsItsBudget,
    KeepsStaleHistory,
    RunsThePaused,
    HandsOutHeldPages,
    ForgetsNoWeights,
    KeepsItsRoot,
)
FINDS = settings(
    SETTINGS,
    max_examples=20000,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
)


def fails(**classes: type) -> bool:
    try:
        run_state_machine_as_test(type("Mutant", (SchedulerMachine,), classes), settings=FINDS)
    except (AssertionError, RuntimeError, LookupError, ValueError):
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_machine_finds(mutant: type) -> None:
    assert fails(**{"cache_class" if issubclass(mutant, KVCache) else "scheduler_class": mutant})


def test_the_machine_finds_pages_known_by_their_own_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "page_digest", _digest_without_parent)
    assert fails()
