"""The simulator: what a schedule takes under each interference model."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import H200_PROFILE, a100_times, made_up_profile, made_up_times

from autosearch.blocks import build_layer
from autosearch.catalog import find_gpu, find_model
from autosearch.interference import Activity, FluidShares, MeasuredTriples, Pairwise, PowerBudget
from autosearch.operator_times import OperatorTimes, Target
from autosearch.operators import Collectives, Resource
from autosearch.pipeline import InvalidScheduleError, NanoOperation, PipelineSchedule, nanobatch_only, sequential
from autosearch.profile_table import ProfileError, ProfileTable, TripleRate
from autosearch.simulate import activities, simulate

TABLE = ProfileTable.from_file("a100-80gb-llama-2-70b-tp8")
GEMM = Activity(Resource.COMPUTE, 0.6, 100.0, 0.05)
DECODE = Activity(Resource.MEMORY, 0.2, 100.0, 0.02)
SEND = Activity(Resource.NETWORK, 0.2, 100.0, 0.01)


def h200_times():
    table = ProfileTable.from_file(H200_PROFILE)
    return OperatorTimes(table, Target(find_model("llama-3-8b"), find_gpu("h200"), 1, table.workload))


def test_sequential_is_the_sum_of_its_operators():
    times = a100_times()
    timeline = simulate(sequential(times.operators(Collectives.ALL_REDUCE), 2048), times, Pairwise(TABLE), 80)
    assert timeline.makespan_us == pytest.approx(225.05e3)
    assert timeline.layer_us == pytest.approx(225.05e3 / 80)


def test_nano_batches_without_overlap_only_cost():
    """Each half pays for its weights: GEMMs cost (2048 + 2 x 256) / (2048 + 256)."""
    times = a100_times()
    timeline = simulate(nanobatch_only(times.operators(Collectives.ALL_REDUCE), 2048, 2), times, Pairwise(TABLE), 80)
    gemms = 16.08 + 16.01 + 69.92 + 34.96
    assert timeline.makespan_us / 1e3 == pytest.approx(225.05 + gemms * 256 / 2304)


def test_overlapped_lanes_take_turns_with_data():
    """Two halves of 100 compute and 50 memory each, memory at a quarter of the SMs running at half speed."""
    times = made_up_times(
        made_up_profile(
            {"qkv": 200.0, "decode_attention": 100.0}
            | dict.fromkeys(("o", "up_gate", "down", "prefill_attention", "o_all_reduce", "ffn_all_reduce"), 0.0),
            256,
        )
    )
    operators = times.operators(Collectives.ALL_REDUCE)
    plan = nanobatch_only(operators, 256, 2)
    moved = tuple(
        replace(op, lane=1, sm_share=0.25) if op.operator == "decode_attention" else replace(op, sm_share=0.75)
        for op in sorted(plan.operations, key=projections_range_by_range)
    )
    plan = replace(plan, operations=moved)
    timeline = simulate(plan, times, Pairwise(times.table), 1)
    # qkv: 100 / 0.75 each; the first decode attention (50 / 0.5) runs beside the second qkv, the second after it
    assert timeline.makespan_us == pytest.approx(2 * 100 / 0.75 + 50 / 0.5)
    begins = {(plan.operations[s.index].operator, plan.operations[s.index].start): s.begin_us for s in timeline.spans}
    assert begins["decode_attention", 0] == pytest.approx(100 / 0.75)


def projections_range_by_range(op):
    first = op.operator in ("attn_norm", "qkv", "rope_append")
    return (0, op.start) if first else (1, 0)


def test_invalid_schedules_are_refused():
    times = a100_times(batch_tokens=256)
    with pytest.raises(InvalidScheduleError):
        simulate(PipelineSchedule("x", 256, (NanoOperation("qkv", 0, 256),)), times, Pairwise(TABLE), 1)


def test_pairwise_rates_are_the_tables():
    assert Pairwise(TABLE).rates([GEMM, DECODE, SEND]) == pytest.approx((0.6, 0.4, 0.6))
    helped = [DECODE, replace(DECODE, sm_share=0.8)]
    assert sum(Pairwise(TABLE).rates(helped)) == pytest.approx(1)  # two that read memory get no more than there is
    assert Pairwise(TABLE).rate(Resource.MEMORY, 0.25) == pytest.approx(0.45)  # between .2 and .3


def test_measured_triples_replace_pairs_where_they_exist():
    table = replace(TABLE, triples=(TripleRate((0.6, 0.2, 0.2), (0.5, 0.35, 0.55)),))
    triples = MeasuredTriples(table)
    assert triples.rates([SEND, GEMM, DECODE]) == (0.55, 0.5, 0.35)
    assert triples.rates([GEMM, DECODE]) == pytest.approx((0.6, 0.4))
    other = replace(GEMM, sm_share=0.5)
    assert triples.rates([other, DECODE, SEND]) == pytest.approx((0.5, 0.4, 0.6))


def test_a_power_budget_slows_all_together():
    plain = Pairwise(TABLE).rates([GEMM, DECODE])
    watts = 0.05 / 100e-6 * plain[0] + 0.02 / 100e-6 * plain[1]  # 300 + 80
    assert watts == pytest.approx(380)
    assert PowerBudget(Pairwise(TABLE), 100 + 380, 100).rates([GEMM, DECODE]) == pytest.approx(plain)
    slowed = PowerBudget(Pairwise(TABLE), 100 + 190, 100).rates([GEMM, DECODE])
    assert slowed == pytest.approx([rate / 2 for rate in plain])


def test_a_power_budget_needs_joules():
    with pytest.raises(ProfileError, match="joules"):
        PowerBudget(Pairwise(TABLE), 400, 100).rates([replace(GEMM, joules=None)])


def test_h200_under_less_power_is_slower():
    times = h200_times()
    plan = sequential(times.operators(Collectives.ALL_REDUCE), 2048)
    free = simulate(plan, times, Pairwise(times.table), 4).makespan_us
    assert simulate(plan, times, PowerBudget(Pairwise(times.table), 700, 180), 4).makespan_us == pytest.approx(free)
    assert simulate(plan, times, PowerBudget(Pairwise(times.table), 400, 180), 4).makespan_us > 1.3 * free


def test_fluid_shares_give_compute_what_is_left():
    fluid = FluidShares(TABLE, {Resource.MEMORY: 0.3, Resource.NETWORK: 0.1})
    assert fluid.rates([GEMM]) == (1.0,)
    assert fluid.rates([GEMM, DECODE, SEND]) == pytest.approx((0.6, 0.5, 0.4))


def test_joules_of_a_schedule_do_not_depend_on_its_order():
    times = h200_times()
    operators = times.operators(Collectives.ALL_REDUCE)
    whole = sum(work.joules for work in activities(sequential(operators, 2048), times))
    assert whole == pytest.approx(0.68 + 0.24)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_nothing_beats_the_busiest_resource(data):
    """Random valid schedules: any split, lanes by resource, any shares that validate."""
    times = a100_times(batch_tokens=512)
    layer = build_layer(times, Collectives.ALL_REDUCE)
    operators = times.operators(Collectives.ALL_REDUCE)
    plan = nanobatch_only(operators, 512, data.draw(st.sampled_from([1, 2, 4])))
    kinds = {op.name: list(Resource).index(op.resource) for op in operators if not op.joins}
    shares = [data.draw(st.sampled_from([0.2, 0.4, 0.6])) for _ in Resource]
    moved = tuple(
        replace(op, lane=kinds.get(op.operator, 0), sm_share=shares[kinds.get(op.operator, 0)])
        for op in plan.operations
    )
    plan = replace(plan, operations=moved)
    try:
        timeline = simulate(plan, times, Pairwise(TABLE), 6)
    except InvalidScheduleError:
        return
    assert timeline.makespan_us >= 6 * layer.lower_bound_us(512)
