"""The family of schedules with decode attention beside the prefill rows' projections, and operations that help."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import made_up_profile, made_up_times

from autosearch.catalog import find_model
from autosearch.decode_beside import DecodeBeside, decode_beside
from autosearch.interference import Pairwise
from autosearch.operators import Collectives, layer_operators
from autosearch.pipeline import InvalidScheduleError, NanoOperation, PipelineSchedule, sequential
from autosearch.simulate import simulate

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
MOE = layer_operators(find_model("mixtral-8x7b").spec)


@given(
    split=st.integers(1, 2047),
    share=st.floats(0.05, 0.95),
    num_beside=st.integers(1, 3),
    num_before=st.integers(0, 4),
    operators=st.sampled_from([OPERATORS, MOE]),
)
def test_all_of_the_family_are_valid(split, share, num_beside, num_before, operators):
    schedule = decode_beside(operators, 2048, split, share, num_beside, num_before=num_before)
    schedule.validate(operators)
    assert PipelineSchedule.from_json(schedule.to_json()) == schedule


def test_one_phase_is_shared_and_all_else_has_all_sms():
    schedule = decode_beside(OPERATORS, 2048, 1024, 0.5)
    shared = {(op.operator, op.start) for op in schedule.operations if op.sm_share < 1}
    assert shared == {(name, 1024) for name in ("o", "ffn_norm", "up_gate", "decode_attention")} | {
        ("decode_attention", 0)
    }
    assert [op.label for op in schedule.operations if op.helps] == ["decode_attention[0, 1024)"]
    assert schedule.ranges("decode_attention") == ((0, 1024), (1024, 2048))


@pytest.mark.parametrize(
    ("num_before", "early"),
    [(1, []), (2, ["rope_append"]), (3, ["qkv", "rope_append"]), (4, ["attn_norm", "qkv", "rope_append"])],
)
def test_what_comes_before_attention_can_run_beside_it_too(num_before, early):
    schedule = decode_beside(OPERATORS, 2048, 1024, 0.5, num_before=num_before)
    operations = schedule.operations
    decode = next(index for index, op in enumerate(operations) if op.operator == "decode_attention")
    shared = [op.label for op in operations[decode + 1 :] if op.sm_share < 1]
    assert shared[: len(early) + 1] == [*(f"{name}[1024, 2048)" for name in early), "prefill_attention[0, 2048)"]
    assert operations[decode].after == (decode - 1,)  # its own rows' last step before it
    assert {op.label for op in operations[:decode]} >= {f"{name}[0, 1024)" for name in early}


def test_near_are_steps_of_one_kind_and_an_exchange_of_work_for_sms():
    family = DecodeBeside(OPERATORS, 2048, 1016, 132)
    middle = next(each for each in family.start() if "-1024-" in each.name and "-0.485-" in each.name)
    names = {each.name.removeprefix("decode-beside-2048-") for each in family.near(middle)}
    assert names == {
        *("1024-0.424-3-cuda", "1024-0.545-3-cuda", "896-0.485-3-cuda", "1152-0.485-3-cuda"),
        *("1024-0.455-3-cuda", "1024-0.515-3-cuda"),  # 60 and 68 SMs: what is left beside groups of 8 is attention's
        *("1024-0.485-2-cuda", "1024-0.485-4-cuda", "1024-0.485-1+3-cuda"),
        *("1024-0.424-4-cuda", "1024-0.545-2-cuda", "1024-0.485-3-cuda-wide", "1024-0.485-3-cuda-small"),
    }
    later = next(each for each in family.near(middle) if "1+3" in each.name)
    assert {"1024-0.485-3-cuda", "1024-0.485-2+3-cuda"} < {
        each.name.removeprefix("decode-beside-2048-") for each in family.near(later)
    }
    assert {
        op.kernel for each in DecodeBeside(OPERATORS, 2048, 1016, 132, ["other"]).start() for op in each.operations
    } == {
        "",
        "other",
    }


@pytest.mark.parametrize(
    ("num_sms", "sms", "sizes"),
    [(132, 64, {56, 72, 60, 68}), (132, 68, {60, 76, 64, 72}), (128, 64, {56, 72}), (114, 48, {40, 56, 42, 50})],
)
def test_the_sizes_that_lanes_can_have(num_sms, sms, sizes):
    start = decode_beside(OPERATORS, 2048, 1024, sms / num_sms, kernel="cuda")
    family = DecodeBeside(OPERATORS, 2048, 1016, num_sms)
    near = [each for each in family.near(start) if each.ranges("o") == start.ranges("o") and "-3-cuda" in each.name]
    shares = {op.sm_share for each in near for op in each.operations if op.lane == 1}
    assert {round(share * num_sms) for share in shares} - {sms} == sizes


def test_a_schedule_is_known_by_what_it_does():
    family = DecodeBeside(OPERATORS, 2048, 1016, 132)
    middle = decode_beside(OPERATORS, 2048, 1024, 64 / 132, kernel="cuda-wide", num_before=1)
    in_other_kernels = tuple(replace(op, kernel="scaled") if op.operator == "qkv" else op for op in middle.operations)
    stored = PipelineSchedule.from_json(replace(middle, name="measured", operations=in_other_kernels).to_json())
    assert "decode-beside-2048-1024-0.485-2+3-cuda-wide" in {near.name for near in family.near(stored)}
    assert family.near(stored) == family.near(middle)
    for other in (
        sequential(OPERATORS, 2048),
        replace(middle, operations=middle.operations[:-1]),
        decode_beside(OPERATORS, 1024, 512, 0.5),
        decode_beside(OPERATORS, 2048, 1024, 0.01),
    ):
        assert family.near(other) == []


def test_a_helper_must_help_something_that_can_be_shared():
    schedule = decode_beside(OPERATORS, 2048, 1024, 0.5)

    def changed(name: str, **fields: object) -> PipelineSchedule:
        return replace(
            schedule,
            operations=tuple(
                replace(op, **fields) if op.operator == name and (op.helps or name != "decode_attention") else op
                for op in schedule.operations
            ),
        )

    with pytest.raises(InvalidScheduleError, match="helps nothing that began on another lane"):
        changed("decode_attention", lane=1).validate(OPERATORS)
    with pytest.raises(InvalidScheduleError, match="helps nothing that began on another lane"):
        changed("decode_attention", start=1).validate(OPERATORS)
    late = NanoOperation("decode_attention", 1024, 2048, 1, 0.5, helps=True)
    with pytest.raises(InvalidScheduleError, match="is helped after what reads its rows"):
        replace(schedule, operations=(*schedule.operations, late)).validate(OPERATORS)
    extra = NanoOperation("o", 1024, 2048, 1, 0.5, helps=True)
    with pytest.raises(InvalidScheduleError, match="is helped, and cannot be shared"):
        replace(schedule, operations=(*schedule.operations, extra)).validate(OPERATORS)


def test_what_is_left_goes_faster_with_help():
    """Half the SMs run attention at 0.75, a GEMM at 0.5; both halves together run attention as fast as it ever is."""
    kinds = ("qkv", "o", "up_gate", "down", "prefill_attention", "o_all_reduce", "ffn_all_reduce")
    times = made_up_times(made_up_profile({**dict.fromkeys(kinds, 0.0), "decode_attention": 128.0, "o": 64.0}, 256))
    schedule = decode_beside(times.operators(Collectives.ALL_REDUCE), 256, 224, 0.5, num_beside=1)
    timeline = simulate(schedule, times, Pairwise(times.table), 1)
    other_rows = 8 / 0.5  # o of the last 32 rows, none of which decode
    left = 128 - 0.75 * other_rows
    assert timeline.makespan_us == pytest.approx(other_rows + left + 56)
    alone = replace(schedule, operations=tuple(op for op in schedule.operations if not op.helps))
    assert simulate(alone, times, Pairwise(times.table), 1).makespan_us == pytest.approx(128 / 0.75 + 56)
