"""The page bookkeeping alone: what is handed out, what is shared, what is found again."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interactive_infer.core.kv_cache import NULL_PAGE, KVCache, page_digest


def filled(cache: KVCache, token_ids: list[int]) -> list[int]:
    """Pages of a text whose full pages are committed."""
    pages, digest = cache.match(token_ids)
    size, matched = cache.page_size, len(pages)
    fresh = cache.allocate(cache.pages_for(len(token_ids)) - matched)
    assert fresh is not None
    pages += fresh
    for i in range(matched, len(token_ids) // size):
        digest = cache.commit(pages[i], digest, token_ids[i * size : (i + 1) * size])
    return pages


def is_shared(cache: KVCache, page: int) -> bool:
    """Whether writing to `page` would be seen by anybody but its one holder."""
    return page in cache._digest or cache._refs[page] > 1


def test_pages_are_handed_out_once_and_never_the_null_page() -> None:
    cache = KVCache(5, 4)
    pages = [*(cache.allocate(2) or ()), *(cache.allocate(3) or ())]
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert NULL_PAGE not in pages
    assert cache.num_held == 5
    cache.check(held=[pages])


def test_too_many_are_refused_and_nothing_changes() -> None:
    cache = KVCache(3, 4)
    held = cache.allocate(2)
    assert held is not None
    assert cache.allocate(2) is None
    assert cache.num_available == 1
    cache.check(held=[held])
    assert cache.allocate(0) == []


def test_a_page_given_back_twice_is_an_error() -> None:
    cache = KVCache(3, 4)
    pages = cache.allocate(1)
    assert pages is not None
    cache.release(pages)
    with pytest.raises(RuntimeError, match="more often"):
        cache.release(pages)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_cache_without_room_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="room"):
        KVCache(num_pages, page_size)


def test_pages_for_rounds_up() -> None:
    cache = KVCache(8, 4)
    assert [cache.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_digest_names_a_whole_prefix() -> None:
    first = page_digest(b"", [1, 2])
    assert page_digest(first, [3, 4]) != page_digest(b"", [3, 4])
    assert page_digest(first, [3, 4]) == page_digest(page_digest(b"", [1, 2]), [3, 4])
    assert page_digest(b"", [1, 2]) != page_digest(b"", [2, 1])
    assert len(first) == 16


def test_the_longest_committed_prefix_is_found_and_shared() -> None:
    cache = KVCache(10, 2)
    pages = filled(cache, [1, 2, 3, 4, 5])
    again, _ = cache.match([1, 2, 3, 4, 5, 6])
    assert again == pages[:2], "the third page is not full"
    other, _ = cache.match([1, 2, 9, 9])
    assert other == pages[:1]
    assert cache.match([9, 2, 3, 4])[0] == []
    assert cache.match([3, 4])[0] == [], "the same tokens after another prefix are another page"
    assert [is_shared(cache, page) for page in pages] == [True, True, False]
    cache.check(held=[pages, again, other])


def test_released_pages_are_kept_for_reuse_and_taken_last_the_oldest_first() -> None:
    cache = KVCache(6, 2)
    old, young = filled(cache, [1, 2, 3, 4]), filled(cache, [5, 6])
    cache.release(old)
    cache.release(young)
    assert cache.num_held == 0
    free = cache.allocate(3)
    assert free is not None
    assert not set(free) & {*old, *young}, "pages without content go first"
    taken = cache.allocate(1)
    assert taken == [old[1]], "then the end of the oldest prefix, the least useful"
    assert cache.match([1, 2, 3, 4])[0] == old[:1]
    assert cache.match([5, 6])[0] == young
    cache.check(held=[free, taken, old[:1], young])


def test_a_page_that_is_handed_out_anew_is_forgotten() -> None:
    cache = KVCache(2, 2)
    cache.release(filled(cache, [1, 2, 3, 4]))
    pages = cache.allocate(2)
    assert pages is not None
    assert not any(is_shared(cache, page) for page in pages)
    assert cache.match([1, 2, 3, 4])[0] == []


def test_a_page_computed_again_joins_its_old_successors() -> None:
    cache = KVCache(4, 1)
    pages = filled(cache, [1, 2])
    cache.release(pages)
    tail, _ = cache.match([1, 2])
    cache.release(tail[:1])  # the first one alone may now be taken
    others = cache.allocate(3)
    assert others is not None
    assert pages[0] in others
    assert cache.match([1, 2])[0] == []
    cache.release(others)
    again = filled(cache, [1])
    assert cache.match([1, 2])[0] == [again[0], pages[1]]


def test_the_first_of_two_equal_pages_is_kept_in_the_index() -> None:
    cache = KVCache(4, 2)
    first, second = cache.allocate(1), cache.allocate(1)
    assert first and second
    assert cache.commit(first[0], b"", [1, 2]) == cache.commit(second[0], b"", [1, 2])
    assert cache.match([1, 2])[0] == first
    assert not is_shared(cache, second[0])
    cache.release(second)
    assert cache.num_available == 3
    cache.check(held=[first, first])


def test_clear_forgets_what_was_computed_before_it_and_what_is_built_on_that() -> None:
    cache = KVCache(8, 2)
    cache.release(filled(cache, [7, 8]))
    pages, digest = filled(cache, [1, 2]), page_digest(b"", [1, 2])
    cache.clear()
    assert cache.match([1, 2])[0] == cache.match([7, 8])[0] == []
    more = cache.allocate(1)
    assert more is not None
    cache.commit(more[0], digest, [3, 4])  # its holder began before and goes on over old keys
    new = filled(cache, [1, 2])
    found, _ = cache.match([1, 2, 3, 4])
    assert found == new, "a page computed over old keys is not offered to those who began after"
    cache.check(held=[pages, more, new, found])
    cache.release(pages)
    cache.release(more)
    assert cache.num_held == 1


def test_what_is_retracted_is_offered_no_more_unless_somebody_else_holds_it() -> None:
    cache = KVCache(8, 2)
    pages = filled(cache, [1, 2, 3, 4, 5])
    shared, _ = cache.match([1, 2])
    assert cache.retract(pages) == pages[1:]
    assert cache.match([1, 2, 3, 4])[0] == pages[:1]
    cache.check(held=[pages, shared, pages[:1]])
    cache.release(pages)
    cache.check(held=[shared, pages[:1]])


def test_what_was_released_is_retracted_unless_somebody_has_it_by_now() -> None:
    cache = KVCache(8, 2)
    pages = filled(cache, [1, 2, 3, 4, 5])
    cache.release(pages)
    shared, _ = cache.match([1, 2])
    assert cache.retract(pages, holders=0) == pages[1:]
    assert cache.match([1, 2, 3, 4])[0] == pages[:1]
    cache.check(held=[shared, pages[:1]])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
def test_arbitrary_texts_leave_the_books_in_order(num_pages: int, page_size: int, random: random.Random) -> None:
    cache = KVCache(num_pages, page_size)
    held: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(60):
        what = random.random()
        if what < 0.05:
            cache.clear()
            content = {}
        elif what < 0.5 and held:
            cache.release(held.pop(random.randrange(len(held))))
        else:
            tokens = [int(random.random() < 0.2) for _ in range(random.randint(1, 8))]
            pages, digest = cache.match(tokens)
            matched = len(pages)
            for i, page in enumerate(pages):
                assert content[page] == tuple(tokens[: (i + 1) * page_size]), "a page of another prefix"
            fresh = cache.allocate(cache.pages_for(len(tokens)) - matched)
            if fresh is None:
                cache.release(pages)
                continue
            pages += fresh
            for i in range(matched, len(tokens) // page_size):
                content[pages[i]] = tuple(tokens[: (i + 1) * page_size])
                digest = cache.commit(pages[i], digest, tokens[i * page_size : (i + 1) * page_size])
            held.append(pages)
        cache.check(held=held)
    for pages in held:
        cache.release(pages)
    cache.check(held=[])
    assert cache.num_available == num_pages


@pytest.mark.parametrize("damage", ["free twice", "lost", "shared and written", "index"])
def test_check_finds_damage(damage: str) -> None:
    cache = KVCache(4, 2)
    pages = filled(cache, [1, 2, 3])
    cache.check(held=[pages])
    if damage == "free twice":
        cache._free.append(cache._free[-1])
    elif damage == "lost":
        cache._free.pop()
    elif damage == "shared and written":
        cache._refs[pages[1]] += 1
    else:
        cache._index[b"another"] = pages[0]
    with pytest.raises((AssertionError, KeyError)):
        cache.check()
