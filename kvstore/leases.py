"""Loans that end by themselves, so that a client that died keeps nothing. The clock is an argument.

Knows nothing of what is lent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Lent = TypeVar("Lent")


class Leases(Generic[Lent]):
    """What is lent, by a number that no other run of the service gives out."""

    def __init__(self, duration_s: float, clock: Callable[[], float]) -> None:
        self.duration_s = duration_s
        self._clock = clock
        self._lent: dict[int, tuple[float, Lent]] = {}  # in the order of deadlines, as all last equally long
        self._next_id = secrets.randbits(62) | 1

    def __len__(self) -> int:
        return len(self._lent)

    def grant(self, lent: Lent) -> int:
        """Lend for duration_s; the lease's number, never 0."""
        lease_id = self._next_id
        self._next_id += 1
        self._lent[lease_id] = (self._clock() + self.duration_s, lent)
        return lease_id

    def end(self, lease_id: int) -> Lent | None:
        """Take back; None if the lease is over or was never given."""
        found = self._lent.pop(lease_id, None)
        return None if found is None else found[1]

    def expired(self) -> Iterator[Lent]:
        """Take back all whose time is over."""
        now = self._clock()
        while self._lent:
            lease_id, (deadline, lent) = next(iter(self._lent.items()))
            if deadline > now:
                return
            del self._lent[lease_id]
            yield lent
