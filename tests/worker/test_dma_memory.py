"""What of a store's memory is registered for DMA, when, and for how long."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import dma_memory
from worker.dma_memory import DmaMemory, address_of, adjacent

PIECE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(dma_memory, "PIECE_BYTES", PIECE)


class Driver:
    """Stands for CUDA's functions; refuses from piece `refuse_from` on."""

    def __init__(self, refuse_from: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.refuse_from = refuse_from
        self.memory = DmaMemory(self.register, self.unregister)

    def register(self, address: int, num_bytes: int) -> None:
        if self.refuse_from is not None and len(self.ranges) >= self.refuse_from:
            raise RuntimeError("not supported")
        assert address not in self.ranges
        self.ranges[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def arena(num_bytes: int = 10 * PIECE - 100) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def test_an_arena_whose_store_is_gone_is_given_up_when_nobody_uses_it():
    driver = Driver()
    for is_used in (True, False):
        memory = arena()
        region = driver.memory.lend(memory)
        assert region.register_all()
        if is_used:
            driver.memory.forget(memory)
            assert driver.ranges
            driver.memory.give_back(region)
        else:
            driver.memory.give_back(region)
            assert driver.ranges
            driver.memory.forget(memory)
        assert not driver.ranges


def test_what_is_lent_of_an_arena_whose_store_is_gone_is_given_up_when_it_is_given_back():
    driver, old, new = Driver(), arena(), arena()
    user = driver.memory.lend(new)
    user.register_all()
    driver.memory.give_back(user)
    driver.memory.forget(old)
    user = driver.memory.lend(old)  # by a lease that came before
    user.register_all()
    assert sum(driver.ranges.values()) == old.nbytes + new.nbytes
    driver.memory.give_back(user)
    assert sum(driver.ranges.values()) == new.nbytes
    driver.memory.close()


@given(st.data())
def test_pieces_are_the_range_and_each_is_registered(data):
    driver, memory = Driver(), arena()
    first = address_of(memory)
    region = driver.memory.lend(memory)
    for _ in range(5):
        start = data.draw(st.integers(0, memory.nbytes - 1))
        size = data.draw(st.integers(1, memory.nbytes - start))
        pieces = region.pieces(start, size)
        assert pieces[0][0] == first + start
        assert all(a + n == b for (a, n), (b, _) in zip(pieces, pieces[1:]))
        assert sum(n for _, n in pieces) == size
        for address, num_bytes in pieces:
            assert any(a <= address and address + num_bytes <= a + n for a, n in driver.ranges.items())
    driver.memory.give_back(region)
    driver.memory.close()
    assert not driver.ranges


def test_only_what_is_used_is_registered_unless_ahead():
    driver, memory = Driver(), arena()
    region = driver.memory.lend(memory)
    region.pieces(PIECE + 10, 20)
    assert driver.ranges == {address_of(memory) + PIECE: PIECE}
    assert region.register_all()
    assert sum(driver.ranges.values()) == memory.nbytes
    driver.memory.give_back(region)
    driver.memory.close()


def test_where_registration_is_refused_it_is_said_once(caplog):
    driver, memory = Driver(refuse_from=2), arena()
    region = driver.memory.lend(memory)
    assert not region.register_all()
    assert region.pieces(5 * PIECE, 10) is None
    assert region.pieces(0, 10) == [(address_of(memory), 10)]  # registered before
    assert len(caplog.records) == 1
    driver.memory.give_back(region)
    driver.memory.close()
    assert not driver.ranges


def test_an_old_arena_is_given_up_when_its_last_user_is_gone_and_there_is_a_new_one():
    driver, old, new = Driver(), arena(), arena()
    users = [driver.memory.lend(old), driver.memory.lend(old)]
    assert users[0] is users[1]
    users[0].register_all()
    driver.memory.give_back(users[0])
    driver.memory.give_back(users[1])
    assert driver.ranges  # nobody uses it, but the next one will
    user = driver.memory.lend(old)
    other = driver.memory.lend(new)
    other.register_all()
    assert sum(driver.ranges.values()) == old.nbytes + new.nbytes
    driver.memory.give_back(user)
    assert sum(driver.ranges.values()) == new.nbytes
    driver.memory.give_back(other)
    driver.memory.close()
    assert not driver.ranges


def test_a_registered_arena_stays_mapped():
    driver, mapping = Driver(), mmap.mmap(-1, 4 * PIECE)
    region = driver.memory.lend(memoryview(mapping))
    driver.memory.give_back(region)
    del region
    with pytest.raises(BufferError):
        mapping.close()
    driver.memory.close()
    mapping.close()


@given(st.lists(st.integers(0, 30), unique=True, max_size=20))
def test_adjacent_records_are_one_run(places):
    runs = adjacent([1000 + 64 * place for place in places], 64)
    assert [i for run in runs for i in run] == list(range(len(places)))
    for run in runs:
        assert [places[i] - places[run.start] for i in run] == list(range(len(run)))
    for left, right in zip(runs, runs[1:]):
        assert places[right.start] != places[left.stop - 1] + 1
