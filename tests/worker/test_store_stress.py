"""Many loads and saves at once, with copies that fail and a real store that is killed and stalled: every page compared.

Five seconds by default; NANOFLOW_STRESS_S=60 for more.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from kv_store_process import StoreProcess
from local_store import NUM_PAGES, digests_of, gpu_copier, identity_of, page_bytes, random_cache
from simulated_gpu import SimulatedGpu

from kvstore.breaker import BreakerConfig
from kvstore.client import ClientConfig, KVClient
from scheduler.plan import KVMove, KVMoveResult, MoveKind
from worker.kv_cache import KVCacheShape
from worker.page_copy import CpuPageCopier
from worker.store_pages import PageMover

torch.set_num_threads(1)

SECONDS = float(os.environ.get("NANOFLOW_STRESS_S", "5"))
LAYOUT = KVCacheShape(2, NUM_PAGES, 2, 4, 16), torch.float16
MOST_AT_ONCE = 20  # moves
IMPATIENT = BreakerConfig(failures=3, open_s=0.05, max_open_s=0.2)  # tries again soon


class Moves:
    """Moves between two caches by way of a store, and what must be in the pages."""

    def __init__(self, kind: str, address: str, chance: random.Random) -> None:
        self.saved, self.loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
        self.copiers = [self._copier(kind, cache, seed) for seed, cache in enumerate((self.loaded, self.saved))]
        for copier, names in zip(self.copiers, (("fetch", "num_whole", "scatter"), ("send", "seal"))):
            for name in names:
                setattr(copier, name, sometimes_failing(getattr(copier, name), random.Random(chance.random())))
        client = KVClient(ClientConfig(address, call_timeout_s=0.3, breaker=IMPATIENT))
        self.mover = PageMover(*self.copiers, identity_of(self.loaded), client)
        self.counts = Counter[str]()
        self.on_way: dict[int, tuple[KVMove, list[int]]] = {}  # with the saved pages that are meant
        self._truth = [page_bytes(self.saved, page) for page in range(NUM_PAGES)]
        self._before: dict[int, bytes] = {}  # of pages that loads on the way may write
        self._chance, self._num_moves = chance, 0

    def start(self) -> None:
        """One more, if there are pages for it."""
        length, first = self._chance.choice([1, 2, 5, 9]), self._chance.randrange(NUM_PAGES)
        sources = [(first + place) % NUM_PAGES for place in range(length)]
        kind, targets = self._chance.choice(list(MoveKind)), sources
        if kind is MoveKind.LOAD:
            free = [page for page in range(NUM_PAGES) if page not in self._before]
            if len(free) < length:
                return
            targets = self._chance.sample(free, length)
            self._before.update((page, page_bytes(self.loaded, page)) for page in targets)
        move = KVMove(self._num_moves, kind, tuple(targets), tuple(digests_of(sources)))
        self.on_way[move.number] = move, sources
        self._num_moves += 1
        self.mover.start([move])

    def take_ended(self, wait_s: float) -> None:
        """Check each."""
        for result in self.mover.take_ended(wait_s):
            move, sources = self.on_way.pop(result.number)
            self.counts[f"{move.kind} pages"] += result.num_pages
            if move.kind is MoveKind.LOAD:
                self._check(move, result, sources)

    def _check(self, move: KVMove, result: KVMoveResult, sources: list[int]) -> None:
        for place, (page, source) in enumerate(zip(move.page_ids, sources)):
            found, truth, before = page_bytes(self.loaded, page), self._truth[source], self._before.pop(page)
            assert found == truth or (place >= result.num_pages and found == before), (result, place)

    def _copier(self, kind: str, cache, seed: int):
        if kind == "cpu":
            return CpuPageCopier(cache, 2, 3)
        return gpu_copier(cache, SimulatedGpu(cache.layers, seed), 2, 3)


def sometimes_failing(method, chance: random.Random):
    def wrapper(*arguments):
        if chance.random() < 0.003:
            raise RuntimeError("no reason")
        return method(*arguments)

    return wrapper


def harm(store: StoreProcess, chance: random.Random, is_over: threading.Event) -> None:
    """Kill and stall it now and then."""
    while not is_over.wait(chance.uniform(0.3, 1.5)):
        if chance.random() < 0.6:
            store.stop()
            store.start()
        else:
            store.process.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 0.6))
            store.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_no_page_is_ever_wrong_and_nothing_is_kept(kind, store, caplog):
    caplog.set_level(logging.CRITICAL)  # each failure is logged
    chance, is_over = random.Random(kind), threading.Event()
    moves = Moves(kind, store.address, chance)
    harming = threading.Thread(target=harm, args=(store, random.Random(7), is_over))
    harming.start()
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            moves.start()
            moves.take_ended(10.0 if len(moves.on_way) >= MOST_AT_ONCE else 0.0)
            assert len(moves.on_way) <= MOST_AT_ONCE, "moves do not end"
        deadline = time.monotonic() + 20
        while moves.on_way and time.monotonic() < deadline:
            moves.take_ended(1.0)
    finally:
        is_over.set()
        harming.join()
    assert not moves.on_way, "moves do not end"
    assert sorted(moves.mover._page_loads._free) == list(range(3)), "a slot is lost"
    assert moves.counts["load pages"] > 100, moves.counts
    moves.mover.close()
    deadline = time.monotonic() + 12  # leases that were not given back end by themselves
    while store.stats().get("leases", 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert store.stats()["leases"] == 0
    print(kind, moves.counts)
