"""Token ids to text, one piece per token, safe inside a multi-byte character; and stop strings across pieces.

A token of a byte-level, byte-fallback or Metaspace tokenizer is a fixed run of bytes, whatever stands beside
it (but for the first token of a text). So the bytes of each token are worked out once, and an incremental
UTF-8 decoder puts them together: the cost of a token is the same everywhere.
`tokenizers.decoders.DecodeStream` is not used: it keeps everything since the last text it gave out, and so
takes quadratic time over tokens without text (special tokens, bytes that never become a character).

Every other tokenizer (WordPiece, slow ones) is asked to decode a short window of tokens twice, without and
with the new token; the difference is the new token's text.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_HELD = 8
"""Tokens that the window decoder holds back at most; a character is no longer than 4 bytes."""

PROMPT_TAIL = 32
"""Tokens at the prompt's end that the window decoder begins with."""


class TokenTexts:
    """What the tokens of one tokenizer decode to; kept by whoever makes many detokenizers for it.

    `tokenizer` is a transformers tokenizer. Special tokens, and ids that it does not know, have no text. Text
    is that of the tokenizer's own decoder, without transformers' `clean_up_tokenization_spaces`, which
    rewrites text that has been given out already.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes: dict[int, bytes] = {}
        self._decoder: list[dict[str, Any]] | None = None
        self._specials: frozenset[int]
        if self.backend is None:
            self._specials = frozenset(tokenizer.all_special_ids)
            return
        added = self.backend.get_added_tokens_decoder()
        self._specials = frozenset(token_id for token_id, token in added.items() if token.special)
        if self.backend.decoder is not None:
            self._decoder = _known_decoder(json.loads(self.backend.decoder.__getstate__()))

    @property
    def has_bytes(self) -> bool:
        """Whether a token's bytes do not depend on its neighbours, so that `bytes_of` may be called."""
        return self._decoder is not None

    @property
    def leading_spaces(self) -> int:
        """How many spaces the very first token of a text loses at most."""
        for step in self._decoder or ():
            if step["type"] == "Strip":
                return 1
            if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
                return sys.maxsize
        return 0

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes inside a text; b"" for a special token or an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            assert self._decoder is not None and self.backend is not None
            token = None if token_id in self._specials else self.backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _token_bytes(token, self._decoder)
        return known

    def decode(self, ids: Sequence[int]) -> str:
        """The tokenizer's own decoding of `ids`, none of them special."""
        if self.backend is not None:
            text: str = self.backend.decode(ids, skip_special_tokens=True)
            return text
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Detokenizer:
    """The text of one output, token by token, as it continues the text of its prompt.

    The pieces of `push` and the text of `flush`, joined, are the decoding of prompt and output together after
    that of the prompt: the first piece keeps its space unless the prompt has no text. A character that the
    prompt leaves unfinished belongs to the piece that finishes it. No piece ends inside a character, and no
    text is ever taken back. Bytes that are not UTF-8 become U+FFFD, one for each maximal part of a character
    (Unicode 15, section 3.9), also among byte-fallback tokens, where tokenizers' own decoder, which sees the
    end of a run first, replaces every byte of a run that holds a bad one.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        """`tokenizer`: a transformers tokenizer, or the `TokenTexts` of one."""
        texts = tokenizer if isinstance(tokenizer, TokenTexts) else TokenTexts(tokenizer)
        self._stream = _ByteStream(texts, prompt_ids) if texts.has_bytes else _WindowStream(texts, prompt_ids)

    def push(self, ids: Iterable[int]) -> list[str]:
        """A piece for each of the next tokens: "" for a special one and while a character is unfinished."""
        return self._stream.push(ids)

    @property
    def holding(self) -> bool:
        """Whether the last token began a character that is not finished."""
        return self._stream.holding

    def flush(self) -> str:
        """What is still held when no more tokens come: "", or U+FFFD for an unfinished character."""
        return self._stream.flush()


class _ByteStream:
    """Tokens as bytes through an incremental UTF-8 decoder."""

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int]) -> None:
        self._bytes_of = texts.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode
        tail = b""
        # UTF-8 finds its own boundaries: the last four bytes tell how far into a character the prompt ends.
        for token_id in reversed(prompt_ids):
            tail = texts.bytes_of(token_id) + tail
            if len(tail) >= 4:
                break
        before = self._decode(tail)
        self._leading_spaces = 0 if before else texts.leading_spaces

    def push(self, ids: Iterable[int]) -> list[str]:
        decode, bytes_of = self._decode, self._bytes_of
        pieces = [decode(bytes_of(token_id)) for token_id in ids]
        if self._leading_spaces:
            self._strip_first(pieces)
        return pieces

    @property
    def holding(self) -> bool:
        return self._decoder.getstate()[0] != b""

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _strip_first(self, pieces: list[str]) -> None:
        for index, piece in enumerate(pieces):
            if piece:
                spaces = len(piece) - len(piece.lstrip(" "))
                pieces[index] = piece[min(spaces, self._leading_spaces) :]
                self._leading_spaces = 0
                return


class _WindowStream:
    """Decodings of a window of tokens with and without the newest ones."""

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int]) -> None:
        self._texts = texts
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if not texts.is_special(token_id):
                tail.append(token_id)
                if len(tail) == PROMPT_TAIL:
                    break
        tail.reverse()
        self._context, self._held = tail, list[int]()
        self._shown = texts.decode(tail) if tail else ""
        # Tokens of a character that the prompt leaves unfinished are held: the next piece gives it out whole.
        for split in range(len(tail) - 1, max(len(tail) - MAX_HELD, -1), -1):
            if not self._shown.endswith(REPLACEMENT):
                break
            self._context, self._held = tail[:split], tail[split:]
            self._shown = texts.decode(self._context) if split else ""

    def push(self, ids: Iterable[int]) -> list[str]:
        return [self._next(token_id) for token_id in ids]

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def flush(self) -> str:
        return self._release(self._texts.decode(self._context + self._held)) if self._held else ""

    def _next(self, token_id: int) -> str:
        if self._texts.is_special(token_id):
            return ""
        self._held.append(token_id)
        text = self._texts.decode(self._context + self._held)
        if (text.endswith(REPLACEMENT) or text == self._shown) and len(self._held) < MAX_HELD:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._context, self._held = self._held, []
        self._shown = self._texts.decode(self._context)
        return piece


def _known_decoder(decoder: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps of a tokenizers decoder that gives each token its own bytes; None for another kind."""
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return steps
    if kinds[-1:] == ["Strip"]:
        # After Fuse there is one text, so Strip takes one leading space of it.
        strip = steps[-1]
        if kinds[-2:-1] != ["Fuse"] or (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
            return None
        kinds = kinds[:-1]
    replaced = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    return steps if replaced and set(kinds) <= {"Replace", "ByteFallback", "Fuse"} else None


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _token_bytes(token: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "ByteLevel":
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
        elif step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "ByteFallback" and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
    return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, src/encoder.py), the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class StopStrings:
    """Finds the first stop string in a text that comes in pieces; released text is never withdrawn.

    The match is the stop string that is complete first; of several that end at the same character, the
    longest. So it does not depend on where the pieces end. An Aho-Corasick automaton (A. V. Aho, M. J.
    Corasick, "Efficient string matching", CACM 1975) reads each character once; its depth is the length of
    the text held back: the longest end of the text that begins a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: strings, none of them empty."""
        self.matched: str | None = None
        self._held = ""
        self._state = 0
        self._first = frozenset(text[0] for text in stop)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for text in stop:
            state = 0
            for depth, character in enumerate(text, start=1):
                state = self._next[state].setdefault(character, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._depth.append(depth)
                    self._found.append(None)
            self._found[state] = text
        self._link_failures()

    def push(self, piece: str) -> str:
        """The text that may be shown now; nothing after a match."""
        if self.matched is not None:
            return ""
        if self._state == 0 and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        state, transitions, fail = self._state, self._next, self._fail
        for index, character in enumerate(piece, start=len(self._held)):
            while state and character not in transitions[state]:
                state = fail[state]
            state = transitions[state].get(character, 0)
            if (found := self._found[state]) is not None:
                self.matched, self._held = found, ""
                return text[: index + 1 - len(found)]
        self._state = state
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown]

    @property
    def holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def flush(self) -> str:
        """The text held back, when the text ends without a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _link_failures(self) -> None:
        """Each state's longest proper suffix that is a state too, breadth first; its match counts here."""
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                queue.append(child)
                fallback = self._fail[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(character, 0)
                if self._found[child] is None:
                    self._found[child] = self._found[self._fail[child]]
