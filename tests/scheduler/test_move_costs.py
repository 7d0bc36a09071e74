"""What moving and computing cost by measurement, and the choice between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.move_costs import CostLine, MoveCosts
from scheduler.plan import StoreTier

CPU, SSD = StoreTier.CPU, StoreTier.SSD
PAGE = 16
SECONDS = st.floats(1e-6, 10)


def measured(cpu_s: float = 0.0, ssd_s: float = 0.0, token_s: float = 0.0, save_s: float = 0.0) -> MoveCosts:
    """With so many seconds for each page and token."""
    costs = MoveCosts(PAGE)
    for size in (1, 4, 20):
        costs.loaded([CPU] * size, size, size * cpu_s)
        costs.loaded([SSD] * size, size, size * ssd_s)
        costs.saved(size, size * save_s)
        costs.computed(size, size, size * token_s)
    return costs


# --- lines ---


@given(fixed=st.floats(0, 1), per_unit=SECONDS, sizes=st.lists(st.integers(1, 500), min_size=2, max_size=40))
def test_a_line_is_found_again(fixed: float, per_unit: float, sizes: list[int]) -> None:
    line = CostLine()
    for size in sizes:
        line.record(size, fixed + size * per_unit)
    mean = sum(sizes) / len(sizes)
    if max(abs(size - mean) for size in sizes) > 0.5 * mean:
        for size in (0, 1, 100):
            assert line.seconds(size) == pytest.approx(fixed + size * per_unit, rel=1e-3, abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 100), SECONDS), min_size=1, max_size=60), st.integers(0, 1000))
def test_more_never_costs_less_and_nothing_costs_less_than_nothing(jobs: list[tuple[int, float]], size: int) -> None:
    line = CostLine()
    for job in jobs:
        line.record(*job)
    assert 0 <= line.seconds(size) <= line.seconds(size + 1) + 1e-9
    assert min(seconds for _, seconds in jobs) - 1e-6 <= line.seconds(max(size for size, _ in jobs))


def test_one_size_only_says_nothing_of_a_fixed_part() -> None:
    line = CostLine()
    for _ in range(5):
        line.record(10, 2.0)
    assert line.seconds(5) == pytest.approx(1.0)


def test_what_was_measured_lately_counts_more() -> None:
    line = CostLine()
    for seconds in [1.0] * 50 + [3.0] * 50:
        line.record(1, seconds)
    assert line.seconds(1) == pytest.approx(3.0, abs=0.1)


# --- loads ---


@given(st.lists(st.sampled_from([CPU, SSD]), max_size=30))
def test_as_long_as_one_side_is_unknown_all_is_loaded(tiers: list[StoreTier]) -> None:
    if tiers:
        assert MoveCosts(PAGE).num_worth_loading(tiers) == len(tiers)
        assert measured(token_s=1e-9).num_worth_loading(tiers) == len(tiers)
        assert measured(cpu_s=9.0, ssd_s=9.0).num_worth_loading(tiers) == len(tiers)


@given(
    num_cpu=st.integers(0, 20),
    rest=st.lists(st.sampled_from([CPU, SSD]), max_size=20),
    cpu_s=SECONDS,
    ssd_s=SECONDS,
    token_s=SECONDS,
)
def test_the_cheapest_choice_of_all_is_taken(
    num_cpu: int, rest: list[StoreTier], cpu_s: float, ssd_s: float, token_s: float
) -> None:
    tiers = [CPU] * num_cpu + rest
    if not tiers:
        return

    def total_s(num_loads: int) -> float:
        page_s = ssd_s if SSD in tiers[:num_loads] else cpu_s
        return num_loads * page_s + (len(tiers) - num_loads) * PAGE * token_s

    chosen = measured(cpu_s, ssd_s, token_s).num_worth_loading(tiers)
    best = min(total_s(count) for count in range(len(tiers) + 1))
    assert total_s(chosen) == pytest.approx(best, rel=1e-6)


def test_a_short_hit_on_ssd_is_not_worth_its_fixed_part_and_a_long_one_is() -> None:
    costs = MoveCosts(PAGE)
    for size in (1, 10, 100):
        costs.loaded([SSD] * size, size, 0.05 + size * 1e-3)
        costs.computed(100, 100, 100 * 2e-4)
    assert costs.num_worth_loading([SSD] * 5) == 0  # 55 ms against 16 ms
    assert costs.num_worth_loading([SSD] * 200) == 200  # 250 ms against 640 ms
    assert costs.num_worth_loading([CPU] * 3 + [SSD] * 5) == 3


def test_failed_loads_make_loading_dearer() -> None:
    costs = measured(cpu_s=1e-3, token_s=1e-3)
    assert costs.num_worth_loading([CPU] * 10) == 10
    for _ in range(20):
        costs.loaded([CPU] * 10, 0, 1.1)
    assert costs.num_worth_loading([CPU] * 10) == 0


def test_after_many_skips_it_is_tried_anew_so_that_a_store_that_is_fast_again_is_found_out() -> None:
    costs = measured(cpu_s=1.0, ssd_s=5.0, token_s=1e-3)
    num_skipped = 0
    while not costs.num_worth_loading([CPU] * 4):
        costs.skipped([CPU] * 4)
        num_skipped += 1
        assert num_skipped < 100
    costs.loaded([CPU] * 4, 4, 4e-3)
    assert costs.num_worth_loading([CPU] * 4) == 4
    assert costs.num_worth_loading([SSD] * 4) == 0, "of the SSD nothing new is known"


def test_decodes_in_a_step_carry_their_part_of_it() -> None:
    costs = MoveCosts(PAGE)
    costs.computed(num_tokens=100, num_prompt_tokens=0, run_s=5.0)
    assert costs.compute_s(1) == 0.0
    costs.computed(num_tokens=100, num_prompt_tokens=50, run_s=1.0)
    assert costs.compute_s(1) == pytest.approx(PAGE * 0.01)


# --- preempted requests ---


def test_moving_pays_when_saving_and_loading_are_cheaper_together() -> None:
    costs = measured(cpu_s=4 * PAGE * 1e-4, save_s=4 * PAGE * 1e-4, token_s=7 * 1e-4)
    assert not costs.is_worth_moving(num_saves=10, num_loads=10)
    assert costs.is_worth_moving(num_saves=5, num_loads=10)
    assert costs.is_worth_moving(num_saves=0, num_loads=10)


def test_moving_is_tried_while_nothing_is_known_and_again_after_many_times() -> None:
    assert MoveCosts(PAGE).is_worth_moving(5, 5)
    costs = measured(cpu_s=1.0, save_s=1.0, token_s=1e-3)
    num_times = 0
    while not costs.is_worth_moving(5, 5):
        costs.not_moved()
        num_times += 1
        assert num_times < 100
