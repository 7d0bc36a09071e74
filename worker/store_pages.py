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

from kvstore.client_leases import WriteLease
from kvstore.keys import KVKey
from scheduler.plan import KVMove, KVMoveResult, MoveKind
from worker.page_copy import PageCopier
from worker.store_keys import PageIdentity
from worker.store_loads import PageLoads, RecordStore, parts_of

log = logging.getLogger(__name__)


class Store(RecordStore, Protocol):
    """What is needed of kvstore.client.KVClient."""

    @property
    def num_faults(self) -> int: ...

    @property
    def num_trips(self) -> int: ...

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
        self._told = (0, 0)  # of the store's faults and trips
        self._news = threading.Condition()
        self._page_loads = PageLoads(loads, identity, store, self._tell)
        self._threads = {kind: ThreadPoolExecutor(1, f"kv-{kind}", initializer=prepare_thread) for kind in MoveKind}

    def start(self, moves: Sequence[KVMove]) -> None:
        """Begin with these, and return at once."""
        for move in moves:
            if move.kind == MoveKind.LOAD:
                self._page_loads.add(move)
                self._threads[move.kind].submit(self._load)
            else:
                self._threads[move.kind].submit(self._save, move)

    def take_ended(self, wait_s: float = 0.0) -> tuple[KVMoveResult, ...]:
        """Moves that ended since the last call; waits so long for a first one."""
        with self._news:
            if wait_s:
                self._news.wait_for(lambda: self._ended, wait_s)
            ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> None:
        """Drop moves that have not begun and wait for those that have."""
        self._page_loads.drop_waiting()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._page_loads.close()
        self._loads.close()
        self._saves.close()
        self._store.close()

    def _tell(self, move: KVMove, num_pages: int, run_s: float) -> None:
        """The move has ended."""
        with self._news:
            before, self._told = self._told, (self._store.num_faults, self._store.num_trips)
            num_faults, num_trips = (now - told for now, told in zip(self._told, before))
            self._ended.append(KVMoveResult(move.number, num_pages, run_s, num_faults, num_trips))
            self._news.notify()

    @torch.inference_mode()
    def _load(self) -> None:
        """All loads that wait, in the thread of loads: more than one, so that the next calls may find none."""
        try:
            self._page_loads.run()
        except Exception:  # nobody knows what may still be written: no result, so the instance will count as lost
            log.exception("loads have stopped")

    @torch.inference_mode()
    def _save(self, move: KVMove) -> None:
        """One save, in the thread of saves."""
        num_pages, lease, began_s = 0, None, time.monotonic()
        try:
            keys = [self._identity.key(digest) for digest in move.digests]
            lease = self._store.reserve(keys, self._saves.page_bytes)
            num_pages = 0 if lease is None else self._write(lease, move.page_ids)
        except Exception:
            log.exception("move %d failed", move.number)
        self._tell(move, num_pages, time.monotonic() - began_s)
        if lease is not None:
            lease.release()

    def _write(self, lease: WriteLease, pages: Sequence[int]) -> int:
        """How many leading ones of these pages are in the store now."""
        try:
            is_done = self._send(lease, pages)
        finally:
            for slot in range(self._saves.num_slots):
                self._saves.drop(slot)
        # Those that were not wanted are there already, up to the first that found no room.
        return lease.num_placed if is_done and (not lease.wanted or lease.commit()) else 0

    def _send(self, lease: WriteLease, pages: Sequence[int]) -> bool:
        """Whether all records that are wanted have been written whole."""
        copier, num_slots, wanted = self._saves, self._saves.num_slots, lease.wanted
        parts = [wanted[part.start : part.stop] for part in parts_of(len(wanted), copier.slot_pages)]

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
