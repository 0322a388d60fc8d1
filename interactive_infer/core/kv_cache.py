"""The paged KV cache's bookkeeping: which page holds what, who refers to it, what can be reused.

Only page numbers live here; the tensors belong to the runner. A page holds the keys and values of
`page_size` consecutive tokens of every layer. Page 0 is the null page: it is never handed out, and writes that
nobody will read go there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

NULL_PAGE = 0


def page_digest(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Digest of a full page: its tokens and, through `parent`, every token before them (16 bytes).

    A chain of digests names a prefix whoever computed it, so a page stays reusable when its
    predecessors were evicted and computed again (vLLM's block hash; here BLAKE2b, so that equal digests mean equal
    prefixes for any practical purpose).
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class KVCache:
    """Pages with reference counts and a prefix index.

    Invariants (checked by `check()`):
    - every page but the null page is in exactly one of three states: *free* (no content worth keeping), *cached*
      (reference count 0, but indexed: handed out again last, oldest first), *held* (reference count > 0);
    - an indexed page is full and committed, and nobody writes to it until it has left the index;
    - a page that is not indexed has at most one holder.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV cache needs pages and room in them, not {num_pages} × {page_size}")
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._refs = [0] * (num_pages + 1)
        self._digest: dict[int, bytes] = {}
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_clears = 0
        self._root = b""

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that some sequence refers to."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing changed) when there are not so many."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Seq[int]) -> None:
        """Drop one reference of each page. The last page of a prefix is forgotten first, being the least useful."""
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise RuntimeError(f"page {page} was given back more often than it was taken")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                digest = self._digest.get(page)
                if digest is not None and self._index.get(digest) == page:
                    self._cached[page] = None
                else:
                    self._digest.pop(page, None)
                    self._free.append(page)

    def match(self, token_ids: Seq[int]) -> tuple[list[int], bytes]:
        """The longest chain of indexed pages that holds a prefix of `token_ids`, with one more reference each.

        Returns the pages and the digest of the last of them, or the root when there are none (to continue the chain).
        """
        pages: list[int] = []
        parent = self._root
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            digest = page_digest(parent, token_ids[end - self.page_size : end])
            page = self._index.get(digest)
            if page is None:
                break
            pages.append(page)
            parent = digest
        for page in pages:
            self._refs[page] += 1
            self._cached.pop(page, None)
        return pages, parent

    def commit(self, page: int, parent: bytes, token_ids: Seq[int]) -> bytes:
        """Index a full page whose keys and values are on the device for good; returns its digest.

        When another page already holds the same prefix the index keeps that one: `page` stays private to its holder.
        """
        digest = page_digest(parent, token_ids)
        if digest not in self._index:
            self._index[digest] = page
            self._digest[page] = digest
        return digest

    def retract(self, pages: Seq[int], *, holders: int = 1) -> list[int]:
        """Take those of `pages` that nobody else holds out of the index, and return them: nobody will read them again
        once they are released, so they may be overwritten now. `holders`: 0 where the caller has released them."""
        private = [page for page in pages if self._refs[page] == holders]
        for page in private:
            digest = self._digest.pop(page, None)
            if digest is not None and self._index.get(digest) == page:
                del self._index[digest]
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
        return private

    def clear(self) -> None:
        """Forget every prefix (the weights changed: old keys and values are no longer true).

        Held pages keep their digest as the mark that they may be shared; they are free once released. A sequence that
        began before goes on over old keys and values: the chains of those that begin after it start from another root,
        so they never meet its pages.
        """
        for page in self._cached:
            del self._digest[page]
            self._free.append(page)
        self._cached.clear()
        self._index.clear()
        self._num_clears += 1
        self._root = self._num_clears.to_bytes(16, "little")

    def _forget(self, page: int) -> None:
        del self._index[self._digest.pop(page)]

    def check(self, held: Seq[Seq[int]] | None = None) -> None:
        """Raise AssertionError unless the invariants hold; `held` lists the pages of every holder there is."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached
        assert NULL_PAGE not in free | cached
        assert cached <= set(self._digest)
        assert all(self._digest[page] == digest for digest, page in self._index.items())
        for page in range(1, self.num_pages + 1):
            assert (self._refs[page] == 0) == (page in free or page in cached), f"page {page}"
            if page not in self._digest:
                assert self._refs[page] <= 1, f"page {page} is shared while it may be written"
        if held is not None:
            counts = [0] * (self.num_pages + 1)
            for pages in held:
                for page in pages:
                    counts[page] += 1
            assert counts == self._refs, "references and holders differ"
