"""Times of other models, workloads and numbers of GPUs, from one profile."""

from dataclasses import replace

import pytest
from planning import A100_PROFILE, H200_PROFILE, a100_times

from autosearch.catalog import find_gpu, find_model
from autosearch.operator_times import OperatorTimes, Target
from autosearch.operators import Collectives, ParallelismError
from autosearch.profile_table import ProfileError, ProfileTable
from autosearch.workload import RequestLengths


def all_times(times, rows=2048):
    return {op.name: times.time_us(op, rows) for op in times.operators(Collectives.ALL_REDUCE)}


def test_the_profiled_model_keeps_its_times():
    assert sum(all_times(a100_times()).values()) * 80 / 1e3 == pytest.approx(225.05)


def test_a_gemm_scales_with_its_flops_per_gpu():
    own, other = all_times(a100_times()), all_times(a100_times(model="llama-3-8b", num_gpus=1))
    flops = (4096 * 2 * 14336) / (8192 * 2 * 28672 / 8)
    assert other["up_gate"] / own["up_gate"] == pytest.approx(flops)
    assert "o_all_reduce" not in other


def test_decode_attention_scales_with_context_bytes():
    short = all_times(a100_times(lengths=RequestLengths(512, 512)))
    long = all_times(a100_times(lengths=RequestLengths(1024, 1024)))
    assert long["decode_attention"] / short["decode_attention"] == pytest.approx(2, rel=0.02)
    assert long["qkv"] == short["qkv"]


def test_a_workload_without_decodes_has_no_decode_attention():
    assert all_times(a100_times(lengths=RequestLengths(512, 0)))["decode_attention"] == 0


def test_experts_stand_on_the_dense_ffn():
    times = all_times(a100_times(model="mixtral-8x7b"))
    dense = all_times(a100_times())
    flops = (2 * 2 * 3 * 4096 * 14336) / (2 * 3 * 8192 * 28672)
    assert times["experts"] / (dense["up_gate"] + dense["down"]) == pytest.approx(flops)


def test_another_gpus_profile_is_refused():
    table = ProfileTable.from_file(A100_PROFILE)
    with pytest.raises(ProfileError, match="measured on a100-80gb, not on h200"):
        OperatorTimes(table, Target(find_model("llama-2-70b"), find_gpu("h200"), 8, table.workload))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ParallelismError):
        a100_times(num_gpus=7)


def test_a_single_gpu_profile_knows_no_collectives():
    table = ProfileTable.from_file(H200_PROFILE)
    times = OperatorTimes(table, Target(find_model("llama-3-8b"), find_gpu("h200"), 2, table.workload))
    with pytest.raises(ProfileError, match="o_all_reduce"):
        all_times(times)


def test_joules_are_known_where_measured():
    table = ProfileTable.from_file(H200_PROFILE)
    times = OperatorTimes(table, Target(find_model("llama-3-8b"), find_gpu("h200"), 1, table.workload))
    total = sum(times.joules(op, 2048) for op in times.operators(Collectives.ALL_REDUCE))
    assert total == pytest.approx(0.68 + 0.24)
    qkv = a100_times().operators(Collectives.ALL_REDUCE)[1]
    assert a100_times().joules(qkv, 128) is None


def test_a_profile_of_an_unknown_model_or_with_times_that_its_set_up_has_not_is_refused():
    table = ProfileTable.from_file(A100_PROFILE)
    target = a100_times().target
    unknown = OperatorTimes(replace(table, model="gpt-5"), target)
    with pytest.raises(ProfileError, match="gpt-5"):
        all_times(unknown)
    alone = OperatorTimes(replace(table, measured_on=replace(table.measured_on, num_gpus=1)), target)
    with pytest.raises(ProfileError, match="does not run"):
        all_times(alone)


@pytest.mark.parametrize("imbalance", [0.5, -3, float("nan"), float("inf")])
def test_impossible_imbalance_is_refused(imbalance):
    times = a100_times()
    with pytest.raises(ProfileError, match="imbalance"):
        OperatorTimes(times.table, replace(times.target, expert_imbalance=imbalance))
