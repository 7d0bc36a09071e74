"""What each operator of a layer costs: floating-point operations, bytes of memory, bytes of network.

Numbers are of one layer and all GPUs together, as in the paper's Table 2: weights and activations are counted
once each, however they are sharded. Knows nothing of how fast a device is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosearch.operators import Collectives, Resource, layer_operators
from autosearch.specs import ModelSpec
from autosearch.workload import Workload

ELEMENT_BYTES = 2  # 16-bit weights, activations and KV
EXPERT_TILE = 128  # rows of a grouped GEMM's tile; an expert's last tile is padded to it


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operator on some rows."""

    flops: float = 0.0
    mem_bytes: float = 0.0
    net_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.mem_bytes + other.mem_bytes, self.net_bytes + other.net_bytes)

    def scaled(self, factor: float) -> Cost:
        """This cost `factor` times."""
        return Cost(self.flops * factor, self.mem_bytes * factor, self.net_bytes * factor)

    def of(self, resource: Resource) -> float:
        """The amount that bounds an operator of this resource."""
        if resource is Resource.COMPUTE:
            return self.flops
        return self.mem_bytes if resource is Resource.MEMORY else self.net_bytes


def layer_costs(
    spec: ModelSpec,
    num_gpus: int,
    work: Workload,
    collectives: Collectives = Collectives.ALL_REDUCE,
    expert_imbalance: float = 1.0,
) -> dict[str, Cost]:
    """Cost by operator name for every operator of `layer_operators`.

    expert_imbalance: rows of the busiest expert over the mean, >= 1 (1: all experts get the same).
    """
    known = {
        **_projections(spec, work.batch_tokens),
        **_attention(spec, work),
        **_experts(spec, work.batch_tokens, expert_imbalance),
        **_elementwise(spec, work.batch_tokens),
        **_collectives(spec, num_gpus, work.batch_tokens),
    }
    return {operator.name: known[operator.name] for operator in layer_operators(spec, num_gpus, collectives)}


def _gemm(rows: float, inputs: int, outputs: int, bias: bool = False) -> Cost:
    flops = 2.0 * rows * inputs * outputs + (rows * outputs if bias else 0)
    elements = inputs * outputs + rows * (inputs + outputs) + (outputs if bias else 0)
    return Cost(flops, ELEMENT_BYTES * elements)


def _projections(spec: ModelSpec, rows: int) -> dict[str, Cost]:
    query, hidden, ffn = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    return {
        "qkv": _gemm(rows, hidden, query + spec.kv_elements_per_token_per_layer, spec.qkv_bias),
        "o": _gemm(rows, query, hidden, spec.o_bias),
        "up_gate": _gemm(rows, hidden, 2 * ffn, spec.mlp_bias),
        "down": _gemm(rows, ffn, hidden, spec.mlp_bias),
    }


def _attention(spec: ModelSpec, work: Workload) -> dict[str, Cost]:
    """A row's query is read, its output written, its own key and value written once; decodes read their context."""
    query, key_value = spec.num_heads * spec.head_dim, spec.kv_elements_per_token_per_layer
    per_row = ELEMENT_BYTES * (2 * query + key_value)
    context_bytes = ELEMENT_BYTES * key_value * work.decode_context_tokens
    return {
        "decode_attention": Cost(4.0 * work.decode_context_tokens * query, context_bytes + per_row * work.decode_rows),
        "prefill_attention": Cost(4.0 * work.prefill_pairs * query, per_row * work.prefill_rows),
    }


def _experts(spec: ModelSpec, rows: int, imbalance: float) -> dict[str, Cost]:
    if not spec.num_experts:
        return {}
    gemms = expert_gemms(spec, rows, imbalance)
    return {
        "router": _gemm(rows, spec.hidden_size, spec.num_experts),
        "experts": gemms["up_gate"] + gemms["down"],
    }


def expert_gemms(spec: ModelSpec, rows: int, imbalance: float = 1.0) -> dict[str, Cost]:
    """The grouped GEMMs of one layer's experts: up and gate together, and down."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    routed = rows * spec.experts_per_token
    computed = padded_expert_rows(spec, rows, imbalance)
    touched = spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** rows)

    def gemm(inputs: int, outputs: int) -> Cost:
        elements = touched * inputs * outputs + routed * (inputs + outputs)
        return Cost(2.0 * computed * inputs * outputs, ELEMENT_BYTES * elements)

    return {"up_gate": gemm(hidden, 2 * ffn), "down": gemm(ffn, hidden)}


def padded_expert_rows(spec: ModelSpec, rows: int, imbalance: float = 1.0) -> float:
    """Rows that a grouped GEMM computes: each expert's rows in whole tiles, the busiest `imbalance` x the mean."""
    mean = rows * spec.experts_per_token / spec.num_experts
    busiest = min(mean * max(1.0, imbalance), float(rows))
    others = (mean * spec.num_experts - busiest) / max(1, spec.num_experts - 1)

    def tiles(count: float) -> float:
        return EXPERT_TILE * math.ceil(count / EXPERT_TILE - 1e-9)

    return tiles(busiest) + (spec.num_experts - 1) * tiles(others)


def _elementwise(spec: ModelSpec, rows: int) -> dict[str, Cost]:
    query, key_value = spec.num_heads * spec.head_dim, spec.kv_elements_per_token_per_layer
    norm = Cost(4.0 * rows * spec.hidden_size, ELEMENT_BYTES * 4.0 * rows * spec.hidden_size)  # with the residual
    rope = Cost(3.0 * rows * (query + key_value / 2), ELEMENT_BYTES * 2.0 * rows * (query + key_value))
    return {"attn_norm": norm, "ffn_norm": norm, "rope_append": rope}


def _collectives(spec: ModelSpec, num_gpus: int, rows: int) -> dict[str, Cost]:
    """Exact ring volumes: every GPU receives (N-1)/N of the rows; an all-reduce is a gather's volume twice."""

    def gather(width: int) -> Cost:
        moved = ELEMENT_BYTES * float((num_gpus - 1) * rows * width)
        return Cost(0.0, moved, moved)

    additions = Cost(flops=float((num_gpus - 1) * rows * spec.hidden_size))
    reduce = gather(spec.hidden_size).scaled(2) + additions
    return {
        "attention_all_gather": gather(spec.num_heads * spec.head_dim),
        "o_all_gather": gather(spec.hidden_size),
        "o_all_reduce": reduce,
        "ffn_all_reduce": reduce,
    }
