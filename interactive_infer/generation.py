"""What a cell holds in its hand: a text being written."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from interactive_infer.completion import Alternative, Completion, Timing, Token
from interactive_infer.core.output import FinishReason, Listeners, Output
from interactive_infer.core.sequence import Sequence, State
from interactive_infer.errors import EngineClosedError, InvalidRequestError, twin
from interactive_infer.interrupts import deferred_interrupts
from interactive_infer.prompts import whole_number
from interactive_infer.readers import Futures, Readers
from interactive_infer.sampling import SamplingParams

if TYPE_CHECKING:
    from interactive_infer.engine import Engine
    from interactive_infer.notebook.widgets.controls import Controls

_TOKENS_A_TURN = 64
_TURN_S = 0.001
"""An `async for` over tokens that are there already gives the loop a turn after so many of them, or so long."""


def _at_once() -> bool:
    return True


def _changed(output: Output, seen: int) -> bool:
    return output.changes != seen


class Generation:
    """One prompt being continued. Made by `Engine.generate`, `Engine.chat`, `branch` and `continue_`.

    - `await gen` gives the `Completion`; `async for token in gen` gives its tokens from the first one on, to any
      number of readers. Both belong to the engine's event loop. Awaiting always gives the loop a turn; iterating does
      where it waits, and at least every 64 tokens or 1 ms.
    - `pause`, `resume`, `cancel`, `update`, `branch` and `continue_` may be called from any thread. Once it has ended
      the first four do nothing: the end may always come between a look at `state` and the call.
    - Cancelling a reader that waits (an interrupted cell) cancels the generation; `asyncio.shield(gen)` protects it.
    - An unfinished generation keeps its engine alive; a finished one does not.
    - One that nothing refers to is cancelled, unless it is running and somebody has read or displayed it.
    - Each reader of a failure gets an exception of its own.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        prompt: str | None,
        params: SamplingParams,
        output: Output,
        num_continued: int = 0,
    ) -> None:
        self._engine: Engine | None = engine
        self._engine_ref = weakref.ref(engine)
        self._abandon: Callable[[Generation], None] | None = None  # whom to tell when nothing refers to it any more
        self.number = number
        """Counts the engine's generations from 1."""
        self.prompt = prompt
        """The prompt's text, or None when it was given as token ids."""
        self.params = params
        """The sampling parameters in force, at the end those it ended with; `params.seed` is the seed in use."""
        self._prompt_ids: list[int] | None = None  # None while a long prompt is tokenized
        self._output = output
        self._sequence: Sequence | None = None
        self._num_continued = num_continued  # tokens of the one that it continues, which `max_tokens` counts too
        self._was_held = False
        self._paused_early = False  # before its prompt was tokenized
        self._readers = Readers(output)
        self._listeners = Listeners([self._readers])
        output.attach(self._listeners)
        self._tokens: list[Token] = []
        self._tokens_lock = threading.Lock()
        self._num_decoded = 0  # of those tokens, for the timeline
        self._tokenizer = engine.tokenizer

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The text so far: never text that could still turn out to be part of a stop string or half a character."""
        return self._output.text

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens so far (those whose text is decided). From any thread."""
        return tuple(self._visible_tokens())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens generated so far."""
        return tuple(self._output.token_ids)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The prompt's token ids, or None while a long prompt is still being tokenized."""
        return tuple(self._prompt_ids) if self._prompt_ids is not None else None

    @property
    def state(self) -> Literal["waiting", "running", "paused", "finished"]:
        if self._output.finish_reason is not None:
            return "finished"
        if self._sequence is None:
            return "paused" if self._paused_early else "waiting"
        state = self._sequence.state
        return state.value if state is not State.FINISHED else "finished"

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop`, `length`, `cancelled` or `error`; None while unfinished."""
        return self._output.finish_reason

    @property
    def error(self) -> BaseException | None:
        """What made it fail, if it did."""
        return self._output.error

    @property
    def timing(self) -> Timing:
        output = self._output
        times, tokens_per_second = output.times_ns, None
        if len(times) > 1 and times[-1] > times[0]:
            tokens_per_second = (len(times) - 1) / ((times[-1] - times[0]) / 1e9)

        def since_call(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - output.created_ns) / 1e9

        return Timing(
            **{doing: ns / 1e9 for doing, ns in output.spent.now().items()},
            time_to_first_token=since_call(times[0] if times else None),
            total=since_call(output.finished_ns),
            tokens_per_second=tokens_per_second,
        )

    @property
    def completion(self) -> Completion:
        """What there is now, finished or not."""
        return Completion(self)

    @property
    def continued(self) -> Generation:
        """What this one's live view shows now: the generation that its Continue button made last, else this one."""
        from interactive_infer.notebook.display import continued

        return continued(self)

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._finished().__await__()

    def __aiter__(self) -> AsyncIterator[Token]:
        return _TokenReader(self)

    def future(self) -> asyncio.Future[Completion]:
        """A real asyncio future of the completion, for `asyncio.wait`; cancelling it cancels the generation."""
        self._begin_reading()
        future = asyncio.ensure_future(self._finished())
        # Cancelled before its first turn, the task never comes to `_changed`.
        future.add_done_callback(lambda ended: self.cancel() if ended.cancelled() else None)
        return future

    def result_sync(self) -> Completion:
        """The completion, from a synchronous cell or a script: steps the engine until this generation has ended.

        Other generations move on too. Patches nothing. An interrupt cancels this generation and raises
        KeyboardInterrupt.
        """
        if self._output.finish_reason is None:
            with deferred_interrupts() as interrupts:
                self._live_engine()._steps.drive_until([self], interrupts)
        return self._result()

    async def _finished(self) -> Completion:
        self._begin_reading()
        await self._until(self._readers.of_end, lambda: self._output.finish_reason is not None)
        return self._result()

    def _begin_reading(self) -> None:
        """A reader has come: the engine binds to its loop, and holds this generation until it ends."""
        if self._output.finish_reason is None:
            steps = self._live_engine()._steps
            steps.bind()
            steps.hold(self)

    async def _until(self, futures: Futures, come: Callable[[], bool]) -> None:
        """Wait as one of `futures` until what it is there for has `come`; one turn of the loop at least.

        Cancelled here: the generation is cancelled with its reader.
        """
        future = asyncio.get_running_loop().create_future()
        futures[future] = None
        try:
            if come():
                await asyncio.sleep(0)
            else:
                await future
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            futures.pop(future, None)

    def _result(self) -> Completion:
        if self._output.error is not None:
            raise twin(self._output.error)
        return self.completion

    def _visible_tokens(self) -> list[Token]:
        made = self._tokens
        if len(made) < len(self._output.token_ids):
            with self._tokens_lock:
                made += [self._token(index) for index in range(len(made), self._decode())]
        return made

    def _decode(self) -> int:
        """Decode what has come; returns the number of tokens whose text is decided."""
        output = self._output
        if output.detokenizer is None:
            return output.decode()
        start_ns = time.perf_counter_ns()
        visible = output.decode()
        if visible > self._num_decoded:
            self._num_decoded = visible
            self._decoded_since(start_ns)
        return visible

    def _decoded_since(self, start_ns: int) -> None:
        if (engine := self._engine_ref()) is not None:
            last = self._output.finish_reason is not None
            engine._decoding.add(start_ns, time.perf_counter_ns(), last=last)

    def _token(self, index: int) -> Token:
        token_id, text = self._output.token_ids[index], self._output.piece(index)
        at = self._output.logprobs.get(index)
        if at is None:
            return Token(token_id, text, index)
        start_ns = time.perf_counter_ns()
        alternatives = tuple(Alternative(id, self._text_of(id), logprob) for id, logprob in at.alternatives)
        self._decoded_since(start_ns)
        return Token(token_id, text, index, at.logprob, at.rank, alternatives)

    def _text_of(self, token_id: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))

    async def score(self, k: int = 5) -> tuple[Token, ...]:
        """The tokens so far with `logprob`, `rank` and the `k` (0 to 20) most likely `alternatives` of the model's own
        distribution, also where they were generated without `logprobs`.

        One forward pass over prompt and text, off the loop and apart from the engine's steps: it reads no cached page,
        and computes the logits of 64 positions at a time. Raises InvalidRequestError for `k`, EngineClosedError.
        """
        from interactive_infer.scoring import score

        return await score(self, k)

    # -- steering ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """No further step is planned; tokens already in flight (at most `steps_in_flight`) still arrive."""
        self._ask(lambda engine: engine._ledger.pause(self))

    def resume(self) -> None:
        """Go on after `pause`."""
        self._ask(lambda engine: engine._ledger.resume(self))

    def cancel(self) -> None:
        """End it now with `cancelled`; the partial text is kept. Nothing more is published. Ended already: nothing."""
        self._ask(lambda engine: engine._ledger.end(self.number, "cancelled"))

    def update(self, **changes: Any) -> bool:
        """Change sampling parameters from the next planned step on.

        Stop strings are looked for in the text of tokens that come from now on. `max_tokens` at or below what there is
        ends it with `length`.

        Returns whether it was unfinished; if not, `params` stay those that it ended with.
        Raises InvalidRequestError for an unknown or impossible value, and for what cannot change while running.
        """
        engine = self._engine_ref()
        params = self.params.updated(**changes)
        if engine is not None:
            params.validate_for(engine.vocab_size, engine._parts.eos_token_ids)
        if self._output.finish_reason is not None:
            return False
        self.params = params
        self._ask(lambda engine: engine._ledger.update(self, params))
        return True

    def branch(self, at: int, token: str | int | None = None, **changes: Any) -> Generation:
        """A new generation with this one's first `at` generated tokens, that goes its own way from there.

        `token` (a token id, or text of one or more tokens) is put in first. The shared part counts as generated: it
        is in the branch's `text`, `tokens`, penalties and `max_tokens`, as if the branch had been written from the
        start. Its pages are reused: less than one page is computed again. `changes` are sampling parameters; unless a
        seed is given a new one is drawn. Where the shared part and `token` are `max_tokens` tokens already, or fill the
        model's context, the branch ends at once with `length`.

        Raises InvalidRequestError when `at` is not an index of a token, 0 to the number of tokens so far; when shared
        part and `token` are more than `max_tokens`; and for `n`.
        """
        shared = self._shared(at)
        engine = self._live_engine()
        params = self._one_more({"seed": None, **changes})
        return engine._branch(self, params, shared + engine._prompts.forced_ids(token), self._num_continued)

    def continue_(self, max_tokens: int | None = None, **changes: Any) -> Generation:
        """A new generation that goes on where this one ended, for `max_tokens` more tokens (default: as many as this
        one was allowed).

        Where a stop token ended this one, that token is left out and cannot be drawn again at once.
        """
        shared = self._shared(len(self._output.token_ids))
        if shared and self._sequence is not None and shared[-1] in self._sequence.stop_ids:
            shared = shared[:-1]
            changes.setdefault("min_tokens", len(shared) + 1)
        if max_tokens is None:
            max_tokens = max(self.params.max_tokens - self._num_continued, 1)
        more = SamplingParams(max_tokens=max_tokens).max_tokens
        params = self._one_more({**changes, "max_tokens": len(shared) + more})
        return self._live_engine()._branch(self, params, shared, len(shared))

    def _one_more(self, changes: dict[str, Any]) -> SamplingParams:
        """Parameters of one generation made from this one."""
        params = self.params.replace(**{"n": 1, **changes})
        if params.n != 1:
            raise InvalidRequestError("n", params.n, "this makes one generation; call it again for more")
        return params

    def _shared(self, at: int) -> list[int]:
        token_ids = self._output.token_ids
        if whole_number(at) is None or not 0 <= at <= len(token_ids):
            raise InvalidRequestError("at", at, f"give the index of a generated token, 0 to {len(token_ids)} so far")
        if self._prompt_ids is None:
            raise InvalidRequestError("at", at, "the prompt is still being tokenized; await the first token before")
        return token_ids[:at]

    def _ask(self, what: Any) -> None:
        engine = self._engine
        if engine is not None and self._output.finish_reason is None:
            engine._steps.post(lambda: what(engine))

    def _live_engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None or engine.closed:
            raise EngineClosedError(
                "the engine of this generation is closed (or was dropped: nothing referred to it); load it again"
            )
        engine._check_process()
        return engine

    def _let_go(self) -> None:
        """It has ended: it keeps its engine alive no longer."""
        self._engine = self._abandon = None

    def __reduce__(self) -> Any:
        raise TypeError("a generation cannot be copied or pickled; its `completion` can")

    def __del__(self) -> None:
        # Nothing refers to it, and it has not ended: it comes to life again for as long as that takes. Python calls
        # this once at most. A garbage collector has cleared the weak references to what it found: attach again.
        abandon = getattr(self, "_abandon", None)
        if abandon is not None:
            self._let_go()
            self._output.attach(self._listeners)
            abandon(self)

    # -- display -----------------------------------------------------------------------------------------------

    def show(self) -> Generation:
        """Display the live stream now (in a notebook; elsewhere nothing) and return this generation.

        As the value of a cell's last line it is not displayed a second time.
        """
        from interactive_infer.notebook.display import show

        show(self)
        return self

    def controls(self) -> Controls:
        """Sliders and fields for its sampling parameters, as a widget.

        MissingPackageError without the [notebook] extra.
        """
        from interactive_infer.notebook.made import controls

        return controls(self)

    def _ipython_display_(self) -> None:
        from interactive_infer.notebook.display import show_as_value

        show_as_value(self)

    def __repr__(self) -> str:
        text = self.text
        shown = text if len(text) <= 60 else text[:57] + "..."
        return f"<Generation {self.number} {self.finish_reason or self.state}: {shown!r}>"


class _TokenReader:
    """One `async for` over a generation. Ends when it ends; raises what made it fail.

    It makes its own tokens and keeps none: did the generation keep what was read, then a million of them would be there
    for the garbage collector to look at.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._index = 0
        self._visible = 0
        generation._begin_reading()
        self._has_had_a_turn()

    def __aiter__(self) -> _TokenReader:
        return self

    async def __anext__(self) -> Token:
        generation, output = self._generation, self._generation._output
        if self._index >= self._turn_at or time.perf_counter() >= self._turn_due:
            await generation._until(generation._readers.of_news, _at_once)
            self._has_had_a_turn()
        while True:
            changes = output.changes
            ended = output.finish_reason is not None
            if self._visible <= self._index < len(output.token_ids):
                self._visible = generation._decode()
            if self._index < self._visible:
                self._index += 1
                return generation._token(self._index - 1)
            if ended:
                generation._result()
                raise StopAsyncIteration
            await generation._until(generation._readers.of_news, partial(_changed, output, changes))
            self._has_had_a_turn()

    def _has_had_a_turn(self) -> None:
        """The loop: the next one is due at that token, or at that time."""
        self._turn_at, self._turn_due = self._index + _TOKENS_A_TURN, time.perf_counter() + _TURN_S


class GenerationGroup(Seq[Generation]):
    """Several generations side by side: a sequence of them, with `pause`, `resume`, `cancel`, `update` and `show` for
    all at once.

    `await group` gives the list of completions, in order; cancelled there, all of them are. What belongs to one text
    (`async for`, `branch`, `continue_`, `future`) is asked of that one: `group[2].branch(at=5)`.
    """

    def __init__(self, generations: list[Generation]) -> None:
        self._generations = generations

    def __getitem__(self, index: Any) -> Any:
        return self._generations[index]

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        return self._finished().__await__()

    async def _finished(self) -> list[Completion]:
        for generation in self._generations:
            generation._begin_reading()
        try:
            return list(await asyncio.gather(*self._generations))
        except asyncio.CancelledError:
            self.cancel()  # those whose reader, a task of gather()'s, has not had its first turn too
            raise

    def result_sync(self) -> list[Completion]:
        """The completions, from a synchronous cell or a script; an interrupt cancels them all."""
        unfinished = [generation for generation in self._generations if generation.finish_reason is None]
        if unfinished:
            with deferred_interrupts() as interrupts:
                unfinished[0]._live_engine()._steps.drive_until(unfinished, interrupts)
        return [generation._result() for generation in self._generations]

    @property
    def texts(self) -> list[str]:
        return [generation.text for generation in self._generations]

    def pause(self) -> None:
        for generation in self._generations:
            generation.pause()

    def resume(self) -> None:
        for generation in self._generations:
            generation.resume()

    def cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def update(self, **changes: Any) -> bool:
        """`Generation.update` of each; returns whether any was unfinished."""
        return any([generation.update(**changes) for generation in self._generations])

    def show(self) -> GenerationGroup:
        """Display all streams now and return this group."""
        for generation in self._generations:
            generation.show()
        return self

    def controls(self) -> Controls:
        """Sliders and fields for the sampling parameters of all at once, as a widget."""
        from interactive_infer.notebook.made import controls

        return controls(self)

    def _ipython_display_(self) -> None:
        for generation in self._generations:
            generation._ipython_display_()

    def __repr__(self) -> str:
        return f"<GenerationGroup {self._generations!r}>"
