"""Loads that follow each other: they overlap, and what happens to one of them harms no other."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_store import (
    NUM_PAGES,
    LocalStore,
    NoClose,
    digests_of,
    gpu_copier,
    identity_of,
    layouts,
    page_bytes,
    random_cache,
)
from simulated_gpu import SimulatedGpu, TimedGpu

from kvstore.keys import KVBlock
from kvstore.record import slot_bytes_for
from scheduler.plan import KVMove, MoveKind
from worker import dma_memory, store_loads
from worker.dma_memory import address_of
from worker.kv_cache import KVCache, KVCacheShape
from worker.page_copy import CpuPageCopier
from worker.store_loads import PageLoads
from worker.store_pages import PageMover

torch.set_num_threads(1)

LAYOUT = KVCacheShape(2, NUM_PAGES, 2, 4, 8), torch.float16
TIMES = {"copy": 46.0, "checksum": 21.0, "scatter": 7.0, "mark": 0.0}  # of a slot, about as on a GPU


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Pieces that end within records, and leases of which a load needs several."""
    monkeypatch.setattr(dma_memory, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(store_loads, "LEASE_PAGES", 4)


class LateAnswers:
    """Stands for threads that call the store: an answer comes when it was looked for often enough, or is waited for."""

    def __init__(self, num_looks) -> None:
        """How often, of each answer anew."""
        self._num_looks, self._answers = num_looks, []

    def submit(self, ask) -> LateAnswer:
        answer = LateAnswer(ask, self._num_looks())
        self._answers.append(answer)
        answer.done()
        return answer

    def shutdown(self) -> None:
        for answer in self._answers:
            answer.come()


class LateAnswer(Future):
    def __init__(self, ask, num_looks: int) -> None:
        super().__init__()
        self._ask, self._looks_left = ask, num_looks

    def come(self) -> None:
        if not super().done():
            self.set_result(self._ask())

    def done(self) -> bool:
        if self._looks_left:
            self._looks_left -= 1
        else:
            self.come()
        return super().done()

    def result(self, timeout=None):
        self.come()
        return super().result(timeout)


def filled_store(cache: KVCache) -> LocalStore:
    """With all pages of the cache, each under its own digest."""
    store, identity = LocalStore(), identity_of(cache)
    lease = store.reserve([identity.key(digest) for digest in digests_of(range(NUM_PAGES))], page_size(cache))
    assert all(lease.write(page, page_bytes(cache, page)) for page in range(NUM_PAGES))
    assert lease.commit() == NUM_PAGES
    return store


def page_size(cache: KVCache) -> int:
    return len(page_bytes(cache, 0))


class Loading:
    """Loads into a cache on a simulated GPU, in this thread; none is told whole before it is."""

    def __init__(self, saved: KVCache, loaded: KVCache, copier, store, num_looks=lambda: 0) -> None:
        self._saved, self._loaded = saved, loaded
        self.ended: dict[int, int] = {}
        self.loads = PageLoads(copier, identity_of(loaded), store, self._on_end)
        self.loads._calls.shutdown()
        self.loads._calls = LateAnswers(num_looks)
        self.before = {page: page_bytes(loaded, page) for page in range(NUM_PAGES)}
        self.targets: dict[int, dict[int, int]] = {}  # by move: the page that is loaded, by the one that was saved

    def add(self, pages, targets=None) -> int:
        """A load of these saved pages to others: its number."""
        number = len(self.targets)
        self.targets[number] = dict(zip(pages, targets or pages))
        self.loads.add(KVMove(number, MoveKind.LOAD, tuple(targets or pages), tuple(digests_of(pages))))
        return number

    def _on_end(self, move: KVMove, num_pages: int, run_s: float) -> None:
        assert run_s >= 0
        assert len(self.ended) == move.number, "loads end in turn"
        self.ended[move.number] = num_pages
        self.check(move.number)

    def check(self, number: int) -> None:
        """The pages that are loaded are those that were saved; others are as they were."""
        num_pages = self.ended[number]
        for place, (page, target) in enumerate(self.targets[number].items()):
            expected = page_bytes(self._saved, page) if place < num_pages else self.before[target]
            assert page_bytes(self._loaded, target) == expected, (number, place)

    def close(self) -> None:
        self.loads.close()
        for number in self.targets:
            self.check(number)


@pytest.mark.parametrize("num_slots", [2, 3, 5])
@pytest.mark.parametrize("num_pages", [8, 7, 2, 1])
def test_the_link_never_idles_between_loads_and_each_ends_when_its_own_pages_are_there(
    num_pages, num_slots, monkeypatch
):
    monkeypatch.setattr(dma_memory, "PIECE_BYTES", 1 << 30)  # one transfer a slot
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store, gpu = filled_store(saved), TimedGpu(loaded.layers, TIMES)
    copier = gpu_copier(loaded, gpu, slot_pages=2, num_slots=num_slots)
    loading, ends = Loading(saved, loaded, copier, store), []
    told = loading.loads._on_end
    loading.loads._on_end = lambda *end: (told(*end), ends.append(gpu.now))
    for first in (0, 8, 16):
        loading.add(range(first, first + num_pages))
    loading.loads.run()
    copies, slots = gpu.spans["copy"], -(-num_pages // 2)
    assert len(copies) == 3 * slots
    assert all(end == start for (_, end), (start, _) in zip(copies, copies[1:])), "the link idles"
    assert ends == [gpu.spans["scatter"][load * slots - 1][1] for load in (1, 2, 3)]
    assert ends[0] < copies[-1][1]
    loading.close()
    copier.close()
    store.close()


def test_a_wrong_record_harms_no_load_that_is_under_way_with_it():
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store, gpu = filled_store(saved), SimulatedGpu(loaded.layers, 3)
    copier = gpu_copier(loaded, gpu, num_slots=3)
    loading = Loading(saved, loaded, copier, store)
    first, second = loading.add([0, 1, 2, 3]), loading.add([4, 5, 6, 7])
    store.slot(block_of(store, loaded, 2))[300] ^= 1
    under_way: list[dict[int, int]] = []  # slots by load, beside the one that is judged
    num_whole = copier.num_whole

    def judge(slot):
        under_way.append({load.move.number: len(load.under_way) for load in loading.loads._begun})
        return num_whole(slot)

    copier.num_whole = judge
    loading.loads.run()
    assert under_way[2] == {first: 1, second: 1}  # as page 2 is judged
    assert loading.ended == {first: 2, second: 4}
    assert len(store.corrupt) == 1
    loading.close()
    copier.close()
    store.close()


def test_a_load_ends_while_the_store_has_not_answered_for_the_next():
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store, gpu = filled_store(saved), SimulatedGpu(loaded.layers, 3)
    copier = gpu_copier(loaded, gpu, num_slots=3)
    loading = Loading(saved, loaded, copier, store, lambda: 1000)  # so that only waiting helps
    ended, acquire = [], store.acquire
    store.acquire = lambda *question: (ended.append(dict(loading.ended)), acquire(*question))[1]
    loading.add([0, 1, 2, 3])
    loading.add([4, 5, 6, 7])
    loading.loads.run()
    assert ended == [{}, {0: 4}]
    assert loading.ended == {0: 4, 1: 4}
    loading.close()
    copier.close()
    store.close()


def block_of(store: LocalStore, cache: KVCache, page: int) -> KVBlock:
    with store.acquire([identity_of(cache).key(digest) for digest in digests_of([page])]) as lease:
        return lease.blocks[0]


def test_a_store_that_is_started_anew_between_two_loads_is_read_by_the_second_only():
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    stores, gpu = [filled_store(saved), filled_store(saved)], SimulatedGpu(loaded.layers, 3)
    copier = gpu_copier(loaded, gpu, num_slots=3)
    loading = Loading(saved, loaded, copier, stores[0])
    asked = iter(stores)
    loading.loads._store = SimpleNamespace(acquire=lambda *question: next(asked).acquire(*question))
    registered = []
    fetch = copier.fetch

    def fetching(slot, lease, numbers):
        fetch(slot, lease, numbers)
        registered.append([any(inside(store, address) for address in gpu.registered) for store in stores])
        if len(registered) == 4:  # the last of the first load
            gpu.memory.forget(stores[0].service.arena.view)

    copier.fetch = fetching
    loading.add([0, 1, 2, 3])
    loading.add([4, 5, 6, 7])
    loading.loads.run()
    assert loading.ended == {0: 4, 1: 4}
    assert registered == [[True, False]] * 4 + [[True, True]] * 2 + [[False, True]] * 2
    loading.close()
    copier.close()
    for store in stores:
        store.close()


def inside(store: LocalStore, address: int) -> bool:
    first = address_of(store.service.arena.view)
    return first <= address < first + store.service.arena.view.nbytes


@pytest.mark.parametrize("copier", ["cpu", "gpu"])
def test_closing_waits_for_all_loads_that_have_begun_and_drops_the_others(copier):
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store = filled_store(saved)
    if copier == "cpu":
        copiers = [CpuPageCopier(loaded, 1, 3) for _ in range(2)]
    else:
        copiers = [gpu_copier(loaded, SimulatedGpu(loaded.layers, seed), num_slots=3) for seed in range(2)]
    mover = PageMover(*copiers, identity_of(loaded), NoClose(store))
    before = page_bytes(loaded, 8)
    both, go_on, fetch = threading.Event(), threading.Event(), mover._loads.fetch
    num_fetched = 0

    def fetching(*slot):
        nonlocal num_fetched
        num_fetched += 1
        if num_fetched == 5:  # the second load's first
            both.set()
            assert go_on.wait(10)
        fetch(*slot)

    mover._loads.fetch = fetching
    sources = [range(first, first + 4) for first in (0, 4, 8)]
    mover.start([KVMove(n, MoveKind.LOAD, tuple(each), tuple(digests_of(each))) for n, each in enumerate(sources)])
    assert both.wait(10)
    closing = threading.Thread(target=mover.close)
    closing.start()
    while mover._page_loads._waiting and closing.is_alive():
        time.sleep(0.001)
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    assert [(result.number, result.num_pages) for result in mover.take_ended()] == [(0, 4), (1, 4)]
    assert all(page_bytes(loaded, page) == page_bytes(saved, page) for page in range(8))
    assert page_bytes(loaded, 8) == before
    store.close()  # no lease is left


@pytest.mark.parametrize("where", ["fetch", "num_whole", "scatter"])
@pytest.mark.parametrize("call", range(8))
def test_a_copier_that_fails_once_ends_the_load_it_was_called_for(where, call):
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store, gpu = filled_store(saved), SimulatedGpu(loaded.layers, 3)
    copier = gpu_copier(loaded, gpu, num_slots=3)
    loading = Loading(saved, loaded, copier, store)
    setattr(copier, where, failing_at(call, getattr(copier, where)))
    for first in (0, 4, 8):
        loading.add(range(first, first + 4))
    loading.loads.run()
    harmed, place = divmod(call, 4)
    assert loading.ended.pop(harmed) <= place
    assert set(loading.ended.values()) == {4}
    assert sorted(loading.loads._free) == [0, 1, 2]
    copier.close()
    store.close()


def failing_at(call: int, method):
    """As the method, but for one call."""
    calls = count()

    def wrapper(*arguments):
        if next(calls) == call:
            raise RuntimeError("no reason")
        return method(*arguments)

    return wrapper


def test_pages_that_may_still_be_written_are_told_as_not_loaded():
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store, gpu = filled_store(saved), SimulatedGpu(loaded.layers, 3)
    copier = gpu_copier(loaded, gpu, num_slots=3)
    ended = []
    loads = PageLoads(copier, identity_of(loaded), store, lambda move, num_pages, run_s: ended.append(num_pages))
    copier.settle = failing_at(0, copier.settle)
    for pages in ([0, 1], [2, 3]):
        loads.add(KVMove(0, MoveKind.LOAD, tuple(pages), tuple(digests_of(pages))))
    loads.run()
    assert ended == [0, 2]
    loads.close()
    copier.close()
    store.close()


def test_that_loads_have_stopped_is_said(caplog):
    saved, loaded = random_cache(*LAYOUT, 1), random_cache(*LAYOUT, 2)
    store = filled_store(saved)
    mover = PageMover(CpuPageCopier(loaded), CpuPageCopier(loaded), identity_of(loaded), NoClose(store))
    mover._page_loads._on_end = failing_at(0, mover._page_loads._on_end)
    mover.start([KVMove(0, MoveKind.LOAD, (0, 1), tuple(digests_of([0, 1])))])
    mover.close()
    assert mover.take_ended() == ()
    assert "loads have stopped" in caplog.text


@settings(deadline=None, max_examples=150)
@given(data=st.data(), layout=layouts(), seed=st.integers(0, 10**6))
def test_whatever_happens_to_some_loads_pages_hold_what_was_saved_or_are_as_they_were(data, layout, seed):
    saved, loaded = random_cache(*layout, 1), random_cache(*layout, 2)
    stores = [filled_store(saved), filled_store(saved)]
    gpu = SimulatedGpu(loaded.layers, seed, refuse=data.draw(st.booleans()))
    copier = gpu_copier(loaded, gpu, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    for store in stores:
        store.on_release = lambda blocks, store=store: check_nothing_reads(gpu, store, blocks)
    loading = Loading(saved, loaded, copier, stores[0], lambda: data.draw(st.integers(0, 3)))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    sources, targets = (iter(random.Random(seed + n).sample(range(NUM_PAGES), NUM_PAGES)) for n in range(2))
    gpu.refuse_copy = data.draw(st.none() | st.integers(0, 20))
    expected = {}
    for length in lengths:
        pages, places = ([each for _, each in zip(range(length), several)] for several in (sources, targets))
        if not pages:
            break
        kind = data.draw(st.sampled_from(["none", "none", "missing", "payload", "header", "restarted"]))
        fault = data.draw(st.integers(0, len(pages) - 1))  # the place where it is
        digests = pages
        if kind in ("payload", "header"):
            for store in stores:
                byte = 9 if kind == "header" else 256
                store.slot(block_of(store, saved, pages[fault]))[byte] ^= 1
        elif kind == "missing":
            digests = [*pages[:fault], 1000, *pages[fault + 1 :]]
        elif kind == "restarted":
            loading.loads._store = stores[1]
            gpu.memory.forget(stores[0].service.arena.view)
        number = loading.add(digests, places)
        loading.targets[number] = dict(zip(pages, places))
        expected[number] = fault if kind in ("missing", "payload", "header") else len(pages)
        if data.draw(st.integers(0, 3)) == 0:
            loading.loads.run()
    loading.loads.run()
    assert loading.ended.keys() == expected.keys()
    assert all(loading.ended[number] <= expected[number] for number in expected)
    num_short = sum(loading.ended[number] < expected[number] for number in expected)
    assert num_short <= (gpu.refuse_copy is not None) + (loading.loads._store is stores[1])
    loading.close()
    for page in targets:
        assert page_bytes(loaded, page) == loading.before[page]
    copier.close()
    for store in stores:
        store.close()


def check_nothing_reads(gpu: SimulatedGpu, store: LocalStore, blocks) -> None:
    """No copy is under way from these records."""
    first = address_of(store.service.arena.view)
    for block in blocks:
        start, stop = first + block.offset, first + block.offset + slot_bytes_for(block.payload_bytes)
        assert all(at + size <= start or stop <= at for at, size in gpu.reading), "a lease ends before its transfers"
