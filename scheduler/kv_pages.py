"""The pages of the KV cache: who refers to them, what they hold, which cached one is given up first.

A page is *live* while a request refers to it, *cached* when nobody does but its contents may serve a later
request with the same prefix, and *free* otherwise. Knows nothing of requests, plans or devices: only page
numbers and digests.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice


def root_digest(salt: str) -> bytes:
    """The start of a page chain. Different salts give chains that never meet."""
    return hashlib.sha256(b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a full page: of all tokens up to its end, through its parent, and of the salt at the root.

    SHA-256, because equal digests are taken for equal contents: a collision would serve another's KV.
    """
    return hashlib.sha256(b"page:" + parent + tokens).digest()


class PagePool:
    """Reference counts, free list and prefix cache over pages [0, num_pages)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack, lowest page on top
        self._references = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # no references, least recently used first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._hit: set[int] = set()  # live pages that were taken through the prefix cache
        self._num_hits = [0] * num_pages  # of each page's contents, as far as anybody counts them
        self.on_give_up: Callable[[bytes], None] | None = None  # told of each content that is given up for another

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages kept only for later prefix hits."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that allocate() can give: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Pages with references."""
        return self.num_pages - self.num_available

    @property
    def num_hit(self) -> int:
        """Live pages that a prefix hit took: possibly shared, so no single request's own."""
        return len(self._hit)

    def num_sole(self, pages: Iterable[int]) -> int:
        """How many of these pages have no other reference, so that releasing them makes them available."""
        return sum(self._references[page] == 1 for page in pages)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one reference each, contents undefined. At most num_available."""
        assert num_pages <= self.num_available, f"{num_pages} pages wanted, {self.num_available} available"
        for _ in range(num_pages - len(self._free)):
            page, _ = self._cached.popitem(last=False)
            if self.on_give_up is not None:
                self.on_give_up(self._digest_of[page])
            self._forget(page)
            self._free.append(page)
        cut = len(self._free) - num_pages
        pages = self._free[cut:]
        del self._free[cut:]
        for page in pages:
            self._references[page] = 1
        return pages

    def find(self, digest: bytes) -> int | None:
        """The page with this content, or None."""
        return self._page_of.get(digest)

    def num_cached_among(self, pages: Iterable[int]) -> int:
        """How many of these pages acquire() would take out of the available ones."""
        return sum(page in self._cached for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages, live or cached ones."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def acquire(self, pages: Sequence[int]) -> None:
        """Refer to pages that find() gave, as a prefix hit."""
        self.hold(pages)
        self._hit.update(pages)

    def count_hits(self, pages: Sequence[int]) -> None:
        """A request uses these pages' contents, which another has computed."""
        for page in pages:
            self._num_hits[page] += 1

    def num_hits(self, page: int) -> int:
        """How often count_hits() was told of the page with its present contents."""
        return self._num_hits[page]

    def oldest_cached(self, num_pages: int) -> list[tuple[int, bytes]]:
        """The pages that allocate() would give up next, and what they hold; fewer where there are not so many."""
        return [(page, self._digest_of[page]) for page in islice(self._cached, num_pages)]

    def release(self, pages: Sequence[int], as_oldest: bool = False) -> None:
        """Drop one reference to each page of a sequence; its last pages will be given up first.

        as_oldest: they go to the head of those to be given up, where oldest_cached() found them in this order.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._hit.discard(page)
                if page in self._digest_of:
                    self._cached[page] = None
                    if as_oldest:
                        self._cached.move_to_end(page, last=False)
                else:
                    self._free.append(page)

    def publish(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Say what live pages hold, once their KV is computed. A second page of equal content stays private."""
        page_of, digest_of = self._page_of, self._digest_of
        for page, digest in zip(pages, digests):
            if digest not in page_of and page not in digest_of:
                page_of[digest] = page
                digest_of[page] = digest
                self._num_hits[page] = 0

    def flush(self) -> int:
        """Forget all contents; live pages stay with their requests. Returns how many pages were forgotten."""
        num_forgotten = len(self._digest_of)
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        return num_forgotten

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

    def check_integrity(self, references: Counter[int]) -> None:
        """Assert the pool's invariants, given how often each page is referred to by requests."""
        assert sum(references.values()) == sum(self._references), "references leaked"
        for page, count in references.items():
            assert self._references[page] == count, f"page {page}: {self._references[page]} references, not {count}"
        free, cached = set(self._free), set(self._cached)
        live = {page for page in range(self.num_pages) if self._references[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(cached) + len(live) == self.num_pages == len(free | cached | live), "pages lost"
        assert min(self._references, default=0) >= 0, "negative references"
        assert cached <= self._digest_of.keys(), "a cached page has no digest"
        assert not free & self._digest_of.keys(), "a free page has a digest"
        assert self._page_of == {digest: page for page, digest in self._digest_of.items()}, "digests disagree"
        assert self._hit <= live, "a hit page is not live"
