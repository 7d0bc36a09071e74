"""Brings pages from the store to a rank's cache: loads one after the other, and none waits for the one before to end.

Records go by a copier's slots. What is under way in them belongs to one load or to several: the first slots of a load
are filled while the last ones of the load before are verified and emptied, so that the link always has a transfer to
go on with; and the store is asked for a load's first records while the load before it is copied. A load ends when the
last of its own pages has its bytes, and its leases end after its own transfers. Whatever the store does costs time
only, and ends no other load. Knows nothing of why pages are loaded, nor of how bytes are copied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.client_leases import ReadLease
from kvstore.keys import KVKey
from scheduler.plan import KVMove
from worker.page_copy import PageCopier
from worker.store_keys import PageIdentity

log = logging.getLogger(__name__)

SSD_WAIT_S = 1.0  # that a load may wait for the store's SSD
LEASE_PAGES = 16  # that a load asks for at once, or as many as all slots hold: the next while these are copied

Answer = Future[ReadLease | None]


class RecordStore(Protocol):
    """What a load needs of the store."""

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None: ...


@dataclass(slots=True)
class _Load:
    """A move and how far it is."""

    move: KVMove
    batches: list[range]  # of its pages: those that are asked for at once
    answers: list[Answer] = field(default_factory=list)  # the store's, for the leading batches
    began_s: float = 0.0
    under_way: deque[tuple[int, Sequence[int]]] = field(default_factory=deque)  # slots, and what pages they are for
    num_pages: int = 0  # leading ones that have their records, or will when what was scattered has been
    has_more: bool = True  # to fetch
    is_whole: bool = True  # so far; if not, it gets no more pages

    def give_back(self) -> None:
        """Release its leases, those that are still to come as soon as they do."""
        for answer in self.answers:
            answer.add_done_callback(_release)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one slot takes of a load."""

    load: _Load
    lease: ReadLease
    numbers: range  # records of the lease
    pages: Sequence[int]  # where they go


class PageLoads:
    """All loads of a rank. They are added in whatever thread, and carried out in one."""

    def __init__(
        self,
        copier: PageCopier,
        identity: PageIdentity,
        store: RecordStore,
        on_end: Callable[[KVMove, int, float], None],
    ) -> None:
        """on_end: told a move, how many leading pages it has loaded, and the seconds that this took."""
        self._copier, self._identity, self._store, self._on_end = copier, identity, store, on_end
        # For the load that is under way, for the next one, and to give back: a call takes a millisecond.
        self._calls = ThreadPoolExecutor(3, "kv-calls")
        self._lock = threading.Lock()
        self._waiting: deque[_Load] = deque()  # that have not begun; shared, by the lock
        self._begun: deque[_Load] = deque()  # that have not ended: only the last one may have more to fetch
        self._free = deque(range(copier.num_slots))
        self._last_end_s = 0.0

    def add(self, move: KVMove) -> None:
        """A load to carry out when its turn comes. run() is to be called after it."""
        lease_pages = max(LEASE_PAGES, self._copier.num_slots * self._copier.slot_pages)
        with self._lock:
            self._waiting.append(_Load(move, parts_of(len(move.digests), lease_pages)))
            self._ask_ahead()

    def run(self) -> None:
        """Carry out loads until none is left."""
        for part in self._parts():
            if part is None or not self._free:
                self._empty_first()
            if part is not None and part.load.is_whole:
                self._fill(part)

    def drop_waiting(self) -> None:
        """Forget loads that have not begun; on_end() is told nothing of them."""
        with self._lock:
            while self._waiting:
                self._waiting.popleft().give_back()

    def close(self) -> None:
        """Nothing waits or is under way."""
        self._calls.shutdown()

    def _parts(self) -> Iterator[_Part | None]:
        """Of one load after the other; None when there is only what is under way to go on with, for now."""
        while (load := self._begin_next()) or self._begun:
            if load is None:
                yield None
            else:
                yield from self._parts_of(load)
                load.has_more = False
                self._end_those_done()

    def _parts_of(self, load: _Load) -> Iterator[_Part | None]:
        """The leading records that the store has, as in _parts()."""
        deadline = load.began_s + SSD_WAIT_S
        arena: memoryview | None = None
        for batch, following in zip(load.batches, [*load.batches[1:], None]):
            answer = load.answers[-1]
            while not answer.done() and len(self._free) < self._copier.num_slots:
                yield None
            lease = _lease_of(answer)
            if lease is None or (arena is not None and lease.arena is not arena):  # the store was started anew
                return
            arena, is_whole = lease.arena, len(lease.blocks) == len(batch)
            for numbers in parts_of(len(lease.blocks), self._copier.slot_pages):
                pages = load.move.page_ids[batch.start + numbers.start : batch.start + numbers.stop]
                yield _Part(load, lease, numbers, pages)
                if not load.is_whole:
                    return
                if following and is_whole and not numbers.start:  # not sooner: a transfer goes first
                    self._ask(load, following, deadline - time.monotonic())
            if not is_whole:
                return

    def _begin_next(self) -> _Load | None:
        with self._lock:
            if not self._waiting:
                return None
            load = self._waiting.popleft()
            self._ask_ahead()
        load.began_s = time.monotonic()
        self._begun.append(load)
        return load

    def _ask_ahead(self) -> None:
        """Ask the store's first question of the load that is the next; with the lock held."""
        if self._waiting and not self._waiting[0].answers:
            self._ask(self._waiting[0], self._waiting[0].batches[0], SSD_WAIT_S)

    def _ask(self, load: _Load, batch: range, wait_s: float) -> None:
        """Ask for a lease on the leading ones of these."""

        def ask() -> ReadLease | None:
            keys = [self._identity.key(digest) for digest in load.move.digests[batch.start : batch.stop]]
            return self._store.acquire(keys, max(0.0, wait_s))

        load.answers.append(self._calls.submit(ask))

    def _fill(self, part: _Part) -> None:
        slot = self._free.popleft()
        try:
            self._copier.fetch(slot, part.lease, part.numbers)
        except Exception:
            self._fail(part.load, slot)
            self._free.append(slot)
        else:
            part.load.under_way.append((slot, part.pages))

    def _empty_first(self) -> None:
        """Wait for the slot that was filled first, and let its pages have what is in it."""
        load = self._begun[0]
        slot, pages = load.under_way.popleft()
        try:
            if load.is_whole:
                # By way of the slot, verified there: a page never holds what may be wrong.
                num_whole = self._copier.num_whole(slot)
                self._copier.scatter(slot, pages[:num_whole])
                load.num_pages += num_whole
                load.is_whole = num_whole == len(pages)
            else:
                self._copier.drop(slot)
        except Exception:
            self._fail(load, slot)
        self._free.append(slot)
        self._end_those_done()

    def _fail(self, load: _Load, slot: int) -> None:
        """Something went wrong with this slot, which shall harm no other load."""
        log.exception("move %d failed", load.move.number)
        load.is_whole = False
        try:
            self._copier.drop(slot)
        except Exception:
            log.exception("a slot of move %d could not be emptied", load.move.number)

    def _end_those_done(self) -> None:
        while self._begun and not self._begun[0].has_more and not self._begun[0].under_way:
            load = self._begun.popleft()
            try:
                self._copier.settle()  # only its own: nothing of later loads has been scattered
            except Exception:
                log.exception("move %d failed", load.move.number)
                load.num_pages = 0
            # Its turn began when the load before it had ended, whatever was fetched until then.
            turn_s, self._last_end_s = max(load.began_s, self._last_end_s), time.monotonic()
            self._on_end(load.move, load.num_pages, self._last_end_s - turn_s)
            self._calls.submit(load.give_back)  # only now: a request may wait for the result


def parts_of(length: int, most: int) -> list[range]:
    """[0, length) in pieces of at most so many."""
    return [range(first, min(first + most, length)) for first in range(0, length, most)]


def _lease_of(answer: Answer) -> ReadLease | None:
    """What was answered; waits for it."""
    try:
        return answer.result()
    except Exception:
        log.exception("the KV store could not be asked")
        return None


def _release(answer: Answer) -> None:
    if not answer.exception() and (lease := answer.result()):
        lease.release()
