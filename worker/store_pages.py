"""Copies KV pages between a rank's cache and the store, in a thread of its own, beside the iterations.

Every move ends, with a count of the leading pages that were copied whole: whatever the store does costs time only.
On a CPU the copies are plain memory copies. Knows nothing of why pages move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from kvstore.client_leases import ReadLease, WriteLease
from kvstore.keys import KVKey
from scheduler.plan import KVMove, KVMoveResult, MoveKind
from worker.kv_cache import KVCache
from worker.store_keys import PageIdentity

log = logging.getLogger(__name__)

SSD_WAIT_S = 1.0  # that a load may wait for the store's SSD


class Store(Protocol):
    """What is needed of kvstore.client.KVClient."""

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None: ...

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> WriteLease | None: ...

    def close(self) -> None: ...


class PageMover:
    """Carries out the moves of plans, one after the other in the order they came."""

    def __init__(self, cache: KVCache, identity: PageIdentity, store: Store) -> None:
        self._cache, self._identity, self._store = cache, identity, store
        self._page_bytes = cache.shape.elements_per_page * cache.layers[0].element_size()
        self._staging = torch.empty(self._page_bytes, dtype=torch.uint8)
        self._bytes = self._staging.numpy().data  # the same memory
        self._ended: list[KVMoveResult] = []
        self._news = threading.Condition()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-moves")

    def start(self, moves: Sequence[KVMove]) -> None:
        """Begin with these, and return at once."""
        for move in moves:
            self._thread.submit(self._run, move)

    def take_ended(self, wait_s: float = 0.0) -> tuple[KVMoveResult, ...]:
        """Moves that ended since the last call; waits so long for a first one."""
        with self._news:
            if wait_s:
                self._news.wait_for(lambda: self._ended, wait_s)
            ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> None:
        """Drop moves that have not begun and wait for the one that has."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _run(self, move: KVMove) -> None:
        num_pages = 0
        try:
            with torch.inference_mode():
                num_pages = self._load(move) if move.kind == MoveKind.LOAD else self._save(move)
        except Exception:
            log.exception("move %d failed", move.number)
        with self._news:
            self._ended.append(KVMoveResult(move.number, num_pages))
            self._news.notify()

    def _load(self, move: KVMove) -> int:
        lease = self._store.acquire([self._identity.key(digest) for digest in move.digests], SSD_WAIT_S)
        if lease is None:
            return 0
        with lease:
            for number, page in enumerate(move.page_ids[: len(lease.blocks)]):
                # By way of a buffer, verified there: a page never holds what may be wrong.
                if not lease.copy(number, self._bytes):
                    return number
                self._scatter(page)
            return min(len(lease.blocks), len(move.page_ids))

    def _save(self, move: KVMove) -> int:
        lease = self._store.reserve([self._identity.key(digest) for digest in move.digests], self._page_bytes)
        if lease is None:
            return 0
        with lease:
            for number in lease.wanted:
                self._gather(move.page_ids[number])
                if not lease.write(number, self._bytes):
                    return 0
            # Those that were not wanted are there already.
            return len(move.page_ids) if not lease.wanted or lease.commit() else 0

    def _gather(self, page: int) -> None:
        self._paged(self._staging).copy_(torch.stack([layer[:, page] for layer in self._cache.layers]))

    def _scatter(self, page: int) -> None:
        for layer, values in zip(self._cache.layers, self._paged(self._staging)):
            layer[:, page] = values

    def _paged(self, staging: torch.Tensor) -> torch.Tensor:
        """A page's bytes as [layers, K and V, heads, page size, head dim]."""
        shape = self._cache.shape
        values = staging.view(self._cache.layers[0].dtype)
        return values.view(shape.num_layers, 2, shape.num_kv_heads, shape.page_size, shape.head_dim)
