"""CPU over SSD: what is where, and what moves. Nothing here waits for a disk.

A record comes in by a put to the CPU tier. The SSD tier gets a copy in the background once the record has been hit
often enough, so going from CPU to SSD costs an eviction nothing; and a record found on SSD only is loaded back in
the background. Queues are bounded, drops are counted. A hit counts as a use in both tiers. Knows nothing of leases
and clients. The caller holds the lock around every method; background jobs take it themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.background import Background
from kvstore.counters import Counters
from kvstore.keys import KVKey, Tier
from kvstore.record import slot_bytes_for
from kvstore.residents import Residents
from kvstore.ssd import SsdTier

COUNTERS = (
    "cpu_evictions",
    "cpu_lost",  # of these: on no tier any more
    "demotions",  # copies to SSD asked for
    "demotions_dropped",  # too many were waiting
    "demotions_late",  # evicted before a thread came to it
    "promotions",  # loads from SSD asked for
    "promotions_dropped",  # too many were waiting, or no room in the CPU tier
    "promotions_failed",  # the record was not there, or not whole
)
NUM_READERS = 8  # threads that read the SSD; more than keep a disk busy, as each waits its turn to run Python too
_MAX_WAITING_WRITES = 65536  # keys only: nothing is kept in memory for them
_MAX_WAITING_READS = 16384  # each has its room in the CPU tier
_JOB_BYTES = 1 << 20  # of records that one reader is given at once: they are read, and handed over, together

Slots = Callable[[int, int], memoryview]  # offset and bytes to the arena's bytes


@dataclass(slots=True)
class _Load:
    """Records that one reader brings from SSD to their room in the CPU tier."""

    num_clears: int  # when it began
    keys: list[KVKey] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)
    num_bytes: int = 0  # of slots
    done: Future[None] = field(default_factory=Future)


class Tiers:
    """Two tiers, the second optional."""

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        slots: Slots,
        ssd: SsdTier | None,
        ssd_after_hits: int,
        lock: threading.RLock,
        counters: Counters,
        num_readers: int = NUM_READERS,
    ) -> None:
        """ssd_after_hits: hits after which a record goes to SSD; 0: when it is put."""
        self.cpu = Residents(capacity_bytes, slab_bytes, self._evicted)
        self.ssd = ssd
        self._slots = slots
        self._ssd_after_hits = ssd_after_hits
        self._lock = lock
        self._counters = counters
        self._num_clears = 0
        self._demoting: set[bytes] = set()
        self._loading: dict[bytes, Future[None]] = {}
        # One writer, as the SSD tier wants it; it is the disk that bounds what is written.
        self._writer = Background("kv-write", 1, _MAX_WAITING_WRITES) if ssd is not None else None
        self._readers = Background("kv-read", num_readers, _MAX_WAITING_READS) if ssd is not None else None

    def tier_of(self, key: KVKey) -> Tier:
        """The fastest tier that has the key."""
        if self.cpu.find(key) is not None:
            return Tier.CPU
        if key in self._loading or (self.ssd is not None and self.ssd.payload_bytes(key) is not None):
            return Tier.SSD
        return Tier.NONE

    def pin(self, key: KVKey) -> int | None:
        """Keep the key's record in the CPU tier; its handle, None if it is not there."""
        handle = self.cpu.find(key)
        if handle is not None:
            self.cpu.pin(handle)
        return handle

    def count_hit(self, handle: int) -> None:
        """The pinned record was asked for."""
        key = self.cpu.lru.key_of(handle)
        hits = self.cpu.count_hit(handle)
        if self.ssd is not None:
            on_ssd = self.ssd.touch(key)
            if not on_ssd and hits >= self._ssd_after_hits:
                self._demote(key)

    def publish(self, key: KVKey, offset: int, payload_bytes: int) -> bool:
        """A put is whole; False if the key was there already."""
        handle = self._publish(key, offset, payload_bytes)
        if handle is not None and self._ssd_after_hits == 0:
            self._demote(key)
        return handle is not None

    def load(self, keys: Sequence[KVKey]) -> list[Future[None]]:
        """Have records brought from SSD to the CPU tier; a future each, of the leading ones that can be.

        A future ends with its record's load, which may have failed; records that are read together share one.
        """
        futures: list[Future[None]] = []
        load = _Load(self._num_clears)
        for key in keys:
            if key in self._loading:
                futures.append(self._loading[key])
                continue
            if load.num_bytes >= _JOB_BYTES:
                if not self._begin_load(load):
                    return futures[: futures.index(load.done)]
                load = _Load(self._num_clears)
            if not self._make_room(load, key):
                break
            futures.append(load.done)
        if load.keys and not self._begin_load(load):
            return futures[: futures.index(load.done)]
        return futures

    def drop(self, key: KVKey) -> bool:
        """Forget the CPU tier's record, as its bytes are not what they should be; the SSD's own are verified."""
        handle = self.cpu.find(key)
        if handle is not None:
            self.cpu.drop(handle)
        return handle is not None

    def clear(self) -> None:
        """Forget everything, also what is being copied or loaded."""
        self._num_clears += 1
        for key in self.cpu.lru.keys_oldest_first():
            self.drop(KVKey(key))
        if self.ssd is not None:
            self.ssd.clear()

    def save_index(self) -> None:
        """Have the SSD tier's index brought up to date, soon."""
        if self._writer is not None and self.ssd is not None:
            self._writer.submit(self.ssd.save_index)

    @property
    def num_waiting(self) -> int:
        """Copies and loads that wait for a thread."""
        return sum(queue.num_waiting for queue in (self._writer, self._readers) if queue is not None)

    def finish(self) -> None:
        """Wait for the background; the caller must not hold the lock."""
        for queue in (self._readers, self._writer):
            if queue is not None:
                queue.finish()

    def close(self, timeout_s: float) -> bool:
        """End the background, then the SSD tier; whether that was done in time. The caller must not hold the lock.

        Copies that still wait get half of the time.
        """
        queues = [queue for queue in (self._readers, self._writer) if queue is not None]
        closed = [queue.close(timeout_s) for queue in queues]  # each of them, whatever the others did
        in_time = all(closed)
        if self.ssd is not None and in_time:
            self.ssd.close()
        return in_time

    def _publish(self, key: bytes, offset: int, payload_bytes: int) -> int | None:
        """A key that both tiers have is one object: of a million, 80 MB less."""
        return self.cpu.publish(key if self.ssd is None else self.ssd.own(key), offset, payload_bytes)

    def _evicted(self, key: bytes) -> None:
        self._counters.add("cpu_evictions")
        if self.ssd is None or self.ssd.payload_bytes(key) is None:
            self._counters.add("cpu_lost")

    def _demote(self, key: bytes) -> None:
        if self._writer is None or self.ssd is None or key in self._demoting:
            return
        if self.ssd.payload_bytes(key) is not None:
            return
        self._counters.add("demotions")
        self._demoting.add(key)
        if not self._writer.submit(lambda: self._copy_to_ssd(key)):
            self._demoting.discard(key)
            self._counters.add("demotions_dropped")

    def _copy_to_ssd(self, key: bytes) -> None:
        """In the writer's thread."""
        assert self.ssd is not None
        with self._lock:
            self._demoting.discard(key)
            handle = self.cpu.find(key)
            if handle is None or not self.cpu.hold(handle):
                self._counters.add("demotions_late")
                return
            num_clears, payload_bytes = self._num_clears, self.cpu.payload_bytes(handle)
            slot = self._slots(self.cpu.offset(handle), slot_bytes_for(payload_bytes))
        try:
            self.ssd.write(key, slot, payload_bytes)
        finally:
            with self._lock:
                self.cpu.unhold(handle)
                if num_clears < self._num_clears:
                    self.ssd.drop(key)

    def _make_room(self, load: _Load, key: KVKey) -> bool:
        """Add the key to a load; False if it is not on SSD, or the CPU tier has no room."""
        payload_bytes = self.ssd.payload_bytes(key) if self.ssd is not None else None
        if payload_bytes is None:
            return False
        self._counters.add("promotions")
        offset = self.cpu.reserve(payload_bytes)
        if offset is None:
            self._counters.add("promotions_dropped")
            return False
        load.keys.append(key)
        load.offsets.append(offset)
        load.payload_bytes.append(payload_bytes)
        load.num_bytes += slot_bytes_for(payload_bytes)
        self._loading[key] = load.done
        return True

    def _begin_load(self, load: _Load) -> bool:
        """Give it to a reader; False, and nothing left of it, if too many wait."""
        assert self._readers is not None
        if self._readers.submit(lambda: self._load(load)):
            return True
        self._counters.add("promotions_dropped", len(load.keys))
        for key, offset in zip(load.keys, load.offsets):
            del self._loading[key]
            self.cpu.cancel(offset)
        return False

    def _load(self, load: _Load) -> None:
        """In a reader's thread."""
        assert self.ssd is not None
        whole = [False] * len(load.keys)
        try:
            slots = [self._slots(*place) for place in zip(load.offsets, map(slot_bytes_for, load.payload_bytes))]
            whole = self.ssd.read_all(list(zip(load.keys, slots)))
        finally:
            with self._lock:
                for key, offset, payload_bytes, is_good in zip(load.keys, load.offsets, load.payload_bytes, whole):
                    del self._loading[key]
                    if is_good and load.num_clears == self._num_clears:
                        self._publish(key, offset, payload_bytes)
                    else:
                        self.cpu.cancel(offset)
                self._counters.add("promotions_failed", whole.count(False))
            load.done.set_result(None)
