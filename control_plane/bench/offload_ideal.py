"""What caches could do at best: a textbook LRU of a given size, and a cache that never forgets.

The one place of the ideals that stores are measured against. Pages are opaque keys; a hit is a page whose
predecessors in the same chain are hits too. Knows nothing of tiers, leases or time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


class IdealLru:
    """So many keys, the least recently used one first out; each key of a call is used in turn."""

    def __init__(self, capacity: int | None) -> None:
        """None: it never forgets."""
        self._capacity = capacity
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, keys: Iterable[Hashable]) -> int:
        """Use keys, adding those that are not there; how many leading ones were."""
        num_leading, leading = 0, True
        for key in keys:
            leading = leading and key in self._order
            num_leading += leading
            self._order[key] = None
            self._order.move_to_end(key)
            if self._capacity is not None and len(self._order) > self._capacity:
                self._order.popitem(last=False)
        return num_leading


@dataclass(frozen=True, slots=True)
class Use:
    """Pages that are used together, heads first."""

    keys: Sequence[Hashable]
    is_question: bool = True  # whether hits count: a prompt's pages; else pages that an answer has filled


def ideal_hits(uses: Iterable[Use], capacity: int | None) -> int:
    """Hits of an LRU of so many pages on these uses in turn; None: of one that never forgets."""
    cache = IdealLru(capacity)
    return sum(num_hits for use in uses if (num_hits := cache.use(use.keys)) and use.is_question)
