"""The layer's graph and what each operator costs."""

from dataclasses import replace

import pytest

from autosearch.catalog import find_model
from autosearch.operator_costs import layer_costs, padded_expert_rows
from autosearch.operators import Collectives, ParallelismError, Resource, check_parallel, layer_operators
from autosearch.workload import Workload

LLAMA = find_model("llama-2-70b").spec
QWEN = find_model("qwen2-72b").spec
MIXTRAL = find_model("mixtral-8x7b").spec
WORK = Workload(1024, 512, 512 * 700.0, 512 * 300.0)


def graph(spec, num_gpus=1, collectives=Collectives.ALL_REDUCE):
    return {operator.name: operator for operator in layer_operators(spec, num_gpus, collectives)}


def test_one_gpu_has_no_collectives():
    assert not [op for op in graph(LLAMA).values() if op.resource is Resource.NETWORK]


def test_all_reduce_follows_both_row_split_projections():
    ops = graph(LLAMA, 8)
    assert ops["o_all_reduce"].inputs == ("o",)
    assert ops["ffn_norm"].inputs == ("o_all_reduce",)
    assert ops["ffn_all_reduce"].inputs == ("down",)


def test_all_gather_alternative_gathers_before_and_after_o():
    ops = graph(LLAMA, 8, Collectives.ALL_GATHER)
    assert ops["attention_all_gather"].inputs == ("decode_attention", "prefill_attention")
    assert ops["o"].inputs == ("attention_all_gather",)
    assert ops["ffn_norm"].inputs == ("o_all_gather",)
    assert "o_all_reduce" not in ops


def test_both_alternatives_move_the_same_bytes():
    moved = []
    for collectives in Collectives:
        moved.append(sum(cost.net_bytes for cost in layer_costs(LLAMA, 8, WORK, collectives).values()))
    assert moved[0] == moved[1] > 0


def test_later_prefill_waits_for_earlier_keys():
    assert graph(LLAMA)["prefill_attention"].earlier_rows == ("rope_append",)


def test_moe_routes_then_runs_experts():
    ops = graph(MIXTRAL, 8)
    assert ops["experts"].inputs == ("ffn_norm", "router")
    assert ops["ffn_all_reduce"].inputs == ("experts",)
    assert "up_gate" not in ops


@pytest.mark.parametrize("spec", [LLAMA, QWEN, MIXTRAL])
@pytest.mark.parametrize("num_gpus", [1, 4])
@pytest.mark.parametrize("collectives", Collectives)
def test_every_operator_has_a_cost_and_every_input_comes_before(spec, num_gpus, collectives):
    operators = layer_operators(spec, num_gpus, collectives)
    assert list(layer_costs(spec, num_gpus, WORK, collectives)) == [op.name for op in operators]
    seen = set()
    for op in operators:
        assert set(op.inputs) | set(op.earlier_rows) <= seen
        seen.add(op.name)
    assert all(cost.flops > 0 or cost.net_bytes > 0 for cost in layer_costs(spec, num_gpus, WORK, collectives).values())


def test_biases_are_counted():
    plain = layer_costs(replace(QWEN, qkv_bias=False), 1, WORK)["qkv"]
    biased = layer_costs(QWEN, 1, WORK)["qkv"]
    outputs = (64 + 2 * 8) * 128
    assert biased.flops - plain.flops == WORK.batch_tokens * outputs
    assert biased.mem_bytes - plain.mem_bytes == 2 * outputs


def test_gqa_shrinks_the_context_that_decodes_read():
    with_gqa = layer_costs(LLAMA, 1, WORK)["decode_attention"]
    without = layer_costs(replace(LLAMA, num_kv_heads=64), 1, WORK)["decode_attention"]
    assert with_gqa.flops == without.flops
    assert without.mem_bytes / with_gqa.mem_bytes == pytest.approx(8, rel=0.02)


def test_experts_pad_to_whole_tiles():
    assert padded_expert_rows(MIXTRAL, 2048) == 2048 * 2  # 512 rows an expert: four whole tiles
    assert padded_expert_rows(MIXTRAL, 128) == 8 * 128  # 32 rows an expert fill a quarter of a tile


def test_imbalance_costs_flops_only_through_tiles():
    balanced, uneven = layer_costs(MIXTRAL, 1, WORK), layer_costs(MIXTRAL, 1, WORK, expert_imbalance=1.5)
    assert uneven["experts"].flops > balanced["experts"].flops
    assert uneven["experts"].flops < 1.5 * balanced["experts"].flops
    assert uneven["experts"].mem_bytes == balanced["experts"].mem_bytes


@pytest.mark.parametrize("num_gpus", [0, 3, 128])
def test_impossible_splits_are_refused(num_gpus):
    with pytest.raises(ParallelismError, match=str(num_gpus)):
        check_parallel(LLAMA, num_gpus)
