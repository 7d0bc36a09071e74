"""How an iteration's tokens are dealt out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batcher import prefill_room, share_prefill, smallest_bucket
from scheduler.plan import ScheduleBucket

remaining_lists = st.lists(st.integers(1, 50), max_size=8)
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(num_tokens=st.integers(0, 100), remaining=remaining_lists, share=shares)
def test_nothing_is_left_over_while_anyone_can_take_it(num_tokens: int, remaining: list[int], share: float) -> None:
    grants = share_prefill(num_tokens, remaining, share)
    assert all(0 <= grant <= left for grant, left in zip(grants, remaining, strict=True))
    assert sum(grants) == min(num_tokens, sum(remaining))


@given(num_tokens=st.integers(1, 100), remaining=remaining_lists.filter(bool), share=shares)
def test_the_oldest_is_sure_of_its_share(num_tokens: int, remaining: list[int], share: float) -> None:
    assert share_prefill(num_tokens, remaining, share)[0] >= min(remaining[0], max(1, int(num_tokens * share)))


@given(num_tokens=st.integers(0, 100), remaining=remaining_lists, share=shares, newcomer=st.integers(1, 50))
def test_room_is_what_a_newcomer_would_get(num_tokens: int, remaining: list[int], share: float, newcomer: int) -> None:
    expected = share_prefill(num_tokens, [*remaining, newcomer], share)[-1]
    assert prefill_room(num_tokens, remaining, share, newcomer) == expected


@pytest.mark.parametrize(
    ("remaining", "grants"),
    [
        ([100, 5, 3], [8, 5, 3]),  # the short ones whole, the rest for the oldest
        ([100, 20, 30], [4, 12, 0]),  # the oldest a quarter, the rest for the shortest
        ([10, 10], [10, 6]),  # equal: in order of arrival
        ([], []),
    ],
)
def test_shortest_first_with_a_share_for_the_oldest(remaining: list[int], grants: list[int]) -> None:
    assert share_prefill(16, remaining, oldest_share=0.25) == grants


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 7), (8, 7), (9, 3), (32, 3)])
def test_smallest_bucket(num_tokens: int, bucket: int) -> None:
    assert smallest_bucket([ScheduleBucket(7, 8), ScheduleBucket(3, 32)], num_tokens).id == bucket
