"""The scheduler's questions: none is asked for nobody, and what is kept for a ticket goes with it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvstore.keys import Tier
from scheduler.plan import PrefixAnswer, StoreTier
from worker.kv_cache import KVCacheShape
from worker.store_keys import PageIdentity
from worker.store_prefixes import StorePrefixes

SHAPE = KVCacheShape(2, 1, 2, 4, 8)


class FakeLease:
    is_released = False

    def release(self) -> None:
        self.is_released = True


class FakeStore:
    """Has the first two pages of every chain; answers when the test lets it."""

    num_faults = 0
    is_off = False

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[bytes] = []  # the first key of each question
        self.leases: list[FakeLease] = []

    def lookup(self, keys):
        self.asked.append(keys[0])
        assert self.may_answer.wait(10)
        return [Tier.CPU, Tier.CPU]

    def prefetch(self, keys):
        return len(keys)

    def acquire(self, keys, wait_s=0.0):
        self.leases.append(FakeLease())
        return self.leases[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def prefixes(store):
    dtype = str(torch.float32).removeprefix("torch.")
    prefixes = StorePrefixes(store, [PageIdentity(bytes(32), dtype, SHAPE, rank, 2) for rank in range(2)])
    yield prefixes
    store.may_answer.set()
    prefixes.close()


def answers(prefixes: StorePrefixes) -> list[PrefixAnswer]:
    """The next ones."""
    deadline = time.monotonic() + 10
    while not (found := prefixes.take_answers()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_of_all_ranks_the_leading_pages_are_told_and_kept(store, prefixes):
    store.may_answer.set()
    prefixes.ask(1, [b"a", b"b", b"c"])
    assert answers(prefixes) == [PrefixAnswer(1, (StoreTier.CPU, StoreTier.CPU))]
    assert len(store.leases) == 2
    prefixes.release(1)
    assert all(lease.is_released for lease in store.leases)


def test_what_nobody_waits_for_any_more_is_not_asked(store, prefixes):
    for ticket in range(5):
        prefixes.ask(ticket, [b"chain-%d" % ticket, b"more"])
    for ticket in range(4):
        prefixes.release(ticket)
    store.may_answer.set()
    assert [answer.ticket for answer in answers(prefixes)] == [4]
    chains = [key[16:] for key in store.asked]
    assert chains[-2:] == [b"chain-4"] * 2  # for each rank
    assert len(chains) <= 3  # at most one more, which was under way
