"""From what a caller gives as a prompt to token ids, checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

from interactive_infer.core.detokenizer import Detokenizer, TokenTexts
from interactive_infer.errors import InvalidRequestError, PromptTooLongError

Prompt = str | Sequence[int]

# Text up to this many characters in all is tokenized at the call (well under a millisecond), more on a thread.
SHORT_TEXT = 2_000


class Prompts:
    """The checks of prompts for one model. Errors name the argument, and come before anything is queued."""

    def __init__(
        self, tokenizer: Any, tokenizer_problem: str | None, *, vocab_size: int, max_length: int, limits: str
    ) -> None:
        """`max_length`: the longest text, prompt and continuation, in tokens; `limits` says in words where it comes
        from. `tokenizer` None: prompts are token ids, and `tokenizer_problem` says why."""
        self.vocab_size = vocab_size
        self.max_length = max_length
        self._tokenizer = tokenizer
        self._problem = tokenizer_problem or "this engine has no tokenizer"
        self._limits = limits
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer | None:
        """For a text that continues `prompt_ids`; None without a tokenizer."""
        return Detokenizer(self._texts, prompt_ids) if self._texts is not None else None

    def split(self, prompt: Any) -> tuple[list[Prompt], bool]:
        """The prompts that were given, and whether they were given as a list."""
        if isinstance(prompt, str):
            return [prompt], False
        single = not hasattr(prompt, "__iter__") or getattr(prompt, "ndim", 1) == 0
        if single or isinstance(prompt, bytes | Mapping | Set):
            raise InvalidRequestError(
                "prompt", prompt, "give text, a list of token ids, or a list of those (for messages there is chat())"
            )
        items = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if not items:
            raise InvalidRequestError("prompt", prompt, "is empty; give some text, or token ids")
        if _are_ids(items):
            return [items], False
        for item in items:
            if not isinstance(item, str) and not (isinstance(item, Sequence) and item and _are_ids(item)):
                raise InvalidRequestError("prompt", item, "each prompt is text or a list of token ids, and not empty")
        return items, True

    def prepare(self, prompts: Sequence[Prompt]) -> list[tuple[str | None, list[int] | None]]:
        """Checked prompts: the text of each if it has one, and its token ids unless the texts are long."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_text(text, "prompt")
        tokenized: list[list[int]] = []
        at_once = sum(map(len, texts)) <= SHORT_TEXT
        if texts and at_once:
            tokenized = self.tokenize(texts)
        rest = iter(tokenized)
        prepared: list[tuple[str | None, list[int] | None]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = next(rest) if at_once else None
            else:
                ids = list(map(int, prompt))
                if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                    for token_id in ids:
                        self._check_id("prompt", token_id)
            if ids is not None:
                self.check_length(prompt, ids, "prompt")
            prepared.append((prompt if isinstance(prompt, str) else None, ids))
        return prepared

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of checked texts. The batch call releases the GIL, the single one does not."""
        batch = self._tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
        return [list(ids) for ids in batch["input_ids"]]

    def _check_text(self, text: str, argument: str) -> None:
        if not text:
            raise InvalidRequestError(argument, text, "is empty; give some text, or token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                argument, text, f"holds half a character at {error.start} (a lone surrogate), which no text has"
            ) from None
        if self._tokenizer is None:
            raise InvalidRequestError(argument, text, f"{self._problem}; give token ids, or load with tokenizer=")

    def check_length(self, prompt: object, ids: Sequence[int], argument: str) -> None:
        if not ids:
            raise InvalidRequestError(argument, prompt, "is empty; there is no token to continue from")
        if len(ids) >= self.max_length:
            raise PromptTooLongError(
                argument,
                prompt,
                f"has {len(ids):,} tokens, and at most {self.max_length - 1:,} fit with one more to come "
                f"({self._limits}): shorten it, or load with a larger kv_cache_tokens=",
            )

    def check_chat(self, messages: Any) -> list[dict[str, Any]]:
        """A conversation, checked and copied."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError("messages", messages, 'give a list of messages, each {"role": …, "content": …}')
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise InvalidRequestError("messages", message, 'a message needs "role" and "content"')
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "messages", messages, "this model has no chat template; use generate() with a prompt of your own"
            )
        return [dict(message) for message in messages]

    def render_chat(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """The text that the model's chat template makes of `messages`, up to where the answer begins; and its ids."""
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise InvalidRequestError("messages", messages, f"the chat template refused them: {error}") from error
        self._check_text(text, "messages")
        (ids,) = self.tokenize([text], add_special_tokens=False)
        self.check_length(text, ids, "messages")
        return text, ids

    def forced_ids(self, token: Any) -> list[int]:
        """Token ids that a branch puts in: `token` as an id, or as text; none for None."""
        if token is None:
            return []
        if (token_id := whole_number(token)) is not None:
            self._check_id("token", token_id)
            return [token_id]
        if not isinstance(token, str) or not token:
            raise InvalidRequestError("token", token, "give a token id or some text")
        self._check_text(token, "token")
        return self.tokenize([token], add_special_tokens=False)[0]

    def _check_id(self, argument: str, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                argument, token_id, f"is not a token id of this model (0 to {self.vocab_size - 1})"
            )


def _are_ids(items: Sequence[Any]) -> bool:
    """Whether these are token ids. InvalidRequestError where only the first ones are."""
    if all(map(_whole, set(map(type, items)))):  # type by type: there may be tens of thousands of them
        return True
    if _whole(type(items[0])):
        other = next(item for item in items if not _whole(type(item)))
        raise InvalidRequestError("prompt", other, "stands among token ids and is none: those are whole numbers")
    return False


def _whole(kind: type) -> bool:
    return issubclass(kind, numbers.Integral) and not issubclass(kind, bool)


def whole_number(value: Any) -> int | None:
    """`value` as an int if it is a whole number (Python's or NumPy's, and not a bool), else None."""
    return int(value) if _whole(type(value)) else None
