"""The KV store in this process, as `kvstore.client` shows it: the same service and leases, without transport.

For simulations, which turn the clock themselves. Knows nothing of pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.client_leases import Arrival, ReadLease, WriteLease
from kvstore.keys import KVKey, Tier
from kvstore.record import HEADER_BYTES, SLOT_ALIGNMENT, slot_bytes_for
from kvstore.service import KVService
from kvstore.settings import MIN_CPU_BYTES, KVServiceConfig
from kvstore.ssd_index import index_bytes_for

_PAYLOAD_BYTES = 32  # a page's digest
_SSD_PAYLOAD_BYTES = (16 << 10) - HEADER_BYTES  # larger, as the SSD tier's budget has room for so many keys only


class LocalStore:
    """One store for all that are given it; closed by whoever made the service."""

    def __init__(self, service: KVService, clock: Callable[[], float]) -> None:
        self.service, self._clock = service, clock
        self.payload_bytes = _PAYLOAD_BYTES if service.config.ssd_dir is None else _SSD_PAYLOAD_BYTES

    @property
    def num_faults(self) -> int:
        """None: it is in this process."""
        return 0

    @property
    def is_off(self) -> bool:
        """Never."""
        return False

    def lookup(self, keys: Sequence[KVKey]) -> list[Tier]:
        """As KVClient.lookup."""
        return self.service.lookup(keys)

    def prefetch(self, keys: Sequence[KVKey]) -> int:
        """As KVClient.prefetch."""
        return self.service.prefetch(keys)

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None:
        """As KVClient.acquire."""
        acquired = self.service.acquire(keys, wait_s)
        if not acquired.blocks:
            return None
        return ReadLease(self._arrival(acquired.lease_id), acquired.blocks, self._corrupt)

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> WriteLease | None:
        """As KVClient.reserve."""
        reserved = self.service.reserve(keys, payload_bytes)
        if not reserved.lease_id:
            return None
        arrival = self._arrival(reserved.lease_id)
        return WriteLease(arrival, tuple(keys), reserved.offsets, payload_bytes, self.service.commit)

    def settle(self) -> None:
        """Wait for copies to and from SSD: simulated time passes faster than disks turn."""
        if self.service.tiers.num_waiting:
            self.service.tiers.finish()

    def close(self) -> None:
        """Nothing: a client that hangs up."""

    def _arrival(self, lease_id: int) -> Arrival:
        deadline = self._clock() + self.service.config.lease_s
        return Arrival(self.service.arena.view, lease_id, deadline, self._clock, self._release)

    def _release(self, lease_id: int) -> None:
        self.service.release(lease_id)

    def _corrupt(self, key: KVKey, outlived: bool) -> None:
        self.service.report_corrupt([key])


def service_of(
    cpu_pages: int, ssd_pages: int, ssd_after_hits: int, folder: Path, clock: Callable[[], float]
) -> KVService:
    """A store whose tiers hold so many records; a folder for its SSD tier, if it has one."""
    slot_bytes = slot_bytes_for(_SSD_PAYLOAD_BYTES if ssd_pages else _PAYLOAD_BYTES)
    slab = min(max(cpu_pages // 64, 1), 4096) * slot_bytes
    cpu_bytes = max(cpu_pages * slot_bytes, MIN_CPU_BYTES)
    config = KVServiceConfig(cpu_bytes, slab_bytes=slab)
    if ssd_pages:
        ssd_bytes = _with_index(ssd_pages * slot_bytes)
        config = KVServiceConfig(cpu_bytes, folder, ssd_bytes, slab, slab, ssd_after_hits)
    return KVService(config, clock)


def _with_index(record_bytes: int) -> int:
    """The SSD budget that leaves so much for records."""
    total = record_bytes + index_bytes_for(record_bytes)
    while total - index_bytes_for(total) < record_bytes:
        total += SLOT_ALIGNMENT
    return total
