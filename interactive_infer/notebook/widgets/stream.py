"""One generation's tokens on their way to a front end, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from interactive_infer.notebook.display import goes_on, status
from interactive_infer.notebook.follower import WIDGET_RATE, Follower, Update, follow, on_driver
from interactive_infer.notebook.hostile import sound
from interactive_infer.notebook.widgets.panel import Message
from interactive_infer.timeline.analysis import duration

if TYPE_CHECKING:
    from interactive_infer.completion import Token
    from interactive_infer.generation import Generation
    from interactive_infer.timeline.steps import Step

_TOKENS_A_MESSAGE = 1_000
_ALTERNATIVES = 5
_VERBS = ("pause", "resume", "cancel", "continue")


class Stream:
    """Follows a generation for a front end; "Continue" has it follow the one that goes on.

    Messages to the front end hold what is new, and are numbered by their first token:
    - `{"run": r, "keep": k, "from": n, "tokens": […], "us": […], "count": c, "status": "…", "state": "…"}`: the texts
      of tokens n, n+1, …; how many microseconds each took (None: it was given, not drawn); that there are `c` by now.
      `logprobs` too, where they are known. Run r goes on from the first `k` tokens of run r-1.
    - `{"detail": i, "id": …, "logprob": …, "rank": …, "alternatives": [[id, text, logprob], …]}`: all about a token,
      or `{"detail": i, "problem": "…"}`. And, when it has been looked up, `{"made": i, "step": "…"}`: the step that
      drew it, in words; "" where none is on the timeline (any more).
    From it: `{"resend": n}` (it has n tokens and knows of more), `{"detail": i}`, `{"shade": true}` (it wants all
    logprobs), `{"do": "pause" | "resume" | "cancel" | "continue"}`.

    A generation made without `logprobs` is scored when they are first asked for, and again if it has grown since.

    Args:
        send: takes a message; called on the thread that drives the engine, or on the loop.
        spawn: runs a coroutine on the loop.
        ended: called once a run has ended, after its last message.
    """

    def __init__(
        self,
        generation: Generation,
        send: Callable[[Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.generation = generation
        self._send = send
        self._spawn = spawn
        self._ended = ended
        self._run = 0
        self._keep = 0
        self._num_sent = 0
        self._scored: tuple[Token, ...] = ()
        self._scoring = False
        self._wanted: set[int] = set()
        self._wants_all = False
        self._looked_for: int | None = None
        self._looking = False
        self._follower = Follower(generation, self._publish, rate=WIDGET_RATE)

    def start(self) -> None:
        """Begin; the engine holds the generation until it ends. From any thread."""
        follow(self.generation, self._follower.start)

    def stop(self) -> None:
        """Nobody shows it any more; the generation goes on. From any thread."""
        on_driver(self.generation, self._follower.stop)

    def seen(self, visible: bool) -> None:
        """Somebody looks at it, and gets what is new, or nobody does, and only the end is told. From any thread."""
        on_driver(self.generation, self._follower.reveal if visible else self._follower.hide)

    def hear(self, message: Message) -> None:
        """A message from the front end, on the loop. One that is not of this protocol is ignored."""
        match message:
            case {"resend": int(start)} if start >= 0:
                self._send(self.batch(start))
            case {"detail": int(index)} if 0 <= index < self._num_sent:
                self._explain(index)
                self._look_for_step(index)
            case {"shade": True}:
                self._send_logprobs()
            case {"do": str(verb)} if verb in _VERBS:
                if verb == "continue":
                    self._continue()
                else:
                    getattr(self.generation, verb)()

    # -- text --------------------------------------------------------------------------------------------------

    def batch(self, start: int) -> Message:
        """What was published from token `start` on, as much of it as goes into one message."""
        stop = min(start + _TOKENS_A_MESSAGE, self._num_sent)
        output = self.generation._output
        message: Message = {
            "run": self._run,
            "keep": self._keep,
            "from": start,
            "tokens": [sound(output.piece(index)) for index in range(start, stop)],
            "us": [self._micros(index) for index in range(start, stop)],
            "count": self._num_sent,
            "status": sound(status(self.generation)),
            "state": self.generation.state,
        }
        if output.logprobs or self._scored:
            message["logprobs"] = [self._logprob(index) for index in range(start, stop)]
        return message

    def _publish(self, update: Update) -> None:
        self._num_sent += len(update.pieces)
        self._send(self.batch(update.first))
        if update.final:
            self._ended()

    def _micros(self, index: int) -> int | None:
        output = self.generation._output
        drawn = index - output._num_preset
        if drawn < 0:
            return None
        times = output.times_ns
        return int(times[drawn] - (times[drawn - 1] if drawn else output.created_ns)) // 1000

    def _continue(self) -> None:
        before = self.generation
        if before.finish_reason is None:
            return  # it was pressed before the front end knew
        after = before.continue_()
        # A token that ended the text is left out, and a stop string comes back.
        same = 0
        for index in range(min(after._output.decode(), self._num_sent)):
            if after._output.piece(index) != before._output.piece(index):
                break
            same += 1
        goes_on(before, after)
        self.generation, self._run, self._keep, self._num_sent = after, self._run + 1, same, same
        self._scored, self._wanted = (), set()
        self._follower = Follower(after, self._publish, rate=WIDGET_RATE, first=same)
        self.start()

    # -- steps -------------------------------------------------------------------------------------------------

    def _look_for_step(self, index: int) -> None:
        """Of tokens that are asked for meanwhile, the last counts: somebody runs along the text."""
        self._looked_for = index
        if not self._looking:
            self._looking = True
            self._spawn(self._look_for_steps())

    async def _look_for_steps(self) -> None:
        try:
            while (index := self._looked_for) is not None:
                self._looked_for = None
                generation = self.generation
                engine = generation._engine_ref()
                if engine is None:
                    return
                # The records of thousands of steps are gone through: not on the loop.
                step = await asyncio.to_thread(engine.timeline.step_of, generation, index)
                if generation is self.generation:  # else it was continued meanwhile
                    self._send({"made": index, "step": "" if step is None else _in_words(step)})
        finally:
            self._looking = False

    # -- probabilities -----------------------------------------------------------------------------------------

    def _known(self, index: int) -> Any:
        """Its log-probabilities, if there are any: of the draw itself, else of the score."""
        drawn = self.generation._output.logprobs.get(index)
        if drawn is not None and (drawn.alternatives or index >= len(self._scored)):
            return drawn
        return self._scored[index] if index < len(self._scored) else None

    def _logprob(self, index: int) -> float | None:
        known = self._known(index)
        return None if known is None else round(known.logprob, 4)

    def _explain(self, index: int) -> None:
        known = self._known(index)
        if known is None:
            self._wanted.add(index)
            self._score()
            return
        pairs = [(one if isinstance(one, tuple) else (one.id, one.logprob)) for one in known.alternatives]
        self._send(
            {
                "detail": index,
                "id": self.generation._output.token_ids[index],
                "logprob": known.logprob,
                "rank": known.rank,
                "alternatives": [[id, sound(self.generation._text_of(id)), logprob] for id, logprob in pairs],
            }
        )

    def _send_logprobs(self) -> None:
        """All of them; those that are not known yet once they are."""
        if any(self._known(index) is None for index in range(self._num_sent)):
            self._wants_all = True
            self._score()
        else:
            self._spawn(self._send_known_logprobs(self._num_sent))

    async def _send_known_logprobs(self, count: int) -> None:
        count, run = min(count, self._num_sent), self._run
        for start in range(0, count, _TOKENS_A_MESSAGE):
            logprobs = [self._logprob(index) for index in range(start, min(start + _TOKENS_A_MESSAGE, count))]
            self._send({"run": run, "count": self._num_sent, "from": start, "logprobs": logprobs})
            await asyncio.sleep(0)
            if run != self._run:
                return

    def _score(self) -> None:
        if not self._scoring:
            self._scoring = True
            self._spawn(self._score_all())

    async def _score_all(self) -> None:
        generation = self.generation
        try:
            while generation is self.generation and (self._wanted or self._wants_all):
                wanted, self._wanted = self._wanted, set()
                all_wanted, self._wants_all = self._wants_all, False
                try:
                    scored = await generation.score(k=_ALTERNATIVES)
                except Exception as error:
                    self._give_up(wanted, str(error))
                    if all_wanted:
                        raise
                    continue
                if generation is not self.generation:
                    break  # it was continued meanwhile
                self._scored = scored
                self._give_up({index for index in wanted if index >= len(scored)}, "its prompt is not known yet")
                for index in sorted(wanted):
                    if index < len(scored):
                        self._explain(index)
                if all_wanted:
                    await self._send_known_logprobs(len(scored))
        finally:
            self._scoring = False
            if self._wanted or self._wants_all:  # of the text that goes on
                self._score()

    def _give_up(self, wanted: set[int], why: str) -> None:
        for index in sorted(wanted):
            self._send({"detail": index, "problem": sound(f"no probabilities: {why}")})


def _in_words(step: Step) -> str:
    texts = "1 text" if step.batch_size == 1 else f"{step.batch_size:,} texts"
    return f"step {step.step_id:,}: {step.kind} of {texts}, {duration(step.duration_ns)}"
