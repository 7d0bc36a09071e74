"""Stage II, and that the simulator and the program agree on what it found."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import a100_layer, made_up_profile, made_up_times

from autosearch.blocks import build_layer
from autosearch.growth import first_slots
from autosearch.interference import Pairwise
from autosearch.operators import Collectives, Resource
from autosearch.precedence import ChainedLayers
from autosearch.search import slowdowns
from autosearch.simulate import simulate
from autosearch.solvers import SolverOptions
from autosearch.stage1 import Stage1Problem, search_structure
from autosearch.stage2 import Stage2Problem, flows, search_shares

GLPK, HIGHS = SolverOptions("glpk"), SolverOptions("highs")


def solved(layer, batch, options=GLPK):
    placement = search_structure(Stage1Problem(layer, batch, first_slots(layer, batch)), options).placement
    assert placement is not None
    result = search_shares(Stage2Problem(flows(placement, 1)[0]), options, "plan")
    assert result.schedule is not None
    return result


@pytest.fixture(scope="module")
def result():
    return solved(a100_layer(), 2048)


def test_shares_are_measured_ones_and_fit_at_every_moment(result):
    layer = result.placement.layer
    operators = layer.times.operators(layer.collectives)
    result.schedule.validate(operators)
    share, _ = ChainedLayers(result.schedule.operations, operators).largest_share()
    assert share <= 1 + 1e-6
    by_name = {op.name: op for block in layer.blocks for op in block.operators}
    for operation in result.schedule.operations:
        block = next(b for b in layer.blocks if by_name[operation.operator] in b.operators)
        assert operation.sm_share in dict(layer.times.table.rates(block.resource))


def test_durations_are_best_time_over_rate(result):
    table = result.placement.layer.times.table
    position = 0
    for item in result.placement.placed:
        share = result.schedule.operations[position].sm_share
        position += len(item.block.operators)
        alone = result.placement.layer.time_us(item.block, item.end - item.start)
        rate = dict(table.rates(item.block.resource))[share]
        assert item.end_us - item.begin_us == pytest.approx(alone / rate)


def test_it_keeps_stage_1s_ranges_and_lane_order(result):
    layer = result.placement.layer
    before = search_structure(Stage1Problem(layer, 2048, first_slots(layer, 2048)), GLPK).placement
    for lane in before.lanes:
        assert order(result.placement, lane) == order(before, lane)


def order(placement, lane):
    items = [placement.placed[index] for index in placement.lane(lane)]
    return [(item.block.name, item.start, item.end) for item in items]


def test_later_prefill_waits_for_earlier_keys_in_both_readings(result):
    """The program's waits by rows are the schedule's, the edge from earlier rows' keys among them."""
    problem = Stage2Problem(result.placement)
    placed = result.placement.placed
    names = [(item.block.name, item.start, item.end) for item in placed]
    waits = {(names[i], names[j]) for i, j, back in problem.data_waits if not back}
    first, second = sorted(item[1:] for item in names if item[0] == "qkv")[:2]
    assert (("qkv", *first), ("prefill_attention", *second)) in waits
    assert (("qkv", *first), ("decode_attention", *second)) not in waits
    operators = result.placement.layer.times.operators(result.placement.layer.collectives)
    chained = ChainedLayers(result.schedule.operations, operators)
    reader = next(
        index
        for index, op in enumerate(chained.operations)
        if op.operator == "prefill_attention" and (op.start, op.end) == second
    )
    sources = {
        (chained.operations[other].operator, chained.operations[other].start) for other, _ in chained.data_waits[reader]
    }
    assert sources == {("rope_append", first[0]), ("rope_append", second[0])}


def test_overlap_pays_although_it_disturbs(result):
    assert result.period_us < result.placement.layer.sequential_us(2048)
    assert result.period_us > result.placement.layer.lower_bound_us(2048)
    slower = slowdowns(result)
    assert all(slower[resource] > 1 for resource in Resource)


def test_simulators_makespan_is_the_programs(result):
    layer = result.placement.layer
    timeline = simulate(result.schedule, layer.times, Pairwise(layer.times.table), 40)
    assert timeline.layer_us == pytest.approx(result.period_us, rel=0.01)


def test_glpk_is_within_three_percent_of_highs(result):
    assert result.period_us <= 1.03 * solved(a100_layer(), 2048, HIGHS).period_us


def test_waits_that_rows_and_lanes_imply_are_not_written(result):
    layer = result.placement.layer
    operators = layer.times.operators(layer.collectives)
    lean = ChainedLayers(result.schedule.operations, operators).without_implied_waits()
    waits = sum(len(op.after) + len(op.after_previous) for op in lean)
    assert waits < sum(len(op.after) + len(op.after_previous) for op in result.schedule.operations)
    before = ChainedLayers(result.schedule.operations, operators)
    assert sorted(ChainedLayers(lean, operators).concurrent()) == sorted(before.concurrent())


OPERATORS = ("qkv", "o", "up_gate", "down", "decode_attention", "prefill_attention", "o_all_reduce", "ffn_all_reduce")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({name: st.floats(5, 500) for name in OPERATORS}),
    st.sampled_from([256, 512, 1024]),
    st.sampled_from([0.0, 128.0]),
)
def test_any_profile_gives_valid_plans_that_the_simulator_confirms(times_us, batch, fixed_rows):
    """Every schedule validates; simulated and solved periods agree; nothing beats the busiest resource."""
    table = made_up_profile(times_us, batch, fixed_rows)
    layer = build_layer(made_up_times(table), Collectives.ALL_REDUCE)
    result = solved(layer, batch, SolverOptions("highs", time_limit_s=2.0, gap=0.02))
    timeline = simulate(result.schedule, layer.times, Pairwise(table), 24)  # validates
    assert timeline.layer_us == pytest.approx(result.period_us, rel=0.01)
    assert timeline.layer_us >= layer.lower_bound_us(batch) * (1 - 1e-6)
    assert timeline.makespan_us >= 24 * layer.lower_bound_us(batch) * (1 - 1e-6)
