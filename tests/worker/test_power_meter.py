"""Power from a counter that moves in coarse steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.power_meter import next_step, watts_between


class CoarseCard:
    """Its counter tells, at each multiple of `step_s`, all energy up to then."""

    def __init__(self, watts: float, step_s: float, now: float) -> None:
        self.now, self._watts, self._step_s = now, watts, step_s

    def joules(self) -> float:
        return self._watts * math.floor(self.now / self._step_s) * self._step_s

    def sm_mhz(self) -> float:
        return 1400.0

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float = 1e-3) -> None:
        self.now += seconds


@given(st.floats(50, 700), st.floats(0.02, 0.2), st.floats(0, 10), st.floats(0.4, 2))
def test_a_reading_between_steps_is_off_by_no_more_than_a_look_takes(watts, step_s, start, seconds):
    card = CoarseCard(watts, step_s, start)
    begin = next_step(card, card.pass_time, card.clock)
    card.pass_time(seconds)
    end = next_step(card, card.pass_time, card.clock)
    assert watts_between(begin, end) == pytest.approx(watts, rel=3e-3 / seconds)


def test_a_counter_that_stands_still_gives_no_power():
    card = CoarseCard(0.0, 0.1, 0.0)
    assert next_step(card, card.pass_time, card.clock) is None
    assert card.now < 1.0
    assert watts_between(None, (1.0, 2.0)) is None
    assert watts_between((1.0, 2.0), None) is None
