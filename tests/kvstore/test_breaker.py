"""When the breaker lets calls through, by a clock that the test turns."""

from __future__ import annotations

from kvstore.breaker import Breaker, BreakerConfig


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(BreakerConfig(failures=2, open_s=1.0, max_open_s=3.0), clock)
    for _ in range(2):
        assert breaker.allows()
        breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker(BreakerConfig(failures=2), Clock())
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows()
    assert breaker.times_opened == 0


def test_open_it_refuses_until_its_time_is_over_then_lets_one_try():
    clock = Clock()
    breaker = opened(clock)
    assert breaker.is_open
    assert not breaker.allows()
    clock.now += 1.01
    assert breaker.allows()
    assert not breaker.allows(), "a second call beside the trial"
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
    assert not breaker.is_open


def test_trials_that_fail_double_the_time_up_to_a_bound():
    clock = Clock()
    breaker = opened(clock)
    for open_s in (1.0, 2.0, 3.0, 3.0):
        clock.now += open_s - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        breaker.failed()
    assert breaker.times_opened == 5


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_it():
    clock = Clock()
    breaker = opened(clock)
    for _ in range(10):
        breaker.failed()
    clock.now += 1.01
    assert breaker.allows()
    assert breaker.times_opened == 1


def test_a_trial_that_never_ends_does_not_close_the_door_for_good():
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.01
    assert breaker.allows()
    clock.now += 3.01
    assert breaker.allows()


def test_opening_and_closing_are_told_once():
    clock = Clock()
    breaker = Breaker(BreakerConfig(failures=2, open_s=1.0), clock)
    assert [breaker.succeeded(), breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True, False]
    clock.now += 1.01
    assert not breaker.failed(), "a trial that fails"
    assert [breaker.succeeded(), breaker.succeeded()] == [True, False]
