"""A KV store in this process, without transport, and caches to fill it from: for tests of moves."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from simulated_gpu import SimulatedGpu

from kvstore.client_leases import Arrival, ReadLease, WriteLease
from kvstore.keys import KVBlock
from kvstore.record import slot_bytes_for
from kvstore.service import KVService
from kvstore.settings import KVServiceConfig
from worker.kv_cache import KVCache, KVCacheShape
from worker.page_copy_cuda import CudaPageCopier
from worker.store_keys import PageIdentity

NUM_PAGES = 24


class LocalStore:
    """A KVService as a client shows it, without transport. `spoil` may do as it likes to what is leased."""

    def __init__(self, cpu_bytes: int = 1 << 20) -> None:
        self.service = KVService(KVServiceConfig(cpu_bytes))
        self.now = 0.0
        self.corrupt: list[bytes] = []
        self.spoil = lambda blocks: blocks
        self.is_dead = False
        self.on_release = lambda blocks: None  # told what a lease was of, before it is released

    def acquire(self, keys, wait_s=0.0):
        acquired = self.service.acquire(keys)
        if self.is_dead or not acquired.blocks:
            return None
        arrival = self._arrival(acquired.lease_id, acquired.blocks)
        return ReadLease(arrival, self.spoil(acquired.blocks), lambda key, is_over: self.corrupt.append(key))

    def reserve(self, keys, payload_bytes):
        reserved = self.service.reserve(keys, payload_bytes)
        if self.is_dead:
            return None
        arrival = self._arrival(reserved.lease_id)
        return WriteLease(arrival, tuple(keys), reserved.offsets, payload_bytes, self.service.commit)

    def close(self) -> None:
        self.service.check_integrity()
        assert self.service.stats()["leases"] == 0
        assert self.service.close()

    def slot(self, block: KVBlock) -> memoryview:
        return self.service.arena.slot(block.offset, slot_bytes_for(block.payload_bytes))

    def _arrival(self, lease_id: int, blocks=()) -> Arrival:
        def release(lease_id: int) -> None:
            self.on_release(blocks)
            self.service.release(lease_id)

        return Arrival(self.service.arena.view, lease_id, self.now + 10.0, lambda: self.now, release)


@st.composite
def layouts(draw) -> tuple[KVCacheShape, torch.dtype]:
    sizes = [draw(st.integers(1, most)) for most in (3, 2, 5, 4)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return KVCacheShape(sizes[0], NUM_PAGES, sizes[1], sizes[2], 2 * sizes[3]), dtype


def random_cache(shape: KVCacheShape, dtype: torch.dtype, seed: int) -> KVCache:
    cache = KVCache(shape, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        layer.view(torch.uint8).random_(0, 256, generator=generator)
    return cache


def page_bytes(cache: KVCache, page: int) -> bytes:
    return b"".join(layer[:, page].contiguous().view(torch.uint8).numpy().tobytes() for layer in cache.layers)


def identity_of(cache: KVCache) -> PageIdentity:
    return PageIdentity(b"m" * 32, str(cache.layers[0].dtype).removeprefix("torch."), cache.shape, 0, 1)


def gpu_copier(cache: KVCache, gpu: SimulatedGpu, slot_pages: int = 1, num_slots: int = 1) -> CudaPageCopier:
    record_bytes = slot_bytes_for(cache.shape.elements_per_page * cache.layers[0].element_size())
    staging = torch.zeros(num_slots, slot_pages, record_bytes, dtype=torch.uint8)
    return CudaPageCopier(cache, staging, gpu, gpu)


class NoClose:
    """The store outlives a mover here."""

    def __init__(self, store) -> None:
        self.acquire, self.reserve = store.acquire, store.reserve
        self.num_faults = self.num_trips = 0

    def close(self) -> None:
        pass


def digests_of(pages) -> list[bytes]:
    return [b"d%031d" % page for page in pages]
