"""Which full pages are still to be given to the KV store: each once, first come, first served, within bounds.

Knows only digests; nothing of pages of the GPU, moves or the store's answers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class StoreBacklog:
    """Digests that wait for their turn or are on the way, and those that need not be given again."""

    def __init__(self, max_waiting: int, max_known: int) -> None:
        self._max_waiting = max_waiting
        self._max_known = max_known
        self._waiting: OrderedDict[bytes, None] = OrderedDict()  # first come, first served
        self._on_way: Counter[bytes] = Counter()  # how many times at once each is being given; none of them waits
        self._known: OrderedDict[bytes, None] = OrderedDict()  # in the store, longest unheard of first
        self.num_dropped = 0  # so far: for want of room or of a store, or gone before their turn

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, digests: Iterable[bytes]) -> None:
        """Pages that the store should have. The first pages of a chain are worth most: when full, new ones go."""
        for digest in digests:
            if self._is_pending(digest) or digest in self._known:
                continue
            if len(self._waiting) < self._max_waiting:
                self._waiting[digest] = None
            else:
                self.num_dropped += 1

    def claim(self, digest: bytes) -> bool:
        """Give this page now, before all that wait, as send() does; False if it is on the way or has arrived."""
        if digest in self._on_way or (digest in self._known and digest not in self._waiting):
            return False
        self.send(digest)
        return True

    def send(self, digest: bytes) -> None:
        """This page is given now, even if it is on the way already: it is once more then, as after take()."""
        self._waiting.pop(digest, None)
        self._on_way[digest] += 1

    def knows(self, digest: bytes) -> bool:
        """Whether the store has this page, as far as anyone has heard."""
        return digest in self._known

    def take(self) -> bytes:
        """The longest waiting one; it is on the way until stored(), failed() or drop() is called."""
        digest, _ = self._waiting.popitem(last=False)
        self._on_way[digest] += 1
        return digest

    def given_up(self, digest: bytes) -> None:
        """The last page with this content is gone."""
        if digest not in self._known and not self._is_pending(digest):
            self.num_dropped += 1

    def drop(self, digest: bytes) -> None:
        """One that was taken cannot be given: its page is gone."""
        self._over([digest])
        self.num_dropped += 1

    def drop_waiting(self) -> None:
        """None of those that wait can be given; they may be offered again."""
        self.num_dropped += len(self._waiting)
        self._waiting.clear()

    def failed(self, digests: Iterable[bytes]) -> None:
        """These did not arrive; they may be offered again, unless they are on the way another time."""
        self._over(digests)

    def stored(self, digests: Sequence[bytes]) -> None:
        """These have arrived."""
        self._over(digests)
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

    def _is_pending(self, digest: bytes) -> bool:
        return digest in self._waiting or digest in self._on_way

    def _over(self, digests: Iterable[bytes]) -> None:
        """Each is given once less: it was on the way for each time that it was taken, claimed or sent."""
        for digest in digests:
            assert digest in self._on_way, "a page ends that is not on the way"
            self._on_way[digest] -= 1
            if not self._on_way[digest]:
                del self._on_way[digest]

    def check_integrity(self, on_way: Iterable[bytes] | None = None) -> None:
        """Assert the backlog's invariants. on_way: each digest as often as it is being given, where that is known."""
        assert self._on_way.keys().isdisjoint(self._waiting), "a page waits that is on the way"
        assert on_way is None or self._on_way == Counter(on_way), "pages on the way miscounted"
        assert len(self._waiting) <= self._max_waiting, "the backlog is too long"
        assert len(self._known) <= self._max_known, "too many pages are remembered"
