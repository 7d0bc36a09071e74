"""Moves of several ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.move_quorum import MoveQuorum
from scheduler.plan import KVMoveResult


def test_a_move_has_ended_when_every_rank_says_so_and_the_fewest_pages_and_the_slowest_count():
    quorum = MoveQuorum(2)
    assert quorum.take([[KVMoveResult(0, 5, 0.3)], []]) == ()
    assert quorum.take([[KVMoveResult(1, 2)], [KVMoveResult(0, 3, 0.2)]]) == (KVMoveResult(0, 3, 0.3),)
    assert quorum.take([[], [KVMoveResult(1, 2)]]) == (KVMoveResult(1, 2),)


def test_faults_of_all_ranks_count():
    quorum = MoveQuorum(2)
    assert quorum.take([[KVMoveResult(0, 5, 0.3, 2, 0)], [KVMoveResult(0, 5, 0.3, 1, 1)]])[0] == KVMoveResult(
        0, 5, 0.3, num_faults=3, num_trips=1
    )


@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_each_move_ends_once_in_whatever_order_the_ranks_report(data, num_ranks, num_moves):
    moves = list(range(num_moves))
    pages = [data.draw(st.lists(st.integers(0, 9), min_size=num_moves, max_size=num_moves)) for _ in range(num_ranks)]
    left = [data.draw(st.permutations(moves)) for _ in range(num_ranks)]
    quorum, ended = MoveQuorum(num_ranks), []
    while any(left):
        counts = [data.draw(st.integers(0, len(rest))) for rest in left]
        counts[0] = counts[0] or min(1, len(left[0]))  # so that it comes to an end
        if not left[0]:
            counts = [len(rest) for rest in left]
        step = [[KVMoveResult(n, pages[r][n]) for n in left[r][: counts[r]]] for r in range(num_ranks)]
        left = [rest[count:] for rest, count in zip(left, counts)]
        ended += quorum.take(step)
    assert sorted(ended, key=lambda result: result.number) == [
        KVMoveResult(number, min(pages[rank][number] for rank in range(num_ranks))) for number in moves
    ]
