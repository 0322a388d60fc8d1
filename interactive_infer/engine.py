"""The engine: a loaded model, its KV cache, and a step loop that runs on the caller's own event loop.

The loop never waits for the device. Steps run on the device's thread; the loop's task awaits their completions, and
commits and launches in between, a fraction of a millisecond at a time. While nothing is unfinished the engine has no
task at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from interactive_infer.core.output import Output
from interactive_infer.defaults import Defaults
from interactive_infer.errors import EngineClosedError, InferError, InvalidRequestError, PromptTooLongError, twin
from interactive_infer.generation import Generation, GenerationGroup
from interactive_infer.info import EngineInfo
from interactive_infer.interrupts import deferred_interrupts
from interactive_infer.ledger import Ledger
from interactive_infer.options import EngineOptions, Waiting
from interactive_infer.progress import ProgressBar
from interactive_infer.prompts import SHORT_TEXT, Prompt
from interactive_infer.sampling import SamplingParams
from interactive_infer.step_loop import StepLoop
from interactive_infer.timeline import Timeline
from interactive_infer.timeline.gathered import Gathered
from interactive_infer.timeline.recorder import Phase

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interactive_infer.assembly import Parts
    from interactive_infer.notebook.widgets.controls import Controls
    from interactive_infer.notebook.widgets.monitor import Monitor
    from interactive_infer.notebook.widgets.playground import Playground

_TEXTS_A_BATCH = 64  # of those that a thread tokenizes: the first are queued before the last are known
_PATIENCE_S = 0.05


class Engine:
    """A model that continues texts, as tasks on the event loop of whoever uses it. Make one with `Engine.load`.

    An engine binds to the running loop at its first asynchronous use. Awaiting or iterating on another moves it there,
    unless its own still runs and unfinished generations are read or displayed on it: then WrongLoopError is raised.
    `generate`, `chat` and what steers a generation may be called from any thread, on whatever loop or none. An idle
    engine that nothing refers to is closed.
    """

    def __init__(self, parts: Parts, options: EngineOptions) -> None:
        self.model: PreTrainedModel = parts.model
        self.tokenizer: PreTrainedTokenizerBase | None = parts.tokenizer
        self.name: str = parts.name
        self.vocab_size: int = parts.vocab_size
        self.max_length: int = parts.max_length
        """Longest text, prompt and continuation together, in tokens."""
        self.timeline: Timeline = parts.timeline
        self.defaults = Defaults()
        """What holds for calls that are given no SamplingParams: `engine.defaults.update(temperature=0.7)`."""
        self.closed = False
        """Whether `close` is done. From its call on nothing new is taken."""
        self._closing = False
        self._process = os.getpid()
        self._parts = parts
        self._prompts = parts.prompts
        self._options = options
        self._numbers = itertools.count(1)
        self._decoding = Gathered(parts.timeline.recorder, Phase.DETOKENIZE)
        self._ledger = Ledger(
            parts.scheduler, parts.flights, eos_token_ids=parts.eos_token_ids, max_length=parts.max_length
        )
        self._steps = StepLoop(
            self,
            parts.scheduler,
            parts.flights,
            self._ledger,
            parts.timeline.recorder,
            waiting=options.waiting,
            name=parts.name,
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
        page_size: int | None = None,
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
        `kv_cache_tokens`: capacity of the KV cache (default: on a CPU enough for a few long texts, at most 1 GiB; on a
        card three tenths of the memory that is free once the model is there; see `info`). `page_size`: tokens a page
        (default 16, on a card 64). `max_batch_size`: sequences a step (64; 256); `max_step_tokens`: tokens a step,
        prefill included (256; 2,048). `waiting`: how the loop waits for the device ("spin" and "block" are for study:
        they hold it).
        `freeze_gc`: on the first load of the process, move everything alive out of the garbage collector's sight
        (`gc.freeze`): a full collection over torch and transformers would stall every thread.

        Raises InvalidRequestError, ModelNotFoundError, ModelLoadError or UnsupportedModelError.
        """
        options = EngineOptions(
            kv_cache_tokens=kv_cache_tokens,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            waiting=waiting,
            steps_in_flight=steps_in_flight,
        )
        loop = asyncio.get_running_loop()
        with ProgressBar(progress) as bar:

            def report(stage: str, done: float) -> None:
                with contextlib.suppress(RuntimeError):  # cancelled, and the loop is closed: nobody looks at the bar
                    loop.call_soon_threadsafe(bar.update, stage, done)

            engine = await asyncio.to_thread(cls._load, model, tokenizer, device, dtype, options, report, freeze_gc)
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
        page_size: int | None = None,
        max_batch_size: int | None = None,
        max_step_tokens: int | None = None,
        waiting: Waiting = "thread",
        steps_in_flight: int = 2,
        progress: bool = True,
        freeze_gc: bool = True,
    ) -> Engine:
        """`load` for a script or a synchronous cell."""
        options = EngineOptions(
            kv_cache_tokens=kv_cache_tokens,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            waiting=waiting,
            steps_in_flight=steps_in_flight,
        )
        with ProgressBar(progress) as bar:
            return cls._load(model, tokenizer, device, dtype, options, bar.update, freeze_gc)

    @classmethod
    def _load(
        cls,
        model: Any,
        tokenizer: Any,
        device: Any,
        dtype: Any,
        options: EngineOptions,
        report: Callable[[str, float], None],
        freeze_gc: bool,
    ) -> Engine:
        from interactive_infer.assembly import assemble

        if "ipykernel" in sys.modules:  # here rather than at the first display, where it would hold the loop
            with contextlib.suppress(ImportError):
                import interactive_infer.notebook.widgets.token_view  # noqa: F401

        parts = assemble(model, tokenizer=tokenizer, device=device, dtype=dtype, progress=report, options=options)
        if "ipykernel" in sys.modules:
            from interactive_infer.notebook.cells import record_cells

            record_cells(parts.timeline.recorder)
        if freeze_gc and gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
        return cls(parts, options)

    async def close(self) -> int:
        """Cancel what is unfinished, wait for the device, free everything; returns the bytes given back.

        Weights count only if this engine loaded them. Closed already: 0. Once called it is carried out, also when its
        caller is cancelled. Several calls all return when the engine is closed, one of them with the bytes.
        """
        if self.closed:
            return 0
        self._steps.bind()
        self._steps.turn(self._begin_to_close)  # readers are told now, unless another thread is in a turn
        # A thread of the loop's own pool: no cancellation reaches it, and asyncio.run waits for it at its end.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.close_sync))

    def close_sync(self) -> int:
        """`close` for a script or a synchronous cell. Raises ReentrantStepError inside a step."""
        if self.closed:
            return 0
        self._steps.check_not_inside()
        freed: list[int] = []
        while not self._steps.turn(self._begin_to_close, patience=_PATIENCE_S):
            pass
        while (flight := self._parts.flights.oldest) is not None:
            flight.completion.wait()
            self._steps.settle(flight, patience=_PATIENCE_S)
        while not self._steps.turn(partial(self._shut_down, freed), patience=_PATIENCE_S):
            pass
        return sum(freed)

    def _begin_to_close(self) -> None:
        """In a turn: cancel everything; nothing starts any more."""
        self._closing = True
        self._steps.drain()
        self._steps.close()
        self._ledger.close()

    def _shut_down(self, freed: list[int]) -> None:
        """In a turn, once nothing is in flight."""
        if self.closed:
            return
        try:
            freed.append(self._parts.close())
            if self._parts.owned:
                del self.model
        finally:
            self.closed = True

    def __del__(self) -> None:
        # Nobody is in a turn, which would refer to it, and nothing is in flight but what a loop left that was closed.
        # What is unfinished nobody refers to either.
        if not getattr(self, "closed", True):
            self._begin_to_close()
            self._shut_down([])

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
    def generate(self, prompt: str, params: None = None, *, n: Literal[1] = 1, **sampling: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Prompt | Seq[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup: ...

    def generate(
        self, prompt: Prompt | Seq[Prompt], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup:
        """Continue a prompt (text, or token ids); returns at once.

        A list of prompts, or `n` above 1, gives a GenerationGroup (prompt by prompt, `n` of each). `sampling` are
        fields of SamplingParams. May be called from any thread. Each generation takes the caller some 20 µs.

        Raises InvalidRequestError (unknown or impossible parameters, an empty prompt, token ids outside the
        vocabulary), PromptTooLongError, EngineClosedError. Text of more than 2,000 characters in all is tokenized on a
        thread; what needs its tokens is raised at the first reader instead.
        """
        self._check_open()
        params = self._params(params, sampling)
        prompts, many = self._prompts.split(prompt)
        prepared = self._prompts.prepare(prompts)  # all are checked before any is queued
        asked = [self._several(text, ids, params) for text, ids in prepared]
        generations = [one for several in asked for one in several]
        self._queue([(one, one._prompt_ids, []) for one in generations if one._prompt_ids is not None])
        texts = [(text, asked[i]) for i, (text, ids) in enumerate(prepared) if text is not None and ids is None]
        if texts:
            self._on_a_thread(partial(self._tokenize, texts))
        return GenerationGroup(generations) if many or params.n > 1 else generations[0]

    @overload
    def chat(
        self, messages: Seq[Mapping[str, Any]], params: None = None, *, n: Literal[1] = 1, **sampling: Any
    ) -> Generation: ...
    @overload
    def chat(
        self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup: ...

    def chat(
        self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None, **sampling: Any
    ) -> Generation | GenerationGroup:
        """Answer a conversation (`[{"role": "user", "content": "…"}, …]`) with the model's chat template.

        As `generate`; a conversation of more than 2,000 characters is put into the template on a thread, and what the
        template refuses is raised at the first reader.
        """
        self._check_open()
        params = self._params(params, sampling)
        conversation = self._prompts.check_chat(messages)
        if sum(len(str(message["content"])) for message in conversation) <= SHORT_TEXT:
            text, ids = self._prompts.render_chat(conversation)
            generations = self._several(text, ids, params)
            self._queue([(generation, ids, []) for generation in generations])
        else:
            generations = self._several(None, None, params)
            self._on_a_thread(partial(self._render, conversation, generations))
        return GenerationGroup(generations) if params.n > 1 else generations[0]

    def generate_sync(self, prompt: Any, params: SamplingParams | None = None, **sampling: Any) -> Any:
        """`generate` for a script or a synchronous cell: the Completion, or the list of them for a group.

        On a running loop the engine's steps are driven inline, nothing is patched, other generations move on too.
        Called on several threads at once, they take turns; beside a loop that runs on another thread, that one drives.
        An interrupt cancels the generation and raises KeyboardInterrupt (or what the process' own handler raises).
        ReentrantStepError in a hook or callback that runs inside a step.
        """
        with deferred_interrupts() as interrupts:
            asked = self.generate(prompt, params, **sampling)
            self._steps.drive_until([asked] if isinstance(asked, Generation) else asked, interrupts)
        return asked.result_sync()

    def controls(self) -> Controls:
        """Sliders and fields for `defaults`, as a widget. MissingPackageError without the [notebook] extra."""
        from interactive_infer.notebook.made import controls

        return controls(self)

    def monitor(self) -> Monitor:
        """How full and how busy this engine is, as a live widget."""
        from interactive_infer.notebook.made import monitor

        return monitor(self)

    def playground(self) -> Playground:
        """A prompt or a conversation, parameters, samples side by side and a history, as a widget."""
        from interactive_infer.notebook.made import playground

        return playground(self)

    def info(self) -> EngineInfo:
        """What is loaded, how it runs, and how full it is."""
        self._check_open()
        return self._parts.info(self._options.waiting)

    def reset_prefix_cache(self) -> None:
        """Forget what was computed from the model's weights: to be called after they were changed."""
        self._check_open()
        self._parts.device.follow_caller()  # on a card the change itself may still be under way
        self._steps.post(self._parts.weights_changed)

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be copied or pickled: it holds a model, a device and threads; share this one")

    def __repr__(self) -> str:
        if self.closed:
            return f"<Engine {self.name} closed>"
        scheduler = self._parts.scheduler
        return f"<Engine {self.name}: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting>"

    # -- generations -------------------------------------------------------------------------------------------

    def _params(self, params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        made = SamplingParams.make(params if params is not None else self.defaults.params, **sampling)
        made.validate_for(self.vocab_size, self._parts.eos_token_ids)
        return made

    def _several(self, prompt: str | None, ids: list[int] | None, params: SamplingParams) -> list[Generation]:
        return [self._make(prompt, ids, params.with_seed(sample)) for sample in range(params.n)]

    def _make(
        self,
        prompt: str | None,
        ids: list[int] | None,
        params: SamplingParams,
        preset: Seq[int] = (),
        num_continued: int = 0,
    ) -> Generation:
        """A generation that is owed an end. `ids` None: its prompt is tokenized on a thread first."""
        detokenizer = self._prompts.detokenizer(ids) if ids is not None else None
        output = Output(detokenizer, params.stop, list(preset), params.min_tokens)
        generation = Generation(self, next(self._numbers), prompt, params, output, num_continued)
        generation._prompt_ids = ids
        generation._abandon = self._steps.abandon
        self._ledger.enter(generation)
        return generation

    def _branch(
        self, parent: Generation, params: SamplingParams, preset: list[int], num_continued: int = 0
    ) -> Generation:
        """Queue a generation whose first tokens are given."""
        self._check_open()
        params.validate_for(self.vocab_size, self._parts.eos_token_ids)
        ids = parent._prompt_ids
        assert ids is not None
        if len(preset) > params.max_tokens:
            raise InvalidRequestError(
                "max_tokens",
                params.max_tokens,
                f"the shared part and the token put in are {len(preset):,} tokens already; give a larger max_tokens=",
            )
        if len(ids) + len(preset) > self.max_length:
            raise PromptTooLongError(
                "token",
                preset[-1],
                f"prompt and shared part have {len(ids) + len(preset):,} tokens, the limit is {self.max_length:,}",
            )
        generation = self._make(parent.prompt, ids, params.with_seed(), preset, num_continued)
        self._queue([(generation, ids, preset)])
        return generation

    def _queue(self, asked: list[tuple[Generation, list[int], list[int]]]) -> None:
        """Have the scheduler given their sequences: prompt and preset tokens of each."""

        def queue() -> None:
            for generation, ids, preset in asked:
                self._ledger.queue(generation, ids, preset)

        self._steps.post(queue)

    # On a thread of its own: what takes long before a prompt is token ids.

    def _on_a_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True, name="interactive_infer tokenizer").start()

    def _tokenize(self, texts: list[tuple[str, list[Generation]]]) -> None:
        for batch in _batches(texts):
            try:
                tokenized = self._prompts.tokenize([text for text, _ in batch])
            except Exception as error:
                for text, generations in batch:
                    self._refuse(generations, "prompt", text, error)
                continue
            for (text, generations), ids in zip(batch, tokenized, strict=True):
                try:
                    self._prompts.check_length(text, ids, "prompt")
                except InferError as error:
                    self._refuse(generations, "prompt", text, error)
                else:
                    self._tokenized(generations, ids)

    def _render(self, conversation: list[dict[str, Any]], generations: list[Generation]) -> None:
        try:
            text, ids = self._prompts.render_chat(conversation)
        except Exception as error:
            self._refuse(generations, "messages", conversation, error)
            return
        for generation in generations:
            generation.prompt = text
        self._tokenized(generations, ids)

    def _tokenized(self, generations: list[Generation], ids: list[int]) -> None:
        for generation in generations:
            generation._output.detokenizer = self._prompts.detokenizer(ids)
            generation._prompt_ids = ids
        self._queue([(generation, ids, []) for generation in generations])

    def _refuse(self, generations: list[Generation], argument: str, value: object, error: Exception) -> None:
        problem = error if isinstance(error, InferError) else InvalidRequestError(argument, value, str(error))

        def refuse() -> None:
            for generation in generations:
                self._ledger.end(generation.number, "error", twin(problem))

        self._steps.post(refuse)

    def _check_open(self) -> None:
        if self._closing or self.closed:
            raise EngineClosedError("this engine is closed; load it again with Engine.load")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosedError(
                f"this engine belongs to process {self._process}, whose threads a fork does not copy; load one in this "
                "process, and start it with multiprocessing's 'spawn'"
            )


def _batches(texts: list[tuple[str, list[Generation]]]) -> Iterator[list[tuple[str, list[Generation]]]]:
    for start in range(0, len(texts), _TEXTS_A_BATCH):
        yield texts[start : start + _TEXTS_A_BATCH]
