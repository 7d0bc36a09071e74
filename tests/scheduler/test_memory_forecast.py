"""The forecast of pages against a simulation, and expected output lengths against known distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.memory_forecast import OutputLengths, PageForecast, horizon


def simulated_peak(requests: list[tuple[int, int]], page_size: int, num_shared_pages: int) -> int:
    """Most pages over all iterations, request by request."""
    longest = max((remaining for _, remaining in requests), default=0)
    return num_shared_pages + max(
        sum(-(-(tokens + t) // page_size) for tokens, remaining in requests if t <= remaining)
        for t in range(longest + 1)
    )


requests_lists = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=12)


def forecast_of(requests: list[tuple[int, int]], page_size: int, num_shared_pages: int = 0) -> PageForecast:
    own_tokens = np.array([tokens for tokens, _ in requests], np.int32)
    remaining = np.array([remaining for _, remaining in requests], np.float64)
    return PageForecast(horizon(512), page_size, num_shared_pages, own_tokens, remaining)


@given(requests=requests_lists, page_size=st.integers(1, 32), num_shared_pages=st.integers(0, 9))
def test_never_fewer_pages_than_a_simulation(
    requests: list[tuple[int, int]], page_size: int, num_shared_pages: int
) -> None:
    peak = forecast_of(requests, page_size, num_shared_pages).peak_pages
    assert peak >= simulated_peak(requests, page_size, num_shared_pages)


def test_not_many_more_pages_than_a_simulation() -> None:
    """A thousand requests at all stages of 512 + 512 tokens, pages of 16: within 3 %."""
    requests = [(512 + i % 512, 511 - i % 512) for i in range(1024)]
    simulated = simulated_peak(requests, 16, 0)
    assert simulated <= forecast_of(requests, 16).peak_pages <= 1.03 * simulated


@given(requests=requests_lists.filter(lambda requests: len(requests) > 1), page_size=st.integers(1, 32))
def test_one_more_request_is_the_same_as_all_at_once(requests: list[tuple[int, int]], page_size: int) -> None:
    *before, (tokens, remaining) = requests
    forecast = forecast_of(before, page_size)
    peak = forecast.peak_pages
    together = forecast_of(requests, page_size).peak_pages
    assert not forecast.admit(tokens, remaining, together - 0.5)
    assert forecast.peak_pages == peak
    assert forecast.admit(tokens, remaining, together + 1e-6)
    assert forecast.peak_pages == pytest.approx(together)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_nothing_seen_means_the_known_maximum() -> None:
    curve = OutputLengths(1000).curve(ints(0, 10))
    assert curve.expected_remaining(ints(0, 10, 999), ints(500, 90, 1)).tolist() == [500, 90, 1]


def test_lengths_that_are_always_equal_are_learned() -> None:
    lengths = OutputLengths(1000)
    for _ in range(200):
        lengths.record(100)
    curve = lengths.curve(ints(*range(0, 100, 10)))
    remaining = curve.expected_remaining(ints(0, 50), ints(900, 900))
    assert remaining[0] == pytest.approx(100, rel=0.12)  # bins are wide up there
    assert remaining[1] == pytest.approx(50, rel=0.25)


def test_the_mean_of_a_geometric_distribution_is_learned_and_does_not_age() -> None:
    rng = np.random.default_rng(0)
    lengths = OutputLengths(4000)
    for length in rng.geometric(1 / 150, 4000).tolist():
        lengths.record(min(length, 4000))
    curve = lengths.curve(ints())
    remaining = curve.expected_remaining(ints(0, 100, 300), ints(3000, 3000, 3000))
    assert remaining == pytest.approx([150, 150, 150], rel=0.25)


def test_the_known_maximum_always_holds() -> None:
    lengths = OutputLengths(1000)
    for _ in range(50):
        lengths.record(800)
    assert lengths.curve(ints()).expected_remaining(ints(0, 790), ints(30, 5)).tolist() == [30, 5]


def test_short_ones_that_end_first_do_not_mislead() -> None:
    """After a start only short outputs have ended; those still running say that most are longer."""
    lengths = OutputLengths(1000)
    for _ in range(40):
        lengths.record(10)
    naive = lengths.curve(ints()).expected_remaining(ints(0), ints(900))
    warned = lengths.curve(np.full(960, 20, np.int32)).expected_remaining(ints(0), ints(900))
    assert naive[0] < 20
    assert warned[0] > 800


def test_old_lengths_fade() -> None:
    lengths = OutputLengths(1000)
    for length, times in ((20, 5000), (400, 8000)):
        for _ in range(times):
            lengths.record(length)
    assert lengths.curve(ints()).expected_remaining(ints(0), ints(900))[0] > 350


@given(length=st.integers(1, 5000))
def test_horizon_covers_every_length(length: int) -> None:
    edges = horizon(length)
    assert edges[0] == 0
    assert edges[-1] >= length
    assert (np.diff(edges) > 0).all()
