"""What is measured within a time budget, and what a search makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled_device import FASTEST, NUM_SMS, PUBLISHED, FormulaDevice

from autosearch.catalog import find_gpu, find_model
from autosearch.operator_times import OperatorTimes, Target
from autosearch.operators import Resource, layer_operators
from autosearch.planner import plan
from autosearch.profile_table import MeasuredOn, ProfileTable
from autosearch.search import SearchOptions
from autosearch.solvers import SolverOptions
from worker.profile_assembly import assemble, pair_rates, whole_us
from worker.profile_points import (
    KERNELS,
    MOST_SUSTAINED,
    Launch,
    Pair,
    Scope,
    bursts,
    fastest,
    sm_share,
    sustained_points,
)
from worker.profiler import Measurements, Reading, measure
from worker.steady_batch import SteadyMix
from worker.streams import WHOLE, Place

LLAMA = find_model("llama-3-8b")
OPERATORS = layer_operators(LLAMA.spec)
SCOPE = Scope(OPERATORS, NUM_SMS, (256, 512, 1024, 2048))
MIX = SteadyMix(2048, 1024, 768, 512)


def profile(device, seconds=300.0, scope=SCOPE):
    return measure(device, scope, device.clock() + seconds, device.clock)


def table_of(found, scope=SCOPE) -> ProfileTable:
    measured_on = MeasuredOn("h200", 1, NUM_SMS, 1450, 700, found.static_watts, {"torch": "2.11"})
    return assemble(found, scope, "h200-test", "llama-3-8b", measured_on, MIX.workload)


def test_everything_is_timed_on_everything_that_its_lane_may_have():
    launches = list(bursts(SCOPE))
    assert len(set(launches)) == len(launches)
    assert {launch.operator for launch in launches} == {operator.name for operator in OPERATORS}
    assert {launch.tokens for launch in launches} == set(SCOPE.batch_sizes)
    for name, kernels in KERNELS.items():
        assert {launch.kernel for launch in launches if launch.operator == name} == set(kernels)
    parts = {launch.place for launch in launches if launch.operator == "decode_attention"} - {WHOLE}
    assert parts == {Place(1, sms) for sms in range(16, 73, 8)}
    parts = {launch.place for launch in launches if launch.operator == "up_gate"} - {WHOLE}
    assert parts == {Place(0, NUM_SMS - sms) for sms in range(16, 73, 8)}


def test_the_most_needed_points_come_first_and_no_kernel_but_the_fastest():
    device = FormulaDevice()
    times = {launch: device.burst(launch) for launch in bursts(SCOPE)}
    points = sustained_points(SCOPE, times)
    assert len(points) == len(set(points)) <= MOST_SUSTAINED
    launches = [p for point in points for p in ((point.compute, point.memory) if isinstance(point, Pair) else (point,))]
    assert all(launch.kernel == FASTEST.get(launch.operator, "") for launch in launches)
    whole = list(points[: 2 * len(OPERATORS)])
    assert {(point.operator, point.tokens) for point in whole} == {(o.name, n) for o in OPERATORS for n in (2048, 1024)}
    pairs = [point for point in points if isinstance(point, Pair)]
    assert points[len(whole) : len(whole) + len(pairs)] == pairs
    assert [pair.compute.operator for pair in pairs[:8]] == ["up_gate"] * 8
    assert {pair.compute.operator for pair in pairs} == {"qkv", "o", "up_gate", "down"}
    for pair in pairs:
        assert (pair.compute.place.lane, pair.memory.place.lane) == (0, 1)
        assert pair.compute.place.sms + pair.memory.place.sms == NUM_SMS


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 400), st.floats(0.005, 0.2), st.floats(0.2, 3))
def test_the_budget_holds_and_what_is_left_out_is_counted(seconds, burst_s, sustained_s):
    device = FormulaDevice(burst_s=burst_s, sustained_s=sustained_s)
    found = profile(device, seconds)
    # However short, the layer is read twice, static power and what is around the layers once.
    least = 0.4 * seconds + burst_s + 4 * sustained_s
    assert device.now - 100.0 <= max(seconds, least) + 2 * sustained_s
    if found.alone:
        assert device.now - 100.0 <= seconds + 1e-6
    assert len(found.bursts) + found.num_skipped_bursts == len(list(bursts(SCOPE)))
    read = len(found.alone) + len(found.pairs)
    assert read + found.num_skipped_points == len(sustained_points(SCOPE, found.bursts))
    assert found.num_sustained <= MOST_SUSTAINED + 4


def test_five_minutes_are_enough_for_all_of_it():
    found = profile(FormulaDevice(), 270.0)
    assert (found.num_skipped_bursts, found.num_skipped_points) == (0, 0)
    assert len(found.pairs) == 4 * len(SCOPE.splits)


def test_the_table_has_sustained_times_rates_and_joules():
    found = profile(FormulaDevice())
    table = ProfileTable.from_json(table_of(found).to_json())
    assert set(table.operators) == {operator.name for operator in OPERATORS}
    for name in table.operators:
        best = table.best(name, 2048)
        assert best.time_us == pytest.approx(PUBLISHED.best(name, 2048).time_us, rel=1e-3)
        assert best.kernel == FASTEST.get(name, "")
        assert best.joules == pytest.approx((600 - 180) * best.time_us * 1e-6, rel=1e-2, abs=1e-6)
    kinds = {entry.derived for entry in table.isolated}
    assert kinds == {True, False}
    for pair in table.concurrent:
        assert pair.resources == (Resource.COMPUTE, Resource.MEMORY)
        assert sum(pair.sm_shares) == pytest.approx(1)
    known = dict(PUBLISHED.rates(Resource.MEMORY))
    for share, rate in table.rates(Resource.MEMORY):
        if share in known:
            assert rate == pytest.approx(known[share], rel=1e-3)
    assert len(table.concurrent) == len(SCOPE.splits)


def test_without_a_reading_a_burst_is_slowed_as_the_nearest_reading_was():
    launch, other = Launch("qkv", 1024), Launch("qkv", 1024, "128x128")
    small = Launch("qkv", 256)
    found = Measurements(
        bursts={launch: 100.0, other: 120.0, small: 30.0},
        alone={launch: Reading(130.0, 680.0)},
        static_watts=180.0,
    )
    entries = {(entry.tokens, entry.kernel): entry for entry in table_of(found).isolated}
    assert entries[1024, ""].time_us == 130.0
    assert entries[1024, "128x128"].time_us == pytest.approx(156.0)
    assert entries[256, ""].time_us == pytest.approx(39.0)
    assert entries[256, ""].joules == pytest.approx(500 * 39e-6)
    assert [entry.derived for entry in entries.values()] == [False, True, True]


def test_rates_are_over_the_fastest_kernel_on_the_whole_gpu():
    gemm, attention = Launch("o", 1024, "128x128", Place(0, 68)), Launch("decode_attention", 1024, "cuda", Place(1, 64))
    pair = Pair(gemm, attention)
    found = Measurements(
        alone={
            Launch("o", 1024, ""): Reading(100.0),
            Launch("o", 1024, "128x128", Place(0, 68)): Reading(150.0),
            Launch("decode_attention", 1024, "4x4"): Reading(350.0),
        },
        pairs={pair: (Reading(200.0), Reading(500.0))},
    )
    assert whole_us(found, "o", 1024) == 100.0
    assert pair_rates(found, pair) == (0.5, 0.7)
    (rate,) = table_of(found).concurrent
    assert rate.rates == (0.5, 0.7)
    assert rate.sm_shares == (68 / 132, 64 / 132)


def test_the_spread_is_that_of_the_same_reading_later():
    quiet, noisy = (profile(FormulaDevice(noise)) for noise in (0.0, 0.03))
    assert quiet.spread == 0.0
    assert 0.005 < noisy.spread < 0.07
    assert table_of(noisy).spread == pytest.approx(noisy.spread, abs=1e-4)


def test_the_first_of_the_fastest_kernels_wins():
    slow, fast = Launch("o", 128), Launch("o", 128, "128x128")
    assert fastest({slow: 2.0, fast: 1.0})["o", 128, WHOLE] == fast
    assert fastest({slow: 1.0, fast: 1.0})["o", 128, WHOLE] == slow


def test_other_gpus_have_other_parts():
    scope = Scope(OPERATORS, 108, (256,))
    assert all(sms % 8 == 0 and 0 < sms < 108 for sms in scope.splits)
    assert scope.compute_place(40) == Place(0, 68)
    assert sm_share(Place(1, 54), 108) == 0.5


def test_a_search_takes_it_and_finds_what_it_finds_in_the_published_one():
    table = table_of(profile(FormulaDevice(noise=0.002)))
    target = Target(LLAMA, find_gpu("h200"), 1, MIX.workload)
    assert OperatorTimes(table, target).kernel(OPERATORS[1], 2048) == "128x128"
    options = SearchOptions(SolverOptions("glpk", 5.0, 0.005))
    mine, theirs = (plan(target, each, options).report for each in (table, PUBLISHED))
    for figure in ("predicted_tokens_per_s_per_gpu", "sequential_tokens_per_s_per_gpu"):
        assert mine[figure] == pytest.approx(theirs[figure], rel=0.03)
    assert mine["predicted_tokens_per_s_per_gpu"] > 1.02 * mine["sequential_tokens_per_s_per_gpu"]
