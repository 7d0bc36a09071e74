"""Which bytes of a region are taken: slots of equal size inside slabs, one slot size per slab.

A slab takes a slot size when its first slot is given out and loses it when its last comes back, so no mixture of
sizes can fragment the region for good. Of a slab only the tail that holds no whole slot is lost. Knows nothing of
keys; for each slot it keeps its owner's number, so that a whole slab's owners can be found.
"""

from __future__ import annotations

from array import array

NO_OWNER = -1


class _Slab:
    """One slab while it has a slot size."""

    __slots__ = ("free", "num_slots", "num_used", "owners", "slot_bytes")

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.num_used = 0
        self.owners = array("i")  # by slot, as far as slots were ever given out
        self.free: list[int] = []  # slots given out before and come back


class SlabAllocator:
    """Slots in [0, capacity_bytes)."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        assert 0 < slab_bytes <= capacity_bytes
        self.capacity_bytes = capacity_bytes
        self.slab_bytes = slab_bytes
        self.used_bytes = 0  # of slots given out now
        self.touched_bytes = 0  # of slots ever given out in slabs that still have a size: what files hold
        self._slabs: dict[int, _Slab] = {}
        self._empty = list(range(-(-capacity_bytes // slab_bytes)))[::-1]  # the last one may be shorter
        self._with_room: dict[int, list[int]] = {}  # by slot size: slabs that have a free slot

    def allocate(self, slot_bytes: int) -> int | None:
        """Offset of a free slot, its owner NO_OWNER; None if there is none of that size."""
        slabs = self._with_room.get(slot_bytes)
        if not slabs:
            number = self._take_empty(slot_bytes)
            if number is None:
                return None
            self._slabs[number] = _Slab(slot_bytes, self.num_slots(number, slot_bytes))
            slabs = self._with_room.setdefault(slot_bytes, [])
            slabs.append(number)
        number = slabs[-1]
        slab = self._slabs[number]
        slot = slab.free.pop() if slab.free else self._grow(slab)
        slab.num_used += 1
        if slab.num_used == slab.num_slots:
            slabs.pop()
        self.used_bytes += slot_bytes
        return number * self.slab_bytes + slot * slot_bytes

    def free(self, offset: int) -> bool:
        """Give a slot back. True if its slab is empty and has lost its size with it."""
        number, slab, slot = self._locate(offset)
        slab.owners[slot] = NO_OWNER
        slab.free.append(slot)
        if slab.num_used == slab.num_slots:
            self._with_room.setdefault(slab.slot_bytes, []).append(number)
        slab.num_used -= 1
        self.used_bytes -= slab.slot_bytes
        if slab.num_used:
            return False
        self._with_room[slab.slot_bytes].remove(number)
        self.touched_bytes -= len(slab.owners) * slab.slot_bytes
        del self._slabs[number]
        self._empty.append(number)
        return True

    def take(self, slab: int, slot: int, slot_bytes: int) -> int | None:
        """The offset of this very slot, now given out, as when places are restored; None if it cannot be."""
        if slab not in self._slabs:
            if slab not in self._empty or slot >= self.num_slots(slab, slot_bytes):
                return None
            self._empty.remove(slab)
            self._slabs[slab] = _Slab(slot_bytes, self.num_slots(slab, slot_bytes))
            self._with_room.setdefault(slot_bytes, []).append(slab)
        found = self._slabs[slab]
        if found.slot_bytes != slot_bytes or not 0 <= slot < found.num_slots:
            return None
        while len(found.owners) <= slot:
            found.free.append(self._grow(found))
        if found.free and found.free[-1] == slot:  # always so where slots are taken in order
            found.free.pop()
        elif slot in found.free:
            found.free.remove(slot)
        else:
            return None
        found.num_used += 1
        if found.num_used == found.num_slots:
            self._with_room[slot_bytes].remove(slab)
        self.used_bytes += slot_bytes
        return slab * self.slab_bytes + slot * slot_bytes

    def slot_bytes_at(self, offset: int) -> int:
        """Size of the slot at an offset that was given out."""
        return self._slabs[offset // self.slab_bytes].slot_bytes

    def place_of(self, offset: int) -> tuple[int, int]:
        """Slab and slot of an offset that was given out."""
        number, _, slot = self._locate(offset)
        return number, slot

    def touched_by_slab(self) -> dict[int, int]:
        """Bytes of slots ever given out, by slab, of slabs that have a size."""
        return {number: len(slab.owners) * slab.slot_bytes for number, slab in self._slabs.items()}

    def set_owner(self, offset: int, owner: int) -> None:
        """Note whose slot this is; whole slabs are found by it."""
        _, slab, slot = self._locate(offset)
        slab.owners[slot] = owner

    def owners_beside(self, offset: int) -> list[int] | None:
        """Owners of all used slots of the offset's slab; None if one of them has no owner yet."""
        slab = self._slabs[offset // self.slab_bytes]
        owners = [owner for owner in slab.owners if owner != NO_OWNER]
        return owners if len(owners) == slab.num_used else None

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts do not agree."""
        assert self.used_bytes == sum(slab.num_used * slab.slot_bytes for slab in self._slabs.values())
        assert self.touched_bytes == sum(len(slab.owners) * slab.slot_bytes for slab in self._slabs.values())
        assert self.used_bytes <= self.touched_bytes <= self.capacity_bytes
        assert not set(self._empty) & set(self._slabs)
        for number, slab in self._slabs.items():
            assert 0 < slab.num_used <= slab.num_slots
            assert len(slab.owners) - len(slab.free) == slab.num_used
            assert (number in self._with_room[slab.slot_bytes]) == (slab.num_used < slab.num_slots)

    def _take_empty(self, slot_bytes: int) -> int | None:
        for place in reversed(range(len(self._empty))):
            if self.num_slots(self._empty[place], slot_bytes):
                return self._empty.pop(place)
        return None

    def num_slots(self, number: int, slot_bytes: int) -> int:
        return min(self.slab_bytes, self.capacity_bytes - number * self.slab_bytes) // slot_bytes

    def _grow(self, slab: _Slab) -> int:
        slab.owners.append(NO_OWNER)
        self.touched_bytes += slab.slot_bytes
        return len(slab.owners) - 1

    def _locate(self, offset: int) -> tuple[int, _Slab, int]:
        number, within = divmod(offset, self.slab_bytes)
        slab = self._slabs[number]
        return number, slab, within // slab.slot_bytes
