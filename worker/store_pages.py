"""Carries out moves of KV pages between a rank's cache and the store, in threads of its own, beside the iterations.

Loads and saves have a thread each: a load, for which a request waits, is not queued behind saves, and a link works
in both directions at once. The store is asked for a load's first records while the load before it is copied, so that
the link does not wait for answers. Every move ends, with a count of the leading pages that were copied whole: whatever
the store does costs time only. Knows nothing of why pages move, nor of how bytes are copied.

No move waits for an iteration, nor the other way round (scheduler.plan.KVMove): pages to save were filled by steps
that have ended, and pages that are loaded are used by steps that are planned after the move's result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch

from kvstore.client_leases import ReadLease, WriteLease
from kvstore.keys import KVKey
from scheduler.plan import KVMove, KVMoveResult, MoveKind
from worker.page_copy import PageCopier
from worker.store_keys import PageIdentity

log = logging.getLogger(__name__)

SSD_WAIT_S = 1.0  # that a load may wait for the store's SSD
LEASE_PAGES = 16  # that a load asks for at once, or as many as all slots hold: the next while these are copied


class Store(Protocol):
    """What is needed of kvstore.client.KVClient."""

    @property
    def num_faults(self) -> int: ...

    @property
    def num_trips(self) -> int: ...

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None: ...

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> WriteLease | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Job:
    """A move and what it holds of the store."""

    move: KVMove
    leases: list[ReadLease | WriteLease] = field(default_factory=list)
    first: Future[ReadLease | None] | None = None  # of a load: the answer for its first batch

    def give_back(self) -> None:
        for lease in self.leases:
            lease.release()


class PageMover:
    """Carries out the moves of plans: those of each kind one after the other, in the order they came."""

    def __init__(
        self,
        loads: PageCopier,
        saves: PageCopier,
        identity: PageIdentity,
        store: Store,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """A copier for each direction; prepare_thread is called first thing in each thread."""
        self._loads, self._saves = loads, saves
        self._identity, self._store = identity, store
        self._ended: list[KVMoveResult] = []
        self._told = (0, 0)  # of the store's faults and trips
        self._news = threading.Condition()
        self._threads = {kind: ThreadPoolExecutor(1, f"kv-{kind}", initializer=prepare_thread) for kind in MoveKind}
        self._asking = ThreadPoolExecutor(2, "kv-asking")  # for the load that is under way, and for the next one
        self._waiting: deque[_Job] = deque()  # loads that have not begun

    def start(self, moves: Sequence[KVMove]) -> None:
        """Begin with these, and return at once."""
        for move in moves:
            job = _Job(move)
            if move.kind == MoveKind.LOAD:
                with self._news:
                    self._waiting.append(job)
                    self._ask_ahead()
            self._threads[move.kind].submit(self._run, job)

    def take_ended(self, wait_s: float = 0.0) -> tuple[KVMoveResult, ...]:
        """Moves that ended since the last call; waits so long for a first one."""
        with self._news:
            if wait_s:
                self._news.wait_for(lambda: self._ended, wait_s)
            ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> None:
        """Drop moves that have not begun and wait for those that have."""
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._asking.shutdown()
        for job in self._waiting:
            job.give_back()
        self._loads.close()
        self._saves.close()
        self._store.close()

    def _run(self, job: _Job) -> None:
        move = job.move
        carry_out = self._load if move.kind == MoveKind.LOAD else self._save
        num_pages, began_s = 0, time.monotonic()
        try:
            with torch.inference_mode():
                num_pages = carry_out(job)
        except Exception:
            log.exception("move %d failed", move.number)
        with self._news:
            before, self._told = self._told, (self._store.num_faults, self._store.num_trips)
            num_faults, num_trips = (now - told for now, told in zip(self._told, before))
            run_s = time.monotonic() - began_s
            self._ended.append(KVMoveResult(move.number, num_pages, run_s, num_faults, num_trips))
            self._news.notify()
        job.give_back()  # only now: a request may wait for the result

    def _ask_ahead(self) -> None:
        """Ask the store's first question of the load that is the next; with `_news` held."""
        job = self._waiting[0] if self._waiting else None
        if job and not job.first:
            some = self._batches(job.move)[0]
            job.first = self._asking.submit(self._ask, job.move, some, job.leases, SSD_WAIT_S)

    def _batches(self, move: KVMove) -> list[range]:
        """The digests that are asked for at once."""
        return _parts(len(move.digests), max(LEASE_PAGES, self._loads.num_slots * self._loads.slot_pages))

    def _ask(self, move: KVMove, some: range, leases: list[ReadLease | WriteLease], wait_s: float) -> ReadLease | None:
        """A lease on the leading ones of these, added to `leases`."""
        keys = [self._identity.key(digest) for digest in move.digests[some.start : some.stop]]
        lease = self._store.acquire(keys, max(0.0, wait_s))
        if lease is not None:
            leases.append(lease)
        return lease

    def _load(self, job: _Job) -> int:
        """How many leading pages now hold the records."""
        with self._news:
            self._waiting.popleft()
            self._ask_ahead()
        with closing(self._records(job)) as records:
            try:
                return self._fetch(records)
            finally:
                self._loads.settle()

    def _fetch(self, records: Iterable[tuple[ReadLease, range, Sequence[int]]]) -> int:
        copier, num_loaded = self._loads, 0
        under_way: deque[tuple[int, Sequence[int]]] = deque()  # slots, with the pages that what is in them is for

        def finish_first() -> bool:
            nonlocal num_loaded
            slot, pages = under_way.popleft()
            # By way of the slot, verified there: a page never holds what may be wrong.
            num_whole = copier.num_whole(slot)
            copier.scatter(slot, pages[:num_whole])
            num_loaded += num_whole
            return num_whole == len(pages)

        for slot, (lease, numbers, pages) in zip(cycle(range(copier.num_slots)), records):
            if len(under_way) == copier.num_slots and not finish_first():
                return num_loaded
            copier.fetch(slot, lease, numbers)
            under_way.append((slot, pages))
        while under_way and finish_first():
            pass
        return num_loaded

    def _records(self, job: _Job) -> Generator[tuple[ReadLease, range, Sequence[int]], None, None]:
        """The leading records that the store has, a slot's worth at a time: lease, numbers there, pages to fill."""
        move, leases, deadline = job.move, job.leases, time.monotonic() + SSD_WAIT_S
        batches, asked = self._batches(move), job.first
        assert asked is not None, "a load"
        try:
            for batch, following in zip(batches, [*batches[1:], None]):
                lease = asked.result()
                if lease is None or lease.arena is not leases[0].arena:  # another one: the store was started anew
                    return
                is_whole = len(lease.blocks) == len(batch)
                if following and is_whole:
                    asked = self._asking.submit(self._ask, move, following, leases, deadline - time.monotonic())
                for part in _parts(len(lease.blocks), self._loads.slot_pages):
                    yield lease, part, move.page_ids[batch.start + part.start : batch.start + part.stop]
                if not is_whole:
                    return
        finally:
            wait([asked])

    def _save(self, job: _Job) -> int:
        """How many leading pages are in the store now."""
        move = job.move
        keys = [self._identity.key(digest) for digest in move.digests]
        lease = self._store.reserve(keys, self._saves.page_bytes)
        if lease is None:
            return 0
        job.leases.append(lease)
        try:
            is_done = self._send(lease, move.page_ids)
        finally:
            self._saves.settle()
        # Those that were not wanted are there already, up to the first that found no room.
        return lease.num_placed if is_done and (not lease.wanted or lease.commit()) else 0

    def _send(self, lease: WriteLease, pages: Sequence[int]) -> bool:
        """Whether all records that are wanted have been written whole."""
        copier, num_slots, wanted = self._saves, self._saves.num_slots, lease.wanted
        parts = [wanted[part.start : part.stop] for part in _parts(len(wanted), copier.slot_pages)]

        def send(slot: int, numbers: Sequence[int]) -> None:
            copier.send(slot, [pages[number] for number in numbers], lease, numbers)

        for slot, part in enumerate(parts[:num_slots]):
            send(slot, part)
        for turn in range(len(parts)):
            if not copier.seal(turn % num_slots):
                return False
            if turn + num_slots < len(parts):
                send(turn % num_slots, parts[turn + num_slots])
        return True


def _parts(length: int, most: int) -> list[range]:
    """[0, length) in pieces of at most so many."""
    return [range(first, min(first + most, length)) for first in range(0, length, most)]
