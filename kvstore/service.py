"""The store itself, in process: puts and gets by leases, over the tiers. The server only carries its calls.

A put is reserve, write into the arena, commit; a get is acquire, copy out of the arena and verify, release. Leases
end by themselves. A reservation whose lease ended keeps its bytes a while longer, as its writer may only be slow.
Of the keys named in one call the first counts as the most recently used: the head of a chain outlives its tail.
Knows nothing of transport. Safe for threads; no method waits for a disk, and none for more than the lock's few
microseconds a key, but `acquire` with a wait.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from kvstore import ssd as ssd_tier
from kvstore import tiers as two_tiers
from kvstore.arena import Arena
from kvstore.counters import Counters
from kvstore.files import Files
from kvstore.keys import NO_ROOM, NOT_NEEDED, InvalidCallError, KVBlock, KVKey, Tier
from kvstore.leases import Leases
from kvstore.record import HEADER_BYTES, read_header
from kvstore.settings import KVServiceConfig
from kvstore.ssd import SsdTier
from kvstore.tiers import Tiers

COUNTERS = (
    "lookups",  # calls
    "acquires",
    "hits_cpu",  # records
    "hits_ssd",
    "misses",
    "puts",  # records made visible
    "puts_not_needed",
    "puts_refused",  # no room
    "puts_not_whole",  # committed without a valid header
    "releases",
    "leases_expired",
    "reported_corrupt",  # records that a client found not to be whole
    "flushes",
)
GAUGES = (  # in `stats`, beside the counters
    "cpu_records",
    "cpu_used_bytes",
    "cpu_capacity_bytes",
    "ssd_records",
    "ssd_used_bytes",
    "ssd_capacity_bytes",
    "ssd_unsaved",  # records whose rows in the index are behind: what a kill would lose
    "leases",
    "quarantined",  # records' room that dead writers had
    "background_waiting",  # copies and loads
)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room for records that are to be written."""

    lease_id: int
    offsets: tuple[int, ...]  # by key: where its slot starts, or NOT_NEEDED or NO_ROOM


@dataclass(frozen=True, slots=True)
class Acquired:
    """Records that stay where they are until release or expiry."""

    lease_id: int  # 0: nothing was found
    blocks: tuple[KVBlock, ...]  # of the leading keys that were found


@dataclass(slots=True)
class Acquisition:
    """A get under way: what is pinned, what still loads."""

    keys: Sequence[KVKey]
    tiers: list[Tier]  # of the leading keys that some tier has
    handles: dict[KVKey, int] = field(default_factory=dict)  # pinned
    pending: list[Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Slot:
    key: KVKey
    offset: int
    payload_bytes: int


class KVService:
    """One store. `close` when done."""

    def __init__(
        self, config: KVServiceConfig, clock: Callable[[], float] = time.monotonic, files: Files | None = None
    ) -> None:
        """Raises StoreError if there is not the memory, or the folder cannot be used."""
        config.check()
        self.config = config
        self.boot_id = secrets.token_hex(16)
        self.counters = Counters((*COUNTERS, *two_tiers.COUNTERS, *ssd_tier.COUNTERS))
        self._clock = clock
        self._lock = threading.RLock()
        ssd = None
        if config.ssd_dir is not None:
            ssd = SsdTier(config.ssd_dir, config.ssd_bytes, self.counters, config.segment(), files)
        self.arena = Arena(config.cpu_bytes, config.arena_folder)
        self.tiers = Tiers(
            config.cpu_bytes,
            config.slab(),
            self.arena.slot,
            ssd,
            config.ssd_after_hits,
            self._lock,
            self.counters,
        )
        self._reads: Leases[list[int]] = Leases(config.lease_s, clock)
        self._writes: Leases[list[_Slot]] = Leases(config.lease_s, clock)
        self._being_written: set[KVKey] = set()
        self._quarantine: deque[tuple[float, int]] = deque()  # until when, offset

    def lookup(self, keys: Sequence[KVKey]) -> list[Tier]:
        """Tiers of the leading keys that are here. Neither a hit nor a use."""
        with self._lock:
            self.counters.add("lookups")
            return self._leading(keys)

    def prefetch(self, keys: Sequence[KVKey]) -> int:
        """Start to bring the leading keys that are here to the CPU tier; how many are there or on their way."""
        with self._lock:
            self.expire()
            acquisition = self._begin(keys)
            self._unpin(list(acquisition.handles.values()))
            return len(acquisition.tiers)

    def begin_acquire(self, keys: Sequence[KVKey]) -> Acquisition:
        """Pin what is in the CPU tier and start to load what is on SSD; to be ended with finish_acquire."""
        with self._lock:
            self.expire()
            self.counters.add("acquires")
            return self._begin(keys)

    def finish_acquire(self, acquisition: Acquisition) -> Acquired:
        """A lease on the leading keys that are in the CPU tier by now."""
        with self._lock:
            blocks: list[KVBlock] = []
            handles: list[int] = []
            for key, tier in zip(acquisition.keys, acquisition.tiers):
                handle = acquisition.handles.pop(key, None)
                if handle is None:
                    handle = self.tiers.pin(key)
                if handle is None:
                    break
                handles.append(handle)
                cpu = self.tiers.cpu
                blocks.append(KVBlock(key, cpu.offset(handle), cpu.payload_bytes(handle), tier))
            self._unpin(list(acquisition.handles.values()))
            for handle in reversed(handles):
                self.tiers.count_hit(handle)
            on_ssd = sum(block.tier is Tier.SSD for block in blocks)
            self.counters.add("hits_cpu", len(blocks) - on_ssd)
            self.counters.add("hits_ssd", on_ssd)
            self.counters.add("misses", len(acquisition.keys) - len(blocks))
            return Acquired(self._reads.grant(handles) if handles else 0, tuple(blocks))

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> Acquired:
        """Both, waiting so long at most for what is on SSD."""
        acquisition = self.begin_acquire(keys)
        if acquisition.pending:
            wait(acquisition.pending, timeout=wait_s)
        return self.finish_acquire(acquisition)

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> Reserved:
        """Slots for records of these keys, all of the same size. Raises InvalidCallError for a size below one."""
        if payload_bytes < 1:
            raise InvalidCallError(f"payload_bytes is {payload_bytes}: at least 1 is needed")
        with self._lock:
            self.expire()
            slots: list[_Slot] = []
            offsets = [self._reserve_one(key, payload_bytes, slots) for key in keys]
            return Reserved(self._writes.grant(slots) if slots else 0, tuple(offsets))

    def commit(self, lease_id: int) -> int:
        """Make the lease's records visible, those that have a valid header; how many. 0 if the lease is over."""
        with self._lock:
            self.expire()
            num_visible = 0
            for slot in reversed(self._writes.end(lease_id) or []):
                self._being_written.discard(slot.key)
                header = read_header(self.arena.slot(slot.offset, HEADER_BYTES))
                if header is None or (header.key, header.payload_bytes) != (slot.key, slot.payload_bytes):
                    self.counters.add("puts_not_whole")
                    self.tiers.cpu.cancel(slot.offset)
                elif self.tiers.publish(slot.key, slot.offset, slot.payload_bytes):
                    self.counters.add("puts")
                    num_visible += 1
            return num_visible

    def release(self, lease_id: int) -> bool:
        """End a lease of either kind, a reservation without making it visible; whether there was one."""
        with self._lock:
            handles = self._reads.end(lease_id)
            slots = self._writes.end(lease_id)
            self._unpin(handles or [])
            for slot in slots or []:
                self._being_written.discard(slot.key)
                self.tiers.cpu.cancel(slot.offset)
            self.counters.add("releases")
            return handles is not None or slots is not None

    def report_corrupt(self, keys: Sequence[KVKey]) -> int:
        """Drop records that a client found not to be whole; how many there were."""
        with self._lock:
            num_dropped = sum(self.tiers.drop(key) for key in keys)
            self.counters.add("reported_corrupt", num_dropped)
            return num_dropped

    def flush(self) -> None:
        """Forget everything; what is leased stays readable until then."""
        with self._lock:
            self.counters.add("flushes")
            self.tiers.clear()

    def expire(self) -> None:
        """Take back leases whose time is over. Every call does so; a service without calls does it by itself."""
        with self._lock:
            now = self._clock()
            for handles in self._reads.expired():
                self.counters.add("leases_expired")
                self._unpin(handles)
            for slots in self._writes.expired():
                self.counters.add("leases_expired")
                for slot in slots:
                    self._being_written.discard(slot.key)
                    self._quarantine.append((now + self.config.quarantine_s, slot.offset))
            while self._quarantine and self._quarantine[0][0] <= now:
                self.tiers.cpu.cancel(self._quarantine.popleft()[1])

    def stats(self) -> dict[str, int]:
        """Counters, and what there is now."""
        with self._lock:
            ssd = self.tiers.ssd
            return {
                **self.counters.snapshot(),
                "cpu_records": self.tiers.cpu.num_records,
                "cpu_used_bytes": self.tiers.cpu.slabs.used_bytes,
                "cpu_capacity_bytes": self.config.cpu_bytes,
                "ssd_records": 0 if ssd is None else ssd.num_records,
                "ssd_used_bytes": 0 if ssd is None else ssd.used_bytes,
                "ssd_capacity_bytes": 0 if ssd is None else self.config.ssd_bytes,
                "ssd_unsaved": 0 if ssd is None else ssd.num_unsaved,
                "leases": len(self._reads) + len(self._writes),
                "quarantined": len(self._quarantine),
                "background_waiting": self.tiers.num_waiting,
            }

    def close(self, timeout_s: float = 10.0) -> bool:
        """End background work, keep what is on SSD, remove the arena; whether that was done in time."""
        in_time = self.tiers.close(timeout_s)
        if in_time:
            self.arena.close()
        return in_time

    def check_integrity(self) -> None:
        """Raise AssertionError if something is counted wrong."""
        with self._lock:
            self.tiers.cpu.check_integrity()
            if self.tiers.ssd is not None:
                self.tiers.ssd.check_integrity()

    def _leading(self, keys: Sequence[KVKey]) -> list[Tier]:
        found: list[Tier] = []
        for key in keys:
            tier = self.tiers.tier_of(key)
            if tier is Tier.NONE:
                break
            found.append(tier)
        return found

    def _begin(self, keys: Sequence[KVKey]) -> Acquisition:
        acquisition = Acquisition(keys, self._leading(keys))
        for key, tier in zip(keys, acquisition.tiers):
            if tier is Tier.CPU and key not in acquisition.handles:
                handle = self.tiers.pin(key)
                assert handle is not None
                acquisition.handles[key] = handle
        # Only now, so that loading one of the keys cannot evict another.
        on_ssd = [number for number, tier in enumerate(acquisition.tiers) if tier is Tier.SSD]
        loading = self.tiers.load([keys[number] for number in on_ssd])
        if len(loading) < len(on_ssd):
            del acquisition.tiers[on_ssd[len(loading)] :]
        acquisition.pending.extend(dict.fromkeys(loading))
        return acquisition

    def _reserve_one(self, key: KVKey, payload_bytes: int, slots: list[_Slot]) -> int:
        handle = self.tiers.cpu.find(key)
        if handle is not None:
            self.tiers.cpu.lru.touch(handle)
        if handle is not None or key in self._being_written:
            self.counters.add("puts_not_needed")
            return NOT_NEEDED
        offset = self.tiers.cpu.reserve(payload_bytes)
        if offset is None:
            self.counters.add("puts_refused")
            return NO_ROOM
        self._being_written.add(key)
        slots.append(_Slot(key, offset, payload_bytes))
        return offset

    def _unpin(self, handles: list[int]) -> None:
        for handle in reversed(handles):
            self.tiers.cpu.unpin(handle)
