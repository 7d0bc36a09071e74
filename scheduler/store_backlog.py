"""Which full pages are still to be given to the KV store: each once, first come, first served, within bounds.

Knows only digests; nothing of pages of the GPU, moves or the store's answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class StoreBacklog:
    """Digests that wait for their turn or are on the way, and those that need not be given again."""

    def __init__(self, max_waiting: int, max_known: int) -> None:
        self._max_waiting = max_waiting
        self._max_known = max_known
        self._waiting: OrderedDict[bytes, None] = OrderedDict()  # first come, first served
        self._pending: set[bytes] = set()  # waiting or on the way
        self._known: OrderedDict[bytes, None] = OrderedDict()  # in the store, longest unheard of first
        self.num_dropped = 0  # so far: for want of room, or gone before their turn

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, digests: Iterable[bytes]) -> None:
        """Pages that the store should have. The first pages of a chain are worth most: when full, new ones go."""
        for digest in digests:
            if digest in self._pending or digest in self._known:
                continue
            if len(self._waiting) < self._max_waiting:
                self._waiting[digest] = None
                self._pending.add(digest)
            else:
                self.num_dropped += 1

    def claim(self, digest: bytes) -> bool:
        """Give this page now, before all that wait: it is on the way then, as after take(); False if it was already,
        or has arrived."""
        if digest in self._waiting:
            del self._waiting[digest]
            return True
        if digest in self._pending or digest in self._known:
            return False
        self._pending.add(digest)
        return True

    def knows(self, digest: bytes) -> bool:
        """Whether the store has this page, as far as anyone has heard."""
        return digest in self._known

    def take(self) -> bytes:
        """The longest waiting one; it is on the way until stored(), failed() or drop() is called."""
        return self._waiting.popitem(last=False)[0]

    def given_up(self, digest: bytes) -> None:
        """The last page with this content is gone."""
        if digest not in self._known and digest not in self._pending:
            self.num_dropped += 1

    def drop(self, digest: bytes) -> None:
        """One that was taken cannot be given: its page is gone."""
        self._pending.discard(digest)
        self.num_dropped += 1

    def failed(self, digests: Iterable[bytes]) -> None:
        """These did not arrive; they may be offered again."""
        self._pending.difference_update(digests)

    def stored(self, digests: Sequence[bytes]) -> None:
        """These have arrived."""
        self._pending.difference_update(digests)
        self.learn(digests)

    def learn(self, digests: Sequence[bytes]) -> None:
        """The store has these pages. Only so many are remembered: others may be given once more."""
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        """The store does not have these pages, or not any more."""
        for digest in digests:
            self._known.pop(digest, None)

    def check_integrity(self) -> None:
        """Assert the backlog's invariants."""
        assert self._pending.issuperset(self._waiting), "a page that waits is not pending"
        assert len(self._waiting) <= self._max_waiting, "the backlog is too long"
        assert len(self._known) <= self._max_known, "too many pages are remembered"
