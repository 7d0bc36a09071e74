"""Moves of pages over a real store's tiers in this process: by the CPU's copier, and by the GPU's on simulated streams.

Whatever the layout, the order of copies and the state of the records: the bytes of a page are those that were saved,
or the page is as it was.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager

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
from simulated_gpu import SimulatedGpu

from kvstore.keys import KVBlock
from scheduler.plan import KVMove, MoveKind
from worker import dma_memory, store_loads
from worker.kernels import page_copy
from worker.kv_cache import KVCache, KVCacheShape
from worker.page_copy import CpuPageCopier
from worker.store_pages import PageMover

torch.set_num_threads(1)


@contextmanager
def mover_of(cache: KVCache, store, kind: str, seed: int = 0, slot_pages: int = 1, num_slots: int = 1):
    """A mover of either kind; staging as small as asked, so that slots are used again and again."""
    if kind == "cpu":
        copiers = [CpuPageCopier(cache, slot_pages, num_slots) for _ in range(2)]
    else:
        gpus = [SimulatedGpu(cache.layers, seed + direction, kind == "bounced") for direction in range(2)]
        copiers = [gpu_copier(cache, gpu, slot_pages, num_slots) for gpu in gpus]
    mover = PageMover(*copiers, identity_of(cache), NoClose(store))
    try:
        yield mover
    finally:
        mover.close()


def run(mover: PageMover, kind: MoveKind, pages, digests) -> int:
    """One move to its end; how many pages it copied."""
    mover.start([KVMove(7, kind, tuple(pages), tuple(digests))])
    results = mover.take_ended(20.0)
    assert [result.number for result in results] == [7]
    assert results[0].run_s > 0
    return results[0].num_pages


COPIERS = ["cpu", "registered", "bounced"]
PAGES = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces that end within records, so that transfers are split there."""
    monkeypatch.setattr(dma_memory, "PIECE_BYTES", 10_000)


@pytest.fixture(autouse=True)
def small_leases(monkeypatch):
    """So that a load needs several."""
    monkeypatch.setattr(store_loads, "LEASE_PAGES", 4)


@pytest.mark.parametrize("copier", COPIERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), layout=layouts(), pages=PAGES, seed=st.integers(0, 10**6))
def test_what_was_saved_is_what_is_loaded(copier, data, layout, pages, seed):
    store, saved, loaded = LocalStore(), random_cache(*layout, seed), random_cache(*layout, seed + 1)
    sizes = {"slot_pages": data.draw(st.integers(1, 5)), "num_slots": data.draw(st.integers(1, 3))}
    # Some are there before, so that room for the others does not lie side by side.
    before = data.draw(st.lists(st.sampled_from(pages), unique=True, max_size=len(pages) - 1))
    with mover_of(saved, store, "cpu") as mover:
        assert not before or run(mover, MoveKind.STORE, before, digests_of(before)) == len(before)
    with mover_of(saved, store, copier, seed, **sizes) as mover:
        assert run(mover, MoveKind.STORE, pages, digests_of(pages)) == len(pages)
    targets = random.Random(seed).sample(range(NUM_PAGES), len(pages))
    expected = {page: page_bytes(loaded, page) for page in range(NUM_PAGES)}
    expected |= {target: page_bytes(saved, page) for page, target in zip(pages, targets)}
    with mover_of(loaded, store, copier, seed, **sizes) as mover:
        assert run(mover, MoveKind.LOAD, targets, digests_of(pages)) == len(pages)
    assert {page: page_bytes(loaded, page) for page in range(NUM_PAGES)} == expected
    assert not store.corrupt
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
@settings(deadline=None, max_examples=25)
@given(
    data=st.data(),
    layout=layouts(),
    pages=PAGES,
    fault=st.sampled_from(["payload", "header", "another", "size", "over"]),
)
def test_a_wrong_record_ends_a_load_and_reaches_no_page(copier, data, layout, pages, fault):
    store, saved, loaded = LocalStore(), random_cache(*layout, 1), random_cache(*layout, 2)
    with mover_of(saved, store, "cpu") as mover:
        assert run(mover, MoveKind.STORE, pages, digests_of(pages)) == len(pages)
    first_wrong = data.draw(st.integers(0, len(pages) - 1))
    place, bit = data.draw(st.floats(0, 1, exclude_max=True)), data.draw(st.integers(0, 7))

    num_leased, num_right = 0, len(pages) if fault == "over" else first_wrong  # what was verified is right

    def spoil(blocks):
        nonlocal num_leased, num_right
        number, num_leased = first_wrong - num_leased, num_leased + len(blocks)
        if not 0 <= number < len(blocks):
            return blocks
        block = blocks[number]
        if fault == "over":
            store.now += 11.0
        elif fault == "another":
            other = blocks[number - 1]
            blocks = [*blocks]
            blocks[number] = KVBlock(block.key, other.offset, block.payload_bytes, block.tier)
            num_right = len(pages) if len(blocks) == 1 else first_wrong  # it is its own neighbour
        elif fault == "size":
            blocks = [*blocks]
            blocks[number] = KVBlock(block.key, block.offset, block.payload_bytes - 1, block.tier)
        else:
            byte = 9 if fault == "header" else 256 + int(place * block.payload_bytes)
            store.slot(block)[byte] ^= 1 << bit
        return tuple(blocks)

    store.spoil = spoil
    sizes = {"slot_pages": data.draw(st.integers(1, 5)), "num_slots": data.draw(st.integers(1, 3))}
    before = [page_bytes(loaded, page) for page in range(NUM_PAGES)]
    with mover_of(loaded, store, copier, 3, **sizes) as mover:
        assert run(mover, MoveKind.LOAD, pages, digests_of(pages)) == num_right
    right = pages[:num_right]
    expected = [page_bytes(saved if page in right else loaded, page) for page in range(NUM_PAGES)]
    assert [page_bytes(loaded, page) for page in range(NUM_PAGES)] == expected
    assert all(page_bytes(loaded, page) == before[page] for page in range(NUM_PAGES) if page not in right)
    store.spoil = lambda blocks: blocks
    store.close()


@pytest.mark.parametrize("kind", list(MoveKind))
@settings(deadline=None, max_examples=25)
@given(data=st.data(), layout=layouts(), pages=PAGES, seed=st.integers(0, 10**6))
def test_what_a_transfer_harms_reaches_no_page(kind, data, layout, pages, seed):
    store, saved, loaded = LocalStore(), random_cache(*layout, 1), random_cache(*layout, 2)
    sizes = {"slot_pages": data.draw(st.integers(1, 5)), "num_slots": data.draw(st.integers(1, 3))}
    harmed = data.draw(st.integers(0, len(pages) - 1))
    before = [page_bytes(loaded, page) for page in range(NUM_PAGES)]
    movers = (mover_of(cache, store, "registered", seed, **sizes) for cache in (saved, loaded))
    with next(movers) as saving, next(movers) as loading:
        gpu = (saving._saves if kind is MoveKind.STORE else loading._loads)._dma
        gpu.harm = harmed
        assert run(saving, MoveKind.STORE, pages, digests_of(pages)) == len(pages)
        num_pages = run(loading, MoveKind.LOAD, pages, digests_of(pages))
    is_harmed = gpu.num_copies > harmed  # one copy may be of several records, or of a part of one
    assert (num_pages < len(pages)) == is_harmed
    right = pages[:num_pages]
    for page in range(NUM_PAGES):
        assert page_bytes(loaded, page) == (page_bytes(saved, page) if page in right else before[page])
    assert len(store.corrupt) == is_harmed
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("payload_bytes", [16, 5000])
def test_a_record_of_another_size_is_no_page(copier, payload_bytes):
    store, cache = LocalStore(), random_cache(KVCacheShape(1, NUM_PAGES, 1, 4, 8), torch.float16, 1)
    with mover_of(cache, store, copier) as mover:
        key = mover._identity.key(*digests_of([3]))
        lease = store.reserve([key], payload_bytes)
        assert lease.write(0, bytes(payload_bytes))
        assert lease.commit() == 1
        before = page_bytes(cache, 3)
        assert run(mover, MoveKind.LOAD, [3], digests_of([3])) == 0
        assert page_bytes(cache, 3) == before
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
def test_a_store_that_is_started_anew_during_a_load_ends_it(copier):
    layout = KVCacheShape(2, NUM_PAGES, 2, 4, 8), torch.float16
    saved, loaded, stores = random_cache(*layout, 1), random_cache(*layout, 2), [LocalStore(), LocalStore()]
    for store in stores:
        with mover_of(saved, store, "cpu") as mover:
            assert run(mover, MoveKind.STORE, range(12), digests_of(range(12))) == 12
    before = page_bytes(loaded, 4)
    with mover_of(loaded, stores[0], copier, slot_pages=2, num_slots=2) as mover:
        first_lease = mover._store.acquire

        def acquire(keys, wait_s):
            mover._store.acquire = stores[1].acquire
            return first_lease(keys, wait_s)

        mover._store.acquire = acquire
        assert run(mover, MoveKind.LOAD, range(12), digests_of(range(12))) == 4
    assert [page_bytes(loaded, page) for page in range(4)] == [page_bytes(saved, page) for page in range(4)]
    assert page_bytes(loaded, 4) == before
    for store in stores:
        store.close()


@pytest.mark.parametrize("copier", COPIERS)
def test_a_lease_that_ends_during_a_save_makes_nothing_visible(copier):
    store, layout = LocalStore(), (KVCacheShape(2, NUM_PAGES, 2, 4, 8), torch.float16)
    cache, pages = random_cache(*layout, 1), range(12)
    reserve = store.reserve

    def late(keys, payload_bytes):
        lease = reserve(keys, payload_bytes)
        store.now += 11.0
        return lease

    store.reserve = late
    with mover_of(cache, store, copier, slot_pages=2, num_slots=2) as mover:
        assert run(mover, MoveKind.STORE, pages, digests_of(pages)) == 0
    assert store.service.stats()["cpu_records"] == 0
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
def test_pages_that_are_there_count_as_saved_and_those_without_room_do_not(copier):
    store, layout = LocalStore(1 << 16), (KVCacheShape(2, NUM_PAGES, 2, 4, 8), torch.float16)
    cache = random_cache(*layout, 1)
    with mover_of(cache, store, copier, slot_pages=2, num_slots=2) as mover:
        assert run(mover, MoveKind.STORE, range(4), digests_of(range(4))) == 4
        assert run(mover, MoveKind.STORE, range(4), digests_of(range(4))) == 4
        assert store.service.stats()["puts"] == 4
        kept = store.acquire([mover._identity.key(digest) for digest in digests_of(range(4))])
        # A store in which half is in use has no room for all others.
        num_saved = run(mover, MoveKind.STORE, range(NUM_PAGES), digests_of(range(NUM_PAGES)))
        assert 4 <= num_saved < NUM_PAGES
        kept.release()
    assert store.service.stats()["cpu_records"] >= num_saved
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
def test_each_kind_of_move_has_its_own_turn_and_every_move_ends(copier):
    store, layout = LocalStore(), (KVCacheShape(1, NUM_PAGES, 1, 4, 8), torch.float32)
    cache = random_cache(*layout, 1)
    with mover_of(cache, store, copier, slot_pages=4, num_slots=3) as mover:
        moves = [KVMove(n, MoveKind.STORE if n % 2 else MoveKind.LOAD, (n,), tuple(digests_of([n]))) for n in range(20)]
        mover.start(moves)
        store.is_dead = True
        ended: dict[int, int] = {}
        while len(ended) < len(moves):
            results = mover.take_ended(20.0)
            assert results, "a move never ends"
            ended |= {result.number: result.num_pages for result in results}
        assert sorted(ended) == list(range(20))
        assert all(ended[n] == 0 for n in range(0, 20, 2))
    store.service.close()


def test_a_save_of_blocks_side_by_side_is_one_transfer_a_slot(monkeypatch):
    monkeypatch.setattr(dma_memory, "PIECE_BYTES", 1 << 20)
    store, cache = LocalStore(), random_cache(KVCacheShape(2, NUM_PAGES, 2, 4, 8), torch.float16, 1)
    gpus = [SimulatedGpu(cache.layers, seed) for seed in range(2)]
    copiers = [gpu_copier(cache, gpu, slot_pages=8, num_slots=3) for gpu in gpus]
    mover = PageMover(*copiers, identity_of(cache), NoClose(store))
    for kind in (MoveKind.STORE, MoveKind.LOAD):
        assert run(mover, kind, range(NUM_PAGES), digests_of(range(NUM_PAGES))) == NUM_PAGES
    assert [gpu.num_copies for gpu in gpus] == [3, 3]
    mover.close()
    store.close()


@settings(deadline=None, max_examples=50)
@given(layout=layouts(), pages=PAGES, padding=st.sampled_from([0, 16, 4096]))
def test_records_are_pages_of_all_layers_one_after_the_other(layout, pages, padding):
    cache, copy = random_cache(*layout, 1), random_cache(*layout, 2)
    size = cache.shape.elements_per_page * cache.layers[0].element_size()
    records = torch.full((len(pages), size + padding), 7, dtype=torch.uint8)
    page_copy.gather(cache.layers, pages, records)
    assert [record[:size].numpy().tobytes() for record in records] == [page_bytes(cache, page) for page in pages]
    assert (records[:, size:] == 7).all()
    page_copy.scatter(copy.layers, pages, records)
    assert [page_bytes(copy, page) for page in pages] == [page_bytes(cache, page) for page in pages]


def test_faults_of_the_store_are_told_with_the_next_move_that_ends():
    cache, store = random_cache(KVCacheShape(1, NUM_PAGES, 2, 2, 4), torch.float32, 0), LocalStore()
    with mover_of(cache, store, "cpu") as mover:
        mover._store.num_faults, mover._store.num_trips = 3, 1
        told = []
        for number in range(2):
            mover.start([KVMove(number, MoveKind.STORE, (number,), tuple(digests_of([number])))])
            told += [(result.num_faults, result.num_trips) for result in mover.take_ended(10.0)]
            mover._store.num_faults += number
    assert told == [(3, 1), (0, 0)]
    store.close()


@pytest.mark.parametrize("copier", COPIERS)
def test_the_next_load_is_asked_for_while_one_is_copied(copier):
    store, cache = LocalStore(), random_cache(KVCacheShape(1, NUM_PAGES, 1, 4, 8), torch.float16, 1)
    pages, asked = [1, 2, 3], threading.Semaphore(0)
    with mover_of(cache, store, copier) as mover:
        assert run(mover, MoveKind.STORE, pages, digests_of(pages)) == len(pages)
        fetch, acquire = mover._loads.fetch, mover._store.acquire
        overtaken = []

        def asking(keys, wait_s=0.0):
            lease = acquire(keys, wait_s)
            asked.release()
            return lease

        def fetching(*slot):  # of the first load: not before the second one has been asked for, too
            overtaken.append(bool(overtaken) or (asked.acquire(timeout=5) and asked.acquire(timeout=5)))
            fetch(*slot)

        mover._store.acquire, mover._loads.fetch = asking, fetching
        before = [page_bytes(cache, page) for page in pages]
        mover.start([KVMove(n, MoveKind.LOAD, (10 + n,), tuple(digests_of([pages[n]]))) for n in range(3)])
        results = []
        while len(results) < 3:
            results += mover.take_ended(20.0)
        assert [(result.number, result.num_pages) for result in results] == [(n, 1) for n in range(3)]
        assert overtaken == [True] * 3
        assert [page_bytes(cache, 10 + n) for n in range(3)] == before
    store.close()


def test_loads_that_never_begin_hold_nothing():
    store, cache = LocalStore(), random_cache(KVCacheShape(1, NUM_PAGES, 1, 4, 8), torch.float16, 1)
    with mover_of(cache, store, "cpu") as mover:
        assert run(mover, MoveKind.STORE, [1, 2], digests_of([1, 2])) == 2
        begun, go_on, fetch = threading.Event(), threading.Event(), mover._loads.fetch

        def slow_fetch(*slot):
            begun.set()
            assert go_on.wait(10)
            fetch(*slot)

        mover._loads.fetch = slow_fetch
        mover.start([KVMove(n, MoveKind.LOAD, (5,), tuple(digests_of([1]))) for n in range(4)])
        assert begun.wait(10)
        threading.Timer(0.1, go_on.set).start()
    store.close()  # no lease is left
