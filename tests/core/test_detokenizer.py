from __future__ import annotations

import codecs
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from interactive_infer.core.detokenizer import REPLACEMENT, Detokenizer, StopStrings, TokenTexts
from tests.tokenizers_made import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

Make = Callable[[], PreTrainedTokenizerFast]
FAST = [byte_level_tokenizer, byte_fallback_tokenizer, metaspace_tokenizer, wordpiece_tokenizer]
TEXTS = [
    "Hello, little dragon.",
    " the dog  and   the cat",
    "family 👩‍👩‍👧‍👦 flag 🏳️‍🌈 done",
    "东京へ行きましょう 你好世界",
    "a\n\n\tb<|im_end|></s> c",
    "e\u0301 naïve Straße",
]


def all_text(tokenizer: object, prompt: list[int], output: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = detokenizer.push(output)
    assert len(pieces) == len(output)
    return "".join(pieces) + detokenizer.flush()


class PlainSlow:
    """A tokenizer without a fast backend: what the window decoder must do with."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast
        self.all_special_ids = fast.all_special_ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        text = self._fast.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return str(text)


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cut_anywhere_continues_its_prompt(make: Make, slow: bool, text: str) -> None:
    fast = make()
    ids = fast.encode(text, add_special_tokens=False)
    whole = fast.backend_tokenizer.decode(ids, skip_special_tokens=True)
    for cut in range(len(ids) + 1):
        tokenizer = PlainSlow(fast) if slow else fast
        before = "".join(Detokenizer(tokenizer, []).push(ids[:cut]))
        assert before + all_text(tokenizer, ids[:cut], ids[cut:]) == whole


@given(st.lists(st.integers(0, 400), max_size=40), st.integers(0, 40))
@example(ids=[400, 5, 400], cut=1)
def test_any_byte_level_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int], cut: int) -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    unfinished = codecs.getincrementaldecoder("utf-8")("replace")
    before = unfinished.decode(b"".join(texts.bytes_of(i) for i in ids[:cut]))
    whole = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert before + all_text(texts, ids[:cut], ids[cut:]) == whole


@given(st.lists(st.integers(0, 302), max_size=40), st.integers(0, 40))
def test_any_byte_fallback_tokens_decode_as_their_bytes(ids: list[int], cut: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    texts = TokenTexts(tokenizer)
    data = b"".join(texts.bytes_of(i) for i in ids)
    unfinished = codecs.getincrementaldecoder("utf-8")("replace")
    before = unfinished.decode(b"".join(texts.bytes_of(i) for i in ids[:cut]))
    whole = before.removeprefix(" ") + all_text(texts, ids[:cut], ids[cut:])
    assert whole == data.decode(errors="replace").removeprefix(" ")
    decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in decoded:
        assert whole == decoded


@given(st.lists(st.integers(0, 86), max_size=40), st.integers(0, 40))
def test_any_metaspace_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int], cut: int) -> None:
    backend = metaspace_tokenizer().backend_tokenizer
    before = backend.decode(ids[:cut], skip_special_tokens=True)
    whole = before + all_text(metaspace_tokenizer(), ids[:cut], ids[cut:])
    assert whole == backend.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 199), max_size=40), st.integers(0, 40))
def test_any_wordpiece_tokens_decode_as_the_tokenizer_decodes_them(ids: list[int], cut: int) -> None:
    backend = wordpiece_tokenizer().backend_tokenizer
    before = backend.decode(ids[:cut], skip_special_tokens=True)
    whole = before + all_text(wordpiece_tokenizer(), ids[:cut], ids[cut:])
    assert whole == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", FAST[:2])
def test_no_piece_holds_part_of_a_character(make: Make) -> None:
    tokenizer = make()
    text = "x 👩‍👩‍👧 世界 y"
    detokenizer = Detokenizer(tokenizer, [])
    pieces = detokenizer.push(tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert detokenizer.flush() == ""
    assert "" in pieces  # the first byte of a character has no text yet


@pytest.mark.parametrize("slow", [False, True])
def test_an_unfinished_character_comes_out_at_the_end_only(slow: bool) -> None:
    fast = byte_level_tokenizer()
    ids = fast.encode("a 👩", add_special_tokens=False)
    detokenizer = Detokenizer(PlainSlow(fast) if slow else fast, [])
    assert "".join(detokenizer.push(ids[:-1])) == "a "
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("slow", [False, True])
def test_special_tokens_and_unknown_ids_have_no_text(make: Make, slow: bool) -> None:
    fast = make()
    unknown = [] if slow else [len(fast) + 7]
    ids = [fast.eos_token_id, *unknown, *fast.encode("the dog", add_special_tokens=False), fast.eos_token_id]
    pieces = Detokenizer(PlainSlow(fast) if slow else fast, ids).push(ids)
    assert pieces[0] == pieces[len(unknown)] == pieces[-1] == ""
    assert "".join(pieces).strip() == "the dog"


def test_the_first_space_is_kept_after_a_prompt_with_text_only() -> None:
    tokenizer = byte_fallback_tokenizer()
    the = tokenizer.convert_tokens_to_ids("▁the")
    bos = tokenizer.bos_token_id
    assert Detokenizer(tokenizer, [bos]).push([the, the]) == ["the", " the"]
    assert Detokenizer(tokenizer, [bos, the]).push([bos, the]) == ["", " the"]


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    fast = byte_level_tokenizer()
    lead = fast.convert_tokens_to_ids("ð")  # the first byte of a four-byte character
    for tokenizer in (fast, PlainSlow(fast)):
        detokenizer = Detokenizer(tokenizer, [])
        pieces = detokenizer.push([lead] * 100)
        assert len("".join(pieces)) >= 90
        assert "".join(pieces) + detokenizer.flush() == REPLACEMENT * 100


@pytest.mark.parametrize("make", FAST)
def test_a_token_costs_the_same_however_many_came_before(make: Make) -> None:
    """Counted, not timed: what one push hands to the tokenizer does not grow."""
    fast = make()
    sizes: list[int] = []

    class Counting(PlainSlow):
        def decode(self, ids: list[int], **options: bool) -> str:
            sizes.append(len(ids))
            return super().decode(ids, **options)

    rng = random.Random(3)
    detokenizer = Detokenizer(Counting(fast), [0] * 1000)
    detokenizer.push(rng.randrange(len(fast)) for _ in range(3000))
    assert max(sizes) <= 48


def first_match(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """(start, string) of the match that is complete first, the longest of several, by str.find."""
    found = [(at + len(s), at, s) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1:] if found else None


pieces_of = st.lists(st.text("abc", max_size=4), max_size=30)
stops_of = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(pieces_of, stops_of)
@example(pieces=["ab", "c"], stop=("abcd", "bc"))
@example(pieces=["aa", "ab"], stop=("aab",))
@example(pieces=["abab", "abac"], stop=("ababac", "ac"))
def test_stop_strings_agree_with_str_find(pieces: list[str], stop: tuple[str, ...]) -> None:
    stops, text, released = StopStrings(stop), "", ""
    for piece in pieces:
        text += piece
        released += stops.push(piece)
        match = first_match(text, stop)
        if match is not None:
            assert (released, stops.matched) == (text[: match[0]], match[1])
        else:
            assert stops.matched is None
            held = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
            assert released == text[: len(text) - held]  # as much as possible, and never too much
    if stops.matched is None:
        assert released + stops.flush() == text
        assert stops.flush() == ""


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    stops = StopStrings(("\nUser:",))
    assert [stops.push(p) for p in ("Hi", "\nUs", "ed", "\nUse", "r", ": more", "x")] == [
        "Hi",
        "",
        "\nUsed",
        "",
        "",
        "",
        "",
    ]
    assert stops.matched == "\nUser:"
    assert stops.flush() == ""
