"""Carries out moves of KV pages between a rank's cache and the store, in threads of its own, beside the iterations.

Loads and saves have a thread each: a load, for which a request waits, is not queued behind saves, and a link works
in both directions at once. Every move ends, with a count of the leading pages that were copied whole: whatever the
store does costs time only. Knows nothing of why pages move, nor of how bytes are copied.

No move waits for an iteration, nor the other way round (scheduler.plan.KVMove): pages to save were filled by steps
that have ended, and pages that are loaded are used by steps that are planned after the move's result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from kvstore.client_leases import ReadLease, WriteLease
from kvstore.keys import KVKey
from scheduler.plan import KVMove, KVMoveResult, MoveKind
from worker.page_copy import PageCopier
from worker.store_keys import PageIdentity

log = logging.getLogger(__name__)

SSD_WAIT_S = 1.0  # that a load may wait for the store's SSD


class Store(Protocol):
    """What is needed of kvstore.client.KVClient."""

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None: ...

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> WriteLease | None: ...

    def close(self) -> None: ...


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
        self._news = threading.Condition()
        self._threads = {kind: ThreadPoolExecutor(1, f"kv-{kind}", initializer=prepare_thread) for kind in MoveKind}

    def start(self, moves: Sequence[KVMove]) -> None:
        """Begin with these, and return at once."""
        for move in moves:
            self._threads[move.kind].submit(self._run, move)

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
        self._loads.close()
        self._saves.close()
        self._store.close()

    def _run(self, move: KVMove) -> None:
        num_pages, began_s = 0, time.monotonic()
        try:
            with torch.inference_mode():
                num_pages = self._load(move) if move.kind == MoveKind.LOAD else self._save(move)
        except Exception:
            log.exception("move %d failed", move.number)
        with self._news:
            self._ended.append(KVMoveResult(move.number, num_pages, time.monotonic() - began_s))
            self._news.notify()

    def _load(self, move: KVMove) -> int:
        lease = self._store.acquire([self._identity.key(digest) for digest in move.digests], SSD_WAIT_S)
        if lease is None:
            return 0
        with lease:
            try:
                return self._fetch(lease, move.page_ids[: len(lease.blocks)])
            finally:
                self._loads.settle()

    def _fetch(self, lease: ReadLease, pages: Sequence[int]) -> int:
        """How many leading pages now hold the lease's records."""
        copier, num_slots = self._loads, self._loads.num_slots
        parts = _parts(len(pages), copier.slot_pages)
        for slot, part in enumerate(parts[:num_slots]):
            copier.fetch(slot, lease, part)
        for turn, part in enumerate(parts):
            slot = turn % num_slots
            # By way of the slot, verified there: a page never holds what may be wrong.
            num_whole = copier.num_whole(slot)
            copier.scatter(slot, pages[part.start : part.start + num_whole])
            if num_whole < len(part):
                return part.start + num_whole
            if turn + num_slots < len(parts):
                copier.fetch(slot, lease, parts[turn + num_slots])
        return len(pages)

    def _save(self, move: KVMove) -> int:
        keys = [self._identity.key(digest) for digest in move.digests]
        lease = self._store.reserve(keys, self._saves.page_bytes)
        if lease is None:
            return 0
        with lease:
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
