"""Answers the scheduler's questions about page chains from the KV store, in a thread of its own.

Implements scheduler.ports.PrefixStore. A page counts only if the store has it for every rank. Knows nothing of
requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstore.client_leases import ReadLease
from kvstore.keys import KVKey, Tier
from scheduler.plan import PrefixAnswer, StoreTier
from worker.store_keys import PageIdentity

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is needed of kvstore.client.KVClient."""

    @property
    def num_faults(self) -> int: ...

    @property
    def is_off(self) -> bool: ...

    def lookup(self, keys: Sequence[KVKey]) -> list[Tier]: ...

    def prefetch(self, keys: Sequence[KVKey]) -> int: ...

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None: ...

    def close(self) -> None: ...


class StorePrefixes:
    """The KV store as the scheduler asks it."""

    def __init__(self, store: Store, identities: Sequence[PageIdentity]) -> None:
        """identities: of all ranks."""
        self._store, self._identities = store, tuple(identities)
        self._lock = threading.Lock()  # guards what follows
        self._answers: list[PrefixAnswer] = []
        self._leases: dict[int, list[ReadLease]] = {}  # tickets that are held
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-lookups")

    @property
    def num_faults(self) -> int:
        """Of the calls so far."""
        return self._store.num_faults

    @property
    def is_off(self) -> bool:
        """Whether calls are refused for a while."""
        return self._store.is_off

    def ask(self, ticket: int, digests: Sequence[bytes]) -> None:
        """As in PrefixStore; what is in memory is kept until release(), or as long as a lease lasts."""
        with self._lock:
            self._leases[ticket] = []
        self._thread.submit(self._look, ticket, tuple(digests))

    def take_answers(self) -> list[PrefixAnswer]:
        """Answers since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def release(self, ticket: int) -> None:
        """Let the store drop what was kept for the ticket."""
        with self._lock:
            leases = self._leases.pop(ticket, [])
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Drop open questions and let go of everything."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for ticket in list(self._leases):
            self.release(ticket)
        self._store.close()

    def _look(self, ticket: int, digests: tuple[bytes, ...]) -> None:
        try:
            tiers = self._common_tiers(ticket, digests)
        except Exception:
            log.exception("the KV store could not be asked")
            tiers = ()
        with self._lock:
            if ticket in self._leases:
                self._answers.append(PrefixAnswer(ticket, tiers))

    def _common_tiers(self, ticket: int, digests: tuple[bytes, ...]) -> tuple[StoreTier, ...]:
        """Where the leading pages lie that are there for all ranks: the slowest tier of any rank."""
        found: list[list[Tier]] = []
        for identity in self._identities:
            if not self._is_open(ticket):  # nobody waits any more, but others do
                return ()
            keys = [identity.key(digest) for digest in digests]
            tiers = self._store.lookup(keys)
            if not tiers:
                return ()
            found.append(tiers)
            self._hold(ticket, keys[: len(tiers)], tiers)
        return tuple(StoreTier(max(tiers)) for tiers in zip(*found))

    def _hold(self, ticket: int, keys: list[KVKey], tiers: list[Tier]) -> None:
        if any(tier == Tier.SSD for tier in tiers):
            self._store.prefetch(keys)
        lease = self._store.acquire(keys)
        if lease is None:
            return
        with self._lock:
            if ticket in self._leases:
                self._leases[ticket].append(lease)
                return
        lease.release()

    def _is_open(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._leases
