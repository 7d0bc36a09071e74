"""Stage I: every rule of the paper's first program, and of what is built around it."""

from dataclasses import replace

import pytest
from planning import a100_layer, made_up_profile, made_up_times

from autosearch.blocks import build_layer
from autosearch.growth import add_near_bubble, first_slots, improves, largest_bubble
from autosearch.operators import Collectives, Resource
from autosearch.placement import COMPUTE_LANE, MEMORY_LANE, NETWORK_LANE, Overlap, to_schedule
from autosearch.solvers import SolverError, SolverOptions, solve
from autosearch.stage1 import Stage1Problem, build_model, search_structure

GLPK, HIGHS = SolverOptions("glpk"), SolverOptions("highs")
TWO = {"attention": 2, "output": 2, "ffn": 2}


def found(problem, options=GLPK):
    placement = search_structure(problem, options).placement
    assert placement is not None
    return placement


@pytest.fixture(scope="module")
def placement():
    return found(Stage1Problem(a100_layer(), 2048, TWO))


@pytest.fixture(scope="module")
def uneven():
    """Three ranges of attention over two of the FFN: ranges that only partly meet."""
    return found(Stage1Problem(a100_layer(), 1024, {"attention": 3, "output": 2, "ffn": 2}, Overlap.ALL, {}))


def test_it_starts_at_two_ranges_per_operator():
    assert first_slots(a100_layer(), 2048) == TWO
    assert first_slots(a100_layer(), 128) == dict.fromkeys(TWO, 1)


def test_ranges_are_multiples_of_128_that_cover_the_batch(placement, uneven):
    for each in (placement, uneven):
        for block in each.layer.blocks:
            ranges = sorted((item.start, item.end) for item in each.placed if item.block is block)
            assert ranges[0][0] == 0
            assert ranges[-1][1] == each.batch_tokens
            assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:]))
            assert all(end % 128 == 0 and end > start for start, end in ranges)


def test_the_last_range_takes_the_rest_of_a_batch_off_the_grid():
    each = found(Stage1Problem(a100_layer(batch_tokens=1152), 1152, TWO))
    assert {item.end for item in each.placed if item.block.name == "qkv"} >= {1152}


def test_durations_are_the_profiled_best(placement):
    for item in placement.placed:
        best = placement.layer.time_us(item.block, item.end - item.start)
        assert item.end_us - item.begin_us == pytest.approx(best)


def test_dependencies_follow_intersecting_ranges(placement, uneven):
    for each in (placement, uneven):
        for reader in each.placed:
            names, shift = reader.block.inputs, 0.0
            if not names:
                names, shift = (each.layer.last.name,), each.period_us  # the previous layer counts
            for source in each.placed:
                if source.block.name in names and source.start < reader.end and reader.start < source.end:
                    assert reader.begin_us + shift >= source.end_us - 1e-3
                if source.block.name in reader.block.earlier_rows and source.start < reader.end:
                    assert reader.begin_us >= source.end_us - 1e-3


def test_one_operation_per_resource_at_a_time_also_beside_the_next_layer(placement, uneven):
    for each in (placement, uneven):
        for lane in each.lanes:
            items = [each.placed[index] for index in each.lane(lane)]
            for earlier, later in zip(items, items[1:]):
                assert later.begin_us >= earlier.end_us - 1e-3
            assert items[0].begin_us + each.period_us >= items[-1].end_us - 1e-3
            assert len({item.block.resource for item in items}) == 1


def test_the_schedule_of_a_placement_is_in_a_valid_order(placement, uneven):
    for each in (placement, uneven):
        schedule = to_schedule(each, "whole GPU each", [0.3] * len(each.placed))  # 0.3: three lanes fit
        schedule.validate(each.layer.times.operators(each.layer.collectives))


def test_period_lies_between_the_busiest_resource_and_sequential(placement):
    assert placement.layer.lower_bound_us(2048) <= placement.period_us <= placement.layer.sequential_us(2048)


def test_nothing_is_split_where_splitting_gains_nothing():
    """Second objective, the fewest nano-operations: with compute alone, ranges of their own cost and gain nothing."""
    times = {"qkv": 50.0, "o": 50.0, "up_gate": 100.0, "down": 100.0}
    rest = dict.fromkeys(("decode_attention", "prefill_attention", "o_all_reduce", "ffn_all_reduce"), 0.0)
    layer = build_layer(made_up_times(made_up_profile(times | rest, 512)), Collectives.ALL_REDUCE)
    each = found(Stage1Problem(layer, 512, TWO))
    assert len(each.placed) == len(layer.blocks)
    assert each.period_us == pytest.approx(300.0)


def test_free_splits_hide_memory_and_network_entirely():
    """Compute 400, memory 60, network 2 x 25, no cost of splitting: the period is compute's."""
    times = {"qkv": 100.0, "o": 50.0, "up_gate": 150.0, "down": 100.0, "prefill_attention": 0.0}
    hidden = {"decode_attention": 60.0, "o_all_reduce": 25.0, "ffn_all_reduce": 25.0}
    layer = build_layer(made_up_times(made_up_profile(times | hidden, 1024)), Collectives.ALL_REDUCE)
    assert found(Stage1Problem(layer, 1024, TWO)).period_us == pytest.approx(400.0, rel=0.01)


def test_both_collective_alternatives_are_planned():
    reduce = found(Stage1Problem(a100_layer(), 2048, TWO))
    gather = found(Stage1Problem(a100_layer(Collectives.ALL_GATHER), 2048, TWO))
    assert gather.period_us < reduce.period_us  # half the volume stands before O
    assert {item.block.name for item in gather.placed} - {item.block.name for item in reduce.placed} == {
        "attention_all_gather",
        "o_all_gather",
    }


@pytest.mark.parametrize(
    ("overlap", "lanes"),
    [
        (Overlap.ALL, {COMPUTE_LANE, MEMORY_LANE, NETWORK_LANE}),
        (Overlap.NETWORK, {COMPUTE_LANE, NETWORK_LANE}),
        (Overlap.NONE, {COMPUTE_LANE}),
    ],
)
def test_overlap_decides_who_has_a_lane(overlap, lanes):
    each = found(Stage1Problem(a100_layer(batch_tokens=512), 512, TWO, overlap))
    assert set(each.lanes) == lanes


def test_more_overlap_never_costs_time():
    periods = [
        found(Stage1Problem(a100_layer(batch_tokens=1024), 1024, TWO, overlap)).period_us
        for overlap in (Overlap.ALL, Overlap.NETWORK, Overlap.NONE)
    ]
    assert periods == sorted(periods)


def test_slowdowns_stretch_their_resource():
    slow = Stage1Problem(a100_layer(), 2048, TWO, slowdown={Resource.MEMORY: 2.0})
    plain = Stage1Problem(a100_layer(), 2048, TWO)
    assert slow.time_us("decode_attention", 1024) == 2 * plain.time_us("decode_attention", 1024)
    assert slow.time_us("qkv", 1024) == plain.time_us("qkv", 1024)


def test_only_better_answers_are_asked_for():
    lower = a100_layer().lower_bound_us(2048)
    assert search_structure(Stage1Problem(a100_layer(), 2048, TWO, period_below_us=lower), GLPK).placement is None


def test_growth_is_where_the_bubble_is():
    """Network 150 between O and the FFN is more than what is there to compute meanwhile."""
    times = {"qkv": 100.0, "o": 100.0, "up_gate": 100.0, "down": 100.0, "prefill_attention": 0.0}
    exposed = {"decode_attention": 1.0, "o_all_reduce": 600.0, "ffn_all_reduce": 1.0}
    layer = build_layer(made_up_times(made_up_profile(times | exposed, 1024)), Collectives.ALL_REDUCE)
    each = found(Stage1Problem(layer, 1024, TWO))
    bubble = largest_bubble(each)
    assert bubble is not None
    assert "o_all_reduce" in [item.block.name for item in bubble.chain]
    grown = add_near_bubble(each, TWO)
    assert grown[0]["output"] == 3
    assert all(sum(slots.values()) > sum(TWO.values()) for slots in grown)


def test_growth_stops_without_bubbles_and_below_128_rows():
    times = {"qkv": 100.0, "o": 50.0, "up_gate": 150.0, "down": 100.0, "prefill_attention": 0.0}
    hidden = {"decode_attention": 10.0, "o_all_reduce": 5.0, "ffn_all_reduce": 5.0}
    layer = build_layer(made_up_times(made_up_profile(times | hidden, 1024)), Collectives.ALL_REDUCE)
    exact = SolverOptions("highs", gap=0.0)
    assert add_near_bubble(found(Stage1Problem(layer, 1024, TWO), exact), TWO) == []
    small = found(Stage1Problem(a100_layer(batch_tokens=256), 256, TWO))
    assert add_near_bubble(small, TWO) == []


def test_hardly_shorter_is_no_improvement():
    assert improves(99.0, 100.0)
    assert not improves(99.9, 100.0)


def test_glpk_is_within_three_percent_of_highs(placement):
    by_highs = found(Stage1Problem(a100_layer(), 2048, TWO), HIGHS)
    assert placement.period_us <= 1.03 * by_highs.period_us


@pytest.mark.parametrize("options", [GLPK, HIGHS], ids=["glpk", "highs"])
def test_gap_and_time_are_reported(options):
    report = solve(build_model(Stage1Problem(a100_layer(batch_tokens=512), 512, TWO)), options)
    assert report.found
    assert report.solver == options.name
    assert 0 <= report.gap <= options.gap + 1e-6
    assert 0 < report.seconds < 30


def test_a_solve_that_was_cut_short_says_how_far_from_the_bound_it_is():
    loose = SolverOptions("glpk", gap=0.2)
    report = solve(build_model(Stage1Problem(a100_layer(), 2048, TWO)), loose)
    assert report.bound < report.objective
    assert 0 < report.gap <= loose.gap + 1e-6
    exact = solve(build_model(Stage1Problem(a100_layer(), 2048, TWO)), SolverOptions("highs", gap=0.005))
    assert report.bound <= exact.objective * 1.001


@pytest.mark.parametrize("options", [GLPK, HIGHS], ids=["glpk", "highs"])
def test_an_impossible_program_is_reported_not_raised(options):
    problem = Stage1Problem(a100_layer(batch_tokens=512), 512, TWO)
    model = build_model(problem)
    model.period.setub(1.0)
    model.period.setlb(0.0)
    report = solve(model, options)
    assert not report.found
    assert report.gap is None


def test_unknown_solvers_and_impossible_limits_are_refused():
    with pytest.raises(SolverError, match="glpk, highs"):
        SolverOptions("cplex")
    for number in (0, -1, float("nan"), float("inf"), 1e300):
        with pytest.raises(SolverError, match="time limit"):
            replace(GLPK, time_limit_s=number)
    for number in (-1, 1, float("nan"), float("inf")):
        with pytest.raises(SolverError, match="gap"):
            replace(GLPK, gap=number)
