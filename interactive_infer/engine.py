"""The engine: a loaded model, its KV cache, and a step loop that runs on the caller's own event loop.

The loop never waits for the device. Steps run on the device's thread; the loop's task awaits their completions, and
commits and launches in between, a fraction of a millisecond at a time. While nothing is unfinished the engine has no
task at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, overload

from interactive_infer.core.output import FinishReason, Output
from interactive_infer.core.sampler import penalized
from interactive_infer.core.sequence import Sequence
from interactive_infer.errors import (
    EngineClosedError,
    InferError,
    InvalidRequestError,
    PromptTooLongError,
)
from interactive_infer.generation import Generation, GenerationGroup
from interactive_infer.info import EngineInfo
from interactive_infer.interrupts import deferred_interrupts
from interactive_infer.progress import ProgressBar
from interactive_infer.prompts import Prompt, whole_number
from interactive_infer.sampling import SamplingParams
from interactive_infer.step_loop import StepLoop, Waiting
from interactive_infer.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interactive_infer.assembly import Parts


class Engine:
    """A model that continues texts, as tasks on the event loop of whoever uses it. Make one with `Engine.load`.

    An engine binds to the running loop at its first asynchronous use; it binds again once that loop is closed or
    nothing is unfinished, and raises WrongLoopError otherwise. An idle engine that nothing refers to is closed.
    """

    def __init__(self, parts: Parts, *, waiting: Waiting) -> None:
        self.model: PreTrainedModel = parts.model
        self.tokenizer: PreTrainedTokenizerBase | None = parts.tokenizer
        self.name: str = parts.name
        self.vocab_size: int = parts.vocab_size
        self.max_length: int = parts.max_length
        """Longest text, prompt and continuation together, in tokens."""
        self.timeline: Timeline = parts.timeline
        self.closed = False
        self._parts = parts
        self._prompts = parts.prompts
        self._waiting = waiting
        self._count = 0
        self._steps = StepLoop(
            self, parts.scheduler, parts.flights, parts.timeline.recorder, waiting=waiting, name=parts.name
        )

    # -- loading and closing -----------------------------------------------------------------------------------

    @classmethod
    async def load(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel | None = None,
        *,
        tokenizer: Any = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        kv_cache_tokens: int | None = None,
        page_size: int = 16,
        max_batch_size: int | None = None,
        max_step_tokens: int | None = None,
        waiting: Waiting = "thread",
        steps_in_flight: int = 2,
        progress: bool = True,
        freeze_gc: bool = True,
    ) -> Engine:
        """Load a model off the loop, drawing a progress bar on it.

        `model`: None for the default (SmolLM2-135M-Instruct), a Hub id, a folder, a `.gguf` file, or a transformers
        model object, which is used in place without a copy and stays usable by its owner.
        `kv_cache_tokens`: capacity of the KV cache (default: enough for a few long texts, at most 1 GiB; see `info`).
        `page_size`: tokens a page. `max_batch_size`: sequences a step; `max_step_tokens`: tokens a step, prefill
        included. `waiting`: how the loop waits for the device ("spin" and "block" are for study: they hold it).
        `freeze_gc`: on the first load of the process, move everything alive out of the garbage collector's sight
        (`gc.freeze`): a full collection over torch and transformers would stall every thread for about 160 ms.

        Raises InvalidRequestError, ModelNotFoundError, ModelLoadError or UnsupportedModelError.
        """
        options = _options(kv_cache_tokens, page_size, max_batch_size, max_step_tokens, waiting, steps_in_flight)
        loop = asyncio.get_running_loop()
        with ProgressBar(progress) as bar:

            def report(stage: str, done: float) -> None:
                loop.call_soon_threadsafe(bar.update, stage, done)

            engine = await asyncio.to_thread(cls._load, model, tokenizer, device, dtype, options, report, waiting)
        if freeze_gc:
            _freeze_gc()
        engine._steps.bind()
        return engine

    @classmethod
    def load_sync(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel | None = None,
        *,
        tokenizer: Any = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        kv_cache_tokens: int | None = None,
        page_size: int = 16,
        max_batch_size: int | None = None,
        max_step_tokens: int | None = None,
        waiting: Waiting = "thread",
        steps_in_flight: int = 2,
        progress: bool = True,
        freeze_gc: bool = True,
    ) -> Engine:
        """`load` for a script or a synchronous cell."""
        options = _options(kv_cache_tokens, page_size, max_batch_size, max_step_tokens, waiting, steps_in_flight)
        with ProgressBar(progress) as bar:
            engine = cls._load(model, tokenizer, device, dtype, options, bar.update, waiting)
        if freeze_gc:
            _freeze_gc()
        return engine

    @classmethod
    def _load(
        cls,
        model: Any,
        tokenizer: Any,
        device: Any,
        dtype: Any,
        options: dict[str, Any],
        report: Callable[[str, float], None],
        waiting: Waiting,
    ) -> Engine:
        from interactive_infer.assembly import assemble

        if "ipykernel" in sys.modules:  # here rather than at the first display, where it would hold the loop
            with contextlib.suppress(ImportError):
                import interactive_infer.notebook.widgets.token_view  # noqa: F401

        parts = assemble(model, tokenizer=tokenizer, device=device, dtype=dtype, progress=report, **options)
        return cls(parts, waiting=waiting)

    async def close(self) -> int:
        """Cancel what is unfinished, wait for the device, free everything; returns the bytes given back.

        Weights count only if this engine loaded them. Closed already: 0.
        """
        if self.closed:
            return 0
        self._steps.bind()
        self._end_all()
        while (flight := self._parts.flights.oldest) is not None:
            await asyncio.to_thread(flight.completion.wait)
            self._steps.settle(flight)
        return self._shut_down()

    def close_sync(self) -> int:
        """`close` for a script or a synchronous cell."""
        if self.closed:
            return 0
        self._end_all()
        while (flight := self._parts.flights.oldest) is not None:
            flight.completion.wait()
            self._steps.settle(flight)
        return self._shut_down()

    def _end_all(self) -> None:
        """Cancel everything; nothing starts any more."""
        self.closed = True
        self._steps.drain()
        for generation in self._steps.unfinished():
            self._finish(generation, "cancelled")
        self._steps.close()

    def _shut_down(self) -> int:
        self.closed = True
        self._steps.close()
        freed = self._parts.close()
        if self._parts.owned:
            del self.model
        return freed

    def __del__(self) -> None:
        # An unfinished generation or a step in flight would refer to it, so there is neither.
        if not getattr(self, "closed", True):
            self._shut_down()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sync()

    # -- asking ------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **sampling: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Seq[Any], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup: ...

    def generate(
        self, prompt: Prompt | Seq[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup:
        """Continue a prompt (text, or token ids); returns at once.

        A list of prompts, or `n` above 1, gives a GenerationGroup (prompt by prompt, `n` of each). `sampling` are
        fields of SamplingParams. May be called from any thread.

        Raises InvalidRequestError (unknown or impossible parameters, an empty prompt, token ids outside the
        vocabulary), PromptTooLongError, EngineClosedError. For text of more than 2,000 characters, what needs its
        tokens is raised at the first reader instead.
        """
        self._check_open()
        params = SamplingParams.make(params, **sampling)
        params.validate_for(self.vocab_size)
        prompts, many = self._prompts.split(prompt)
        prepared = [self._prompts.prepare(one) for one in prompts]  # all are checked before any is queued
        generations = []
        for text, ids in prepared:
            generations += [self._start(text, ids, params.with_seed(sample), []) for sample in range(params.n)]
        return GenerationGroup(generations) if many or params.n > 1 else generations[0]

    def chat(
        self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup:
        """Answer a conversation (`[{"role": "user", "content": "…"}, …]`) with the model's chat template."""
        self._check_open()
        text = self._prompts.render_chat(messages)
        params = SamplingParams.make(params, **sampling)
        params.validate_for(self.vocab_size)
        ids = self._prompts.tokenize(text, "messages", add_special_tokens=False)
        self._prompts.check_length(text, ids, "messages")
        generations = [self._start(text, ids, params.with_seed(sample), []) for sample in range(params.n)]
        return GenerationGroup(generations) if params.n > 1 else generations[0]

    def generate_sync(self, prompt: Any, params: SamplingParams | None = None, **sampling: Any) -> Any:
        """`generate` for a script or a synchronous cell: the Completion, or the list of them for a group.

        On a running loop the engine's steps are driven inline, nothing is patched, other generations move on too.
        An interrupt cancels the generation and raises KeyboardInterrupt.
        """
        with deferred_interrupts() as interrupted:
            asked = self.generate(prompt, params, **sampling)
            self._steps.drive_until([asked] if isinstance(asked, Generation) else list(asked), interrupted)
        return asked.result_sync()

    def info(self) -> EngineInfo:
        """What is loaded, how it runs, and how full it is."""
        self._check_open()
        return self._parts.info(self._waiting)

    def reset_prefix_cache(self) -> None:
        """Forget reusable pages: to be called after the model's weights were changed."""
        self._check_open()
        self._steps.post(self._parts.cache.clear)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Engine {self.name} closed>"
        scheduler = self._parts.scheduler
        return f"<Engine {self.name}: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting>"

    # -- generations -------------------------------------------------------------------------------------------

    def _start(
        self, prompt: str | None, ids: list[int] | None, params: SamplingParams, preset: list[int]
    ) -> Generation:
        """Make a generation and queue it. `ids` None: the text is long and is tokenized on a thread first."""
        self._check_open()
        if ids is not None and len(ids) + len(preset) >= self.max_length:
            raise PromptTooLongError(
                "token",
                preset,
                f"prompt and shared part have {len(ids) + len(preset):,} tokens, the limit is {self.max_length:,}",
            )
        params = params.with_seed()
        self._count += 1
        number = self._count
        output = Output(self._prompts.detokenizer(ids or []), tuple(params.stop), preset, params.min_tokens)
        generation = Generation(self, number, prompt, params, output)
        self._steps.register(generation)
        if ids is not None:
            generation._prompt_ids = ids
            self._queue(generation, number, ids, preset)
        else:
            assert prompt is not None
            threading.Thread(
                target=self._tokenize_and_queue,
                args=(generation, number, prompt),
                daemon=True,
                name="interactive_infer tokenizer",
            ).start()
        return generation

    def _queue(self, generation: Generation, number: int, ids: list[int], preset: list[int]) -> None:
        """Give the scheduler its sequence, on whichever thread drives."""
        params, output, stop_ids = generation.params, generation._output, self._stop_ids(generation.params)
        sequence = Sequence(number, ids + preset, params, output, token_limit=self.max_length, stop_ids=stop_ids)
        sequence.prompt_length = len(ids)
        generation._sequence = sequence
        self._steps.post(lambda: self._parts.scheduler.add(sequence) if output.finish_reason is None else None)

    def _tokenize_and_queue(self, generation: Generation, number: int, prompt: str) -> None:
        try:
            ids = self._prompts.tokenize(prompt)
            self._prompts.check_length(prompt, ids, "prompt")
        except Exception as error:
            problem = error if isinstance(error, InferError) else InvalidRequestError("prompt", prompt, str(error))
            self._steps.post(lambda: self._finish(generation, "error", problem))
            return
        generation._prompt_ids = ids
        generation._output.detokenizer = self._prompts.detokenizer(ids)
        self._queue(generation, number, ids, [])

    # What generations ask for, each on the driver's thread.

    def _pause(self, generation: Generation) -> None:
        if generation._sequence is not None:
            self._parts.scheduler.pause(generation._sequence)
            self._steps.rest(generation)
            generation._output.notify()

    def _resume(self, generation: Generation) -> None:
        if generation._sequence is not None:
            self._parts.scheduler.resume(generation._sequence)
            if generation._was_held:
                self._steps.hold(generation)
            generation._output.notify()

    def _update(self, generation: Generation, params: SamplingParams) -> None:
        sequence = generation._sequence
        if sequence is None or sequence.finished:
            return
        if penalized(params) and not penalized(sequence.params):
            sequence.history_loaded = False
        sequence.params = params
        sequence.params_dirty = True
        sequence.stop_ids = self._stop_ids(params)
        if len(sequence.token_ids) >= sequence.max_length:
            self._finish(generation, "length")

    def _finish(self, generation: Generation, reason: FinishReason, error: BaseException | None = None) -> None:
        output = generation._output
        if output.finish_reason is not None:
            return
        if generation._sequence is not None:
            self._parts.scheduler.finish(generation._sequence)
        output.finish(reason, error)
        self._steps.release(generation.number)
        output.notify()

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self._parts.eos_token_ids

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("this engine is closed; load it again with Engine.load")


_MOST = {
    "kv_cache_tokens": 1 << 40,
    "page_size": 1024,
    "max_batch_size": 4096,
    "max_step_tokens": 1 << 20,
    "steps_in_flight": 16,
}


def _options(
    kv_cache_tokens: int | None,
    page_size: int,
    max_batch_size: int | None,
    max_step_tokens: int | None,
    waiting: str,
    steps_in_flight: int,
) -> dict[str, Any]:
    """The options that are not the model's, checked before anything is loaded."""
    options: dict[str, Any] = {
        "kv_cache_tokens": kv_cache_tokens,
        "page_size": page_size,
        "max_batch_size": max_batch_size,
        "max_step_tokens": max_step_tokens,
        "steps_in_flight": steps_in_flight,
    }
    for argument, value in list(options.items()):
        if value is None and argument not in ("page_size", "steps_in_flight"):
            continue
        number, most = whole_number(value), _MOST[argument]
        if number is None or not 1 <= number <= most:
            raise InvalidRequestError(argument, value, f"must be a whole number, 1 to {most:,}")
        options[argument] = number
    if waiting not in ("thread", "spin", "block"):
        raise InvalidRequestError("waiting", waiting, 'must be "thread", "spin" or "block"')
    return options


def _freeze_gc() -> None:
    """Once a process: what is alive after a load stays alive, so later collections need not look at it."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
