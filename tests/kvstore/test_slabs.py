"""Slots never overlap, never pass the capacity, and come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.slabs import SlabAllocator

SLAB = 64


@given(
    capacity=st.integers(SLAB, 5 * SLAB),
    steps=st.lists(st.one_of(st.sampled_from([8, 16, 24, 64]), st.integers(-20, -1)), max_size=80),
)
def test_slots_are_disjoint_and_within_the_capacity(capacity, steps):
    slabs = SlabAllocator(capacity, SLAB)
    given_out: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = slabs.allocate(step)
            if offset is not None:
                assert 0 <= offset <= capacity - step
                assert all(offset + step <= other or other + size <= offset for other, size in given_out.items())
                given_out[offset] = step
                slabs.set_owner(offset, len(given_out))
        elif given_out:
            offset = sorted(given_out)[step % len(given_out)]
            assert slabs.slot_bytes_at(offset) == given_out.pop(offset)
            slabs.free(offset)
        slabs.check_integrity()
        assert slabs.used_bytes == sum(given_out.values())
    for offset in given_out:
        slabs.free(offset)
    slabs.check_integrity()
    assert slabs.touched_bytes == 0


@given(st.integers(1, 300), st.sampled_from([8, 16, 32]))
def test_equal_slots_fill_everything_but_slab_tails(capacity, size):
    slabs = SlabAllocator(max(capacity, SLAB), SLAB)
    count = 0
    while slabs.allocate(size) is not None:
        count += 1
    whole, rest = divmod(slabs.capacity_bytes, SLAB)
    assert count == whole * (SLAB // size) + rest // size


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20))
def test_places_can_be_restored(places):
    slabs = SlabAllocator(4 * SLAB, SLAB)
    taken = {place: slabs.take(*place, 8) for place in sorted(places)}
    slabs.check_integrity()
    for (slab, slot), offset in taken.items():
        assert (offset is None) == (slot >= SLAB // 8)
        assert offset is None or slabs.place_of(offset) == (slab, slot)
    restored = [offset for offset in taken.values() if offset is not None]
    assert all(slabs.take(*slabs.place_of(offset), 8) is None for offset in restored)
    assert all(slabs.take(*slabs.place_of(offset), 16) is None for offset in restored)
    free = []
    while (offset := slabs.allocate(8)) is not None:
        free.append(offset)
    assert sorted([*free, *restored]) == list(range(0, 4 * SLAB, 8))


def test_a_slab_whose_slots_all_came_back_takes_another_size():
    slabs = SlabAllocator(SLAB, SLAB)
    offsets = [slabs.allocate(32), slabs.allocate(32)]
    assert slabs.allocate(64) is None
    assert not slabs.free(offsets[0])
    assert slabs.allocate(64) is None
    assert slabs.free(offsets[1])
    assert slabs.allocate(64) == 0


def test_owners_of_a_slab_are_known_unless_one_is_still_written():
    slabs = SlabAllocator(SLAB, SLAB)
    first, second = slabs.allocate(16), slabs.allocate(16)
    slabs.set_owner(first, 7)
    assert slabs.owners_beside(first) is None
    slabs.set_owner(second, 8)
    assert slabs.owners_beside(first) == [7, 8]
    slabs.free(first)
    assert slabs.owners_beside(second) == [8]
