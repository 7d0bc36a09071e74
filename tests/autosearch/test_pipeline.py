"""Schedules as files, and the rules that a schedule must keep."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosearch.catalog import find_model
from autosearch.operators import Collectives, Operator, Resource, layer_operators
from autosearch.pipeline import (
    Figures,
    InvalidScheduleError,
    NanoOperation,
    PipelineSchedule,
    nanobatch_only,
    sequential,
)
from autosearch.precedence import ChainedLayers

OPERATORS = layer_operators(find_model("llama-2-70b").spec, 8)
# A layer small enough to think about: attention between two GEMMs.
SMALL = (Operator("a", ()), Operator("m", ("a",), resource=Resource.MEMORY), Operator("b", ("m",)))


def overlapped(share_b: float, share_m: float, wait: bool = False) -> PipelineSchedule:
    """m of the second half may run beside b of the first half, unless b waits for it."""
    operations = (
        NanoOperation("a", 0, 128, 0, 1.0),
        NanoOperation("m", 0, 128, 1, 0.25),
        NanoOperation("a", 128, 256, 0, 0.75),
        NanoOperation("m", 128, 256, 1, share_m),
        NanoOperation("b", 0, 128, 0, share_b, after=(3,) if wait else ()),
        NanoOperation("b", 128, 256, 0, 1.0),
    )
    return PipelineSchedule("small", 256, operations)


@pytest.mark.parametrize("schedule", [sequential(OPERATORS, 256), nanobatch_only(OPERATORS, 256, 4)])
def test_built_in_schedules_validate(schedule):
    schedule.validate(OPERATORS)


def test_shares_that_fit_validate():
    overlapped(0.75, 0.25).validate(SMALL)


def test_shares_over_one_are_refused_with_names():
    with pytest.raises(InvalidScheduleError, match=r"m\[128, 256\).*b\[0, 128\)|b\[0, 128\).*m\[128, 256\)"):
        overlapped(0.75, 0.5).validate(SMALL)


def test_an_explicit_wait_keeps_operations_apart():
    overlapped(1.0, 0.25, wait=True).validate(SMALL)
    with pytest.raises(InvalidScheduleError):
        overlapped(1.0, 0.25).validate(SMALL)


def test_the_next_layer_counts_as_a_neighbour():
    """m of the second half is done before the layer ends, but nothing orders it against the next layer's start."""
    operations = (
        NanoOperation("a", 0, 256, 0, 1.0),
        NanoOperation("m", 0, 256, 1, 1.0),
        NanoOperation("b", 0, 256, 2, 0.5),
    )
    free = (SMALL[0], SMALL[1], Operator("b", ("a",)))  # b no longer waits for m
    chained = PipelineSchedule("chained", 256, operations)
    with pytest.raises(InvalidScheduleError, match="more than all SMs"):
        chained.validate(free)


def test_implied_waits_are_dropped_and_needed_ones_stay():
    needed = overlapped(1.0, 0.25, wait=True)
    operations = ChainedLayers(needed.operations, SMALL).without_implied_waits()
    assert operations[4].after == (3,)
    doubled = replace(needed.operations[5], after=(3, 4))  # its input and its lane
    implied = ChainedLayers((*needed.operations[:5], doubled), SMALL).without_implied_waits()
    assert implied[5].after == ()


def break_schedule(**change):
    first, *rest = sequential(OPERATORS, 256).operations
    return replace(sequential(OPERATORS, 256), operations=(replace(first, **change), *rest))


@pytest.mark.parametrize(
    "change", [{"end": 128}, {"start": 128}, {"sm_share": 0.0}, {"sm_share": 1.5}, {"operator": "x"}, {"after": (3,)}]
)
def test_broken_schedules_are_refused(change):
    with pytest.raises(InvalidScheduleError):
        break_schedule(**change).validate(OPERATORS)


def test_an_order_against_the_inputs_is_refused():
    plan = sequential(OPERATORS, 256)
    with pytest.raises(InvalidScheduleError, match="runs before"):
        replace(plan, operations=tuple(reversed(plan.operations))).validate(OPERATORS)


def test_later_prefill_before_earlier_append_is_refused():
    names = [op.name for op in OPERATORS]
    plan = nanobatch_only(OPERATORS, 256, 2)
    by_range = sorted(plan.operations, key=lambda op: (-op.start, names.index(op.operator)))
    with pytest.raises(InvalidScheduleError, match="prefill_attention"):
        replace(plan, operations=tuple(by_range)).validate(OPERATORS)


@pytest.mark.parametrize("given", [{"decode_share": 0.5}, {"mean_context": 700.0, "prefill_pairs": 0.0}])
def test_half_a_batch_is_refused_where_it_is_read(given):
    schedule = replace(sequential(OPERATORS, 256), **given)
    absent = " and ".join(name for name in ("decode_share", "mean_context", "prefill_pairs") if name not in given)
    with pytest.raises(InvalidScheduleError, match=f"without {absent}: give all of"):
        PipelineSchedule.from_json(schedule.to_json())


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    schedule = sequential(OPERATORS, 256)
    named = tuple(replace(op, kernel="128x129") if op.operator == "qkv" else op for op in schedule.operations)
    schedule = replace(schedule, operations=named)
    with pytest.raises(InvalidScheduleError, match=r"qkv\[0, 256\).* '128x129' is not known; .*128x128, scaled"):
        PipelineSchedule.from_json(schedule.to_json())
    with pytest.raises(InvalidScheduleError, match="128x129"):
        schedule.validate(OPERATORS)


def test_json_round_trip():
    plan = replace(overlapped(1.0, 0.25, wait=True), predicted=Figures(1.0, 2.0, 3.0), fingerprint="x", gpu="y")
    assert PipelineSchedule.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "1" * 5000, '{"name": "x", "batch_tokens": 1, "operations": [{"wrong": 1}]}']
)
def test_files_that_are_no_schedules_are_refused(text):
    with pytest.raises(InvalidScheduleError):
        PipelineSchedule.from_json(text)


NO_SPEED = Figures(1.0, 1100.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": NO_SPEED}, "nothing runs"),
        ({"predicted": replace(NO_SPEED, sequential_tokens_per_s_per_gpu=-1.0)}, "nothing runs"),
        ({"decode_share": 2.0, "mean_context": 10.0, "prefill_pairs": 1.0}, "no batch that can be"),
        ({"batch_tokens": 0, "operations": ()}, "is none"),
        ({"operations": tuple(NanoOperation("qkv", 0, 256, lane) for lane in range(9))}, "9 lanes"),
    ],
)
def test_impossible_numbers_are_refused_where_they_are_read(change, message):
    plan = replace(sequential(OPERATORS, 256), **change)
    for refused in (lambda: PipelineSchedule.from_json(plan.to_json()), lambda: plan.validate(OPERATORS)):
        with pytest.raises(InvalidScheduleError, match=message):
            refused()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.floats(0.1, 1.0)), min_size=6, max_size=6))
def test_validation_agrees_with_random_durations(seed, choices):
    """Whatever a schedule that validates is played with, shares never add up to more than one."""
    from random import Random

    base = overlapped(0.5, 0.5).operations
    operations = tuple(replace(op, lane=lane, sm_share=share) for op, (lane, share) in zip(base, choices))
    plan = PipelineSchedule("random", 256, operations)
    try:
        plan.validate(SMALL)
    except InvalidScheduleError:
        return
    rng = Random(seed)
    for _ in range(5):
        spans = play_randomly(plan, rng)
        for begin, _, _ in spans:
            running = sum(share for start, end, share in spans if start <= begin < end)
            assert running <= 1 + 1e-6


def play_randomly(plan, rng, layers=4):
    """(begin, end, share) of every operation when each layer's operations take random times."""
    waits = ChainedLayers(plan.operations, SMALL).waits
    ends, spans = {}, []
    for layer in range(layers):
        for index, operation in enumerate(plan.operations):
            before = [ends[other, layer - back] for other, back in waits[index] if layer >= back]
            begin = max(before, default=0.0)
            ends[index, layer] = begin + rng.choice([0.1, 1.0, 10.0])
            spans.append((begin, ends[index, layer], operation.sm_share))
    return spans


def test_a_schedule_of_the_other_collectives_is_refused_with_a_remedy():
    """What a worker that runs one graph only says of the other's plan."""
    spec = find_model("llama-2-70b").spec
    plan = replace(sequential(layer_operators(spec, 8, Collectives.ALL_GATHER), 128), collectives="all_gather")
    with pytest.raises(InvalidScheduleError, match="--collectives all_gather"):
        plan.validate(layer_operators(spec, 8))
    plan.validate(layer_operators(spec, 8, Collectives.ALL_GATHER))
