"""What iterations tell of the time that the next one may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.step_pace import SHORTEST_S, StepPace

STEPS = st.lists(st.tuples(st.integers(1, 256), st.floats(1e-5, 100)), max_size=20)


def pace(*steps):
    found = StepPace(batch_tokens=256, longest_s=30)
    for num_tokens, run_s in steps:
        found.note(num_tokens, run_s)
    return found


@pytest.mark.parametrize(
    ("steps", "allowed_s"),
    [
        ([], 30),  # the first one may take its time
        ([(1, 0.02)], 0.02 * 256 * 5),  # all that is known is one decode: a full prefill may be 256 times as long
        ([(1, 0.1)], 30),
        ([(1, 0.02), (200, 0.1)], SHORTEST_S),
        ([(256, 1.5), (1, 0.1), (1, 0.1)], 7.5),
        ([(256, 50), *[(256, 1)] * 5000], 5),  # a slow one is forgotten in time
    ],
)
def test_examples(steps, allowed_s):
    assert pace(*steps).allowed_s == pytest.approx(allowed_s, rel=0.01)


@given(STEPS)
def test_it_stays_within_its_bounds_and_never_under_a_repetition_of_the_last_one(steps):
    allowed_s = pace(*steps).allowed_s
    assert SHORTEST_S <= allowed_s <= 30
    assert not steps or allowed_s >= min(30, 5 * steps[-1][1])
