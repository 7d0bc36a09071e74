"""Loans end when they should, by a clock that the test turns."""

from __future__ import annotations

from store_calls import Clock

from kvstore.leases import Leases


def test_a_lease_ends_once():
    leases: Leases[str] = Leases(10.0, Clock())
    first, second = leases.grant("first"), leases.grant("second")
    assert leases.end(first) == "first"
    assert leases.end(first) is None
    assert leases.end(0) is None
    assert len(leases) == 1
    assert leases.end(second) == "second"


def test_those_whose_time_is_over_come_back_in_order():
    clock = Clock()
    leases: Leases[int] = Leases(10.0, clock)
    ids = []
    for number in range(4):
        ids.append(leases.grant(number))
        clock.now += 3.0
    assert leases.end(ids[1]) == 1
    assert list(leases.expired()) == [0]
    clock.now += 4.0
    assert list(leases.expired()) == [2]
    assert leases.end(ids[2]) is None
    clock.now += 100.0
    assert list(leases.expired()) == [3]
    assert len(leases) == 0


def test_two_runs_give_no_numbers_twice():
    numbers = [leases.grant("x") for leases in (Leases(1.0, Clock()) for _ in range(50)) for _ in range(50)]
    assert len(set(numbers)) == 2500
    assert 0 not in numbers
