"""What is still to be given to the store."""

import pytest

from scheduler.store_backlog import StoreBacklog

A, B, C, D = (bytes([i]) for i in range(4))


def take_all(backlog: StoreBacklog) -> list[bytes]:
    return [backlog.take() for _ in range(len(backlog))]


def test_each_page_once_in_order() -> None:
    backlog = StoreBacklog(10, 10)
    backlog.offer([A, B])
    backlog.offer([B, C, A])
    assert take_all(backlog) == [A, B, C]
    backlog.offer([A])  # on its way
    assert not len(backlog)
    backlog.stored([A])
    backlog.offer([A])
    assert not len(backlog)
    backlog.check_integrity()


def test_what_failed_or_is_gone_from_the_store_may_come_again() -> None:
    backlog = StoreBacklog(10, 10)
    backlog.offer([A, B, C])
    take_all(backlog)
    backlog.stored([A, B])
    backlog.failed([C])
    backlog.forget([B, D])
    backlog.offer([A, B, C])
    assert take_all(backlog) == [B, C]


def test_when_full_the_new_ones_are_dropped_and_counted() -> None:
    backlog = StoreBacklog(2, 10)
    backlog.offer([A, B, C, D])
    assert backlog.num_dropped == 2
    assert take_all(backlog) == [A, B]
    backlog.offer([C])
    assert take_all(backlog) == [C]
    backlog.drop(C)
    assert backlog.num_dropped == 3
    backlog.offer([C])
    assert take_all(backlog) == [C]


def test_only_the_latest_are_remembered() -> None:
    backlog = StoreBacklog(10, 2)
    backlog.learn([A, B])
    backlog.learn([A, C])
    backlog.check_integrity()
    backlog.offer([A, B, C])
    assert take_all(backlog) == [B]


def test_what_is_heard_of_a_page_that_waits_changes_nothing() -> None:
    """The store may hold it already, from another instance; it is given once, and may come again when that fails."""
    backlog = StoreBacklog(10, 10)
    backlog.offer([A])
    backlog.learn([A])
    backlog.forget([A])
    backlog.offer([A])
    backlog.check_integrity()
    assert take_all(backlog) == [A]
    backlog.failed([A])
    backlog.offer([A])
    assert take_all(backlog) == [A]


def test_a_claimed_page_goes_before_all_that_wait_and_once() -> None:
    backlog = StoreBacklog(10, 10)
    backlog.offer([A, B])
    assert backlog.claim(B)
    assert not backlog.claim(B)
    assert backlog.claim(C)
    assert take_all(backlog) == [A]
    backlog.stored([A, B])
    assert not backlog.claim(A)
    assert [backlog.knows(each) for each in (A, B, C, D)] == [True, True, False, False]
    backlog.failed([C])
    assert backlog.claim(C)
    backlog.check_integrity()


@pytest.mark.parametrize("first_arrives", [False, True])
@pytest.mark.parametrize("second_arrives", [False, True])
def test_a_page_that_is_given_twice_at_once_waits_for_neither_before_both_are_over(
    first_arrives: bool, second_arrives: bool
) -> None:
    """As when the request that computed it is preempted; the store's memory of one page is soon another's."""
    backlog = StoreBacklog(10, 1)
    backlog.offer([A])
    assert backlog.take() == A
    backlog.send(A)
    for arrives in (first_arrives, second_arrives):
        backlog.offer([A])
        assert not len(backlog)
        assert not backlog.claim(A)
        backlog.given_up(A)
        (backlog.stored if arrives else backlog.failed)([A])
        backlog.learn([B])
        backlog.check_integrity()
    assert backlog.num_dropped == 0
    backlog.offer([A])
    assert take_all(backlog) == [A]


def test_a_page_that_waits_is_given_once_when_it_is_sent_ahead() -> None:
    backlog = StoreBacklog(10, 10)
    backlog.offer([A, B])
    backlog.send(B)
    assert take_all(backlog) == [A]
    backlog.stored([B])
    assert backlog.knows(B)
    backlog.check_integrity()


def test_what_is_given_up_unsaved_is_counted() -> None:
    backlog = StoreBacklog(10, 10)
    backlog.learn([A])
    backlog.claim(B)
    for digest in (A, B, C):
        backlog.given_up(digest)
    assert backlog.num_dropped == 1
