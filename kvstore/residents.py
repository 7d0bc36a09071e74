"""The records of one tier: where each lies in a region of limited size, and which one goes next.

Joins the order (`lru`) with the places (`slabs`). Room for a new record is made by evicting the least recently used
one of the same slot size; if that one has another slot size, its whole slab goes, as slots of two sizes do not mix.
Pinned and held records stay. Knows nothing of what a region is made of, nor of bytes; not safe for threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.lru import Lru
from kvstore.record import slot_bytes_for
from kvstore.slabs import NO_OWNER, SlabAllocator

_MAX_VICTIMS_LOOKED_AT = 64  # how far to look for one whose slab may go, when slot sizes differ


class Residents:
    """Keys to places, within capacity_bytes of slots."""

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        on_evict: Callable[[bytes], None] = lambda key: None,
        on_empty_slab: Callable[[int], None] = lambda slab: None,
    ) -> None:
        """on_evict is told each key that went for another; on_empty_slab each slab whose last record went."""
        self.lru = Lru()
        self.slabs = SlabAllocator(capacity_bytes, slab_bytes)
        self._on_evict = on_evict
        self._on_empty_slab = on_empty_slab
        self._offsets = array("q", [0])  # these by the order's handles
        self._payload_bytes = array("q", [0])
        self._hits = array("B", [0])
        self._doomed: set[int] = set()  # dropped while pinned or held: they go with their last pin or hold

    @property
    def num_records(self) -> int:
        """Records that can be found."""
        return len(self.lru)

    def fits(self, payload_bytes: int) -> bool:
        """Whether a record of this size could ever be taken."""
        return slot_bytes_for(payload_bytes) <= self.slabs.slab_bytes

    def find(self, key: bytes) -> int | None:
        """The key's handle."""
        return self.lru.get(key)

    def offset(self, handle: int) -> int:
        """Where the record's slot starts, in bytes."""
        return self._offsets[handle]

    def payload_bytes(self, handle: int) -> int:
        """Size of the record's payload."""
        return self._payload_bytes[handle]

    def count_hit(self, handle: int) -> int:
        """Count one more use of the record; how many there were, 255 at most."""
        self._hits[handle] = min(self._hits[handle] + 1, 255)
        return self._hits[handle]

    def reserve(self, payload_bytes: int) -> int | None:
        """Offset of a slot for such a record, others evicted for it; None if there is no room.

        The slot is to be published or cancelled.
        """
        if not self.fits(payload_bytes):
            return None
        slot_bytes = slot_bytes_for(payload_bytes)
        offset = self.slabs.allocate(slot_bytes)
        return self._take_over(slot_bytes) if offset is None else offset

    def publish(self, key: bytes, offset: int, payload_bytes: int) -> int | None:
        """Let a reserved slot be found as the key's, most recently used; None, and cancelled, if the key is there."""
        if self.lru.get(key) is not None:
            self.cancel(offset)
            return None
        handle = self.lru.insert(key)
        for values in (self._offsets, self._payload_bytes, self._hits):
            if len(values) == handle:
                values.append(0)
        self._offsets[handle] = offset
        self._payload_bytes[handle] = payload_bytes
        self._hits[handle] = 0
        self.slabs.set_owner(offset, handle)
        return handle

    def cancel(self, offset: int) -> None:
        """Give a reserved slot back."""
        slab, _ = self.slabs.place_of(offset)
        if self.slabs.free(offset):
            self._on_empty_slab(slab)

    def pin(self, handle: int) -> None:
        """Keep the record until as many unpins have come."""
        self.lru.pin(handle)

    def unpin(self, handle: int) -> None:
        """Take one pin away; the record is the most recently used then."""
        self.lru.unpin(handle)
        self._settle(handle)

    def hold(self, handle: int) -> bool:
        """Keep the record, its place in the order unchanged. False if it is held already."""
        return self.lru.hold(handle)

    def unhold(self, handle: int) -> None:
        """End a hold."""
        self.lru.unhold(handle)
        self._settle(handle)

    def drop(self, handle: int) -> None:
        """Let the record be found no more; its slot comes free when nobody has a pin or a hold on it."""
        self.lru.forget(handle)
        self._doomed.add(handle)
        self._settle(handle)

    def oldest_first(self) -> Iterator[int]:
        """Handles that could go, least recently used first."""
        return self.lru.oldest_first()

    def check_integrity(self) -> None:
        """Raise AssertionError if order and places do not agree."""
        self.lru.check_integrity()
        self.slabs.check_integrity()

    def _take_over(self, slot_bytes: int) -> int | None:
        for victim in islice(self.lru.oldest_first(), _MAX_VICTIMS_LOOKED_AT):
            offset = self._offsets[victim]
            if self.slabs.slot_bytes_at(offset) == slot_bytes:
                self._forget(victim)
                self.slabs.set_owner(offset, NO_OWNER)
                return offset
            slab, _ = self.slabs.place_of(offset)
            beside = self.slabs.owners_beside(offset)
            if beside and self.slabs.num_slots(slab, slot_bytes) and all(map(self.lru.is_free, beside)):
                for handle in beside:
                    self._forget(handle)
                    self.cancel(self._offsets[handle])
                return self.slabs.allocate(slot_bytes)
        return None

    def _settle(self, handle: int) -> None:
        if handle in self._doomed and self.lru.is_free(handle):
            self._doomed.discard(handle)
            self.lru.remove(handle)
            self.cancel(self._offsets[handle])

    def _forget(self, handle: int) -> None:
        """Evict a record; its slot is the caller's."""
        key = self.lru.key_of(handle)
        doomed = handle in self._doomed
        self._doomed.discard(handle)
        self.lru.remove(handle)
        if not doomed:
            self._on_evict(key)
