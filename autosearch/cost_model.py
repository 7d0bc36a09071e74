"""The paper's cost model (section 3): how long an iteration must take, from shapes and data-sheet numbers.

Times are of one iteration, all layers, all GPUs working in parallel. Knows nothing of kernels, interference or
schedules. The output layer and sampling are left out, as in the paper's Table 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autosearch.catalog import GpuSpec, KnownModel
from autosearch.operator_costs import ELEMENT_BYTES, Cost, expert_gemms, layer_costs
from autosearch.operators import Resource
from autosearch.specs import ModelSpec
from autosearch.workload import RequestLengths, Workload

# Table 2's rows: the operators of ours that each stands for.
TABLE_ROWS: dict[str, tuple[str, ...]] = {
    "kqv": ("qkv",),
    "o": ("o",),
    "router": ("router",),
    "ug": ("up_gate",),  # of all experts, where there are experts
    "d": ("down",),
    "decode_attention": ("decode_attention",),
    "prefill_attention": ("prefill_attention",),
    "network": ("o_all_reduce", "ffn_all_reduce"),
}


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One row of Table 2."""

    gflop: float
    mem_gb: float
    net_gb: float
    compute_ms: float
    mem_ms: float
    net_ms: float

    @property
    def bound(self) -> Resource:
        """The resource that takes longest."""
        times = {Resource.COMPUTE: self.compute_ms, Resource.MEMORY: self.mem_ms, Resource.NETWORK: self.net_ms}
        return max(times, key=lambda resource: times[resource])


@dataclass(frozen=True, slots=True)
class Capacity:
    """What memory holds beside the weights, for given mean lengths."""

    max_requests: float  # requests whose KV fits, each at its mean context
    max_batch_size: int  # B_dense that these requests fill in the steady mix
    max_requests_without_gqa: float  # the same memory if every query head had its own key and value
    max_batch_size_without_gqa: int


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Section 3's times for one iteration, and Table 2 below them."""

    t_mem_ms: float  # Eq. 2: all of memory read once
    t_compute_ms: float  # Eq. 3
    t_net_ms: float  # Eq. 4, exact: (N-1)/N of the printed approximation
    t_net_approximate_ms: float  # Eq. 4 as printed
    operators: dict[str, OperatorTime]  # by TABLE_ROWS' names; rows that the model lacks are left out
    total: OperatorTime  # sum over the rows

    @property
    def t_r(self) -> float:
        """T_mem / T_compute; below 1 the iteration is compute-bound."""
        return self.t_mem_ms / self.t_compute_ms

    @property
    def net_ratio(self) -> float:
        """T_net / T_compute."""
        return self.t_net_ms / self.t_compute_ms

    @property
    def bound(self) -> Resource:
        """The resource that the whole iteration waits for."""
        times = {
            Resource.COMPUTE: self.t_compute_ms,
            Resource.MEMORY: self.t_mem_ms,
            Resource.NETWORK: self.t_net_ms,
        }
        return max(times, key=lambda resource: times[resource])


def optimal_tokens_per_s_per_gpu(gpu: GpuSpec, parameters: float) -> float:
    """Eq. 5: the measured GEMM rate over two operations per parameter and token."""
    return gpu.best_gemm_gflop_per_s * 1e9 / (2 * parameters)


def iteration_cost(model: KnownModel, gpu: GpuSpec, num_gpus: int, work: Workload) -> IterationCost:
    """All times of one iteration of B_dense rows on num_gpus GPUs."""
    spec = model.spec
    t_compute_s = 2 * work.batch_tokens * model.optimum_parameters / (num_gpus * gpu.compute_gflop_per_s * 1e9)
    volume = 4 * num_gpus * work.batch_tokens * spec.hidden_size * ELEMENT_BYTES * spec.num_layers
    t_net_s = volume / (num_gpus * gpu.one_way_network_gb_per_s * 1e9)
    costs = layer_costs(spec, num_gpus, work)
    if spec.num_experts:
        costs |= expert_gemms(spec, work.batch_tokens)
    rows = {}
    for row, names in TABLE_ROWS.items():
        present = [costs[name] for name in names if name in costs]
        if present or row == "network":
            rows[row] = _row(sum(present, Cost()).scaled(spec.num_layers), gpu, num_gpus)
    return IterationCost(
        t_mem_ms=1e3 * gpu.memory_gb / gpu.memory_gb_per_s,
        t_compute_ms=1e3 * t_compute_s,
        t_net_ms=1e3 * t_net_s * (num_gpus - 1) / num_gpus,
        t_net_approximate_ms=1e3 * t_net_s if num_gpus > 1 else 0.0,
        operators=rows,
        total=_total(list(rows.values())),
    )


def _row(cost: Cost, gpu: GpuSpec, num_gpus: int) -> OperatorTime:
    gflop, mem_gb, net_gb = (_as_printed(amount / 1e9) for amount in (cost.flops, cost.mem_bytes, cost.net_bytes))
    return OperatorTime(
        gflop,
        mem_gb,
        net_gb,
        1e3 * gflop / (num_gpus * gpu.compute_gflop_per_s),
        1e3 * mem_gb / (num_gpus * gpu.memory_gb_per_s),
        1e3 * net_gb / (num_gpus * gpu.one_way_network_gb_per_s),
    )


def _as_printed(amount: float) -> float:
    """Tenths from 10 on: the paper's Table 2 divides the amounts that it prints, and so do its milliseconds here."""
    return round(amount, 1) if amount >= 10 else amount


def _total(rows: list[OperatorTime]) -> OperatorTime:
    return OperatorTime(
        sum(row.gflop for row in rows),
        sum(row.mem_gb for row in rows),
        sum(row.net_gb for row in rows),
        sum(row.compute_ms for row in rows),
        sum(row.mem_ms for row in rows),
        sum(row.net_ms for row in rows),
    )


def capacity(model: KnownModel, gpu: GpuSpec, num_gpus: int, lengths: RequestLengths) -> Capacity:
    """Requests and B_dense that fit beside the weights; zeros where the weights alone do not fit."""
    spec = model.spec
    free = max(0.0, num_gpus * gpu.memory_gb * 1e9 - ELEMENT_BYTES * model.exact.total)
    context = max(1.0, lengths.mean_context)
    tokens = free / kv_bytes_per_token(spec)
    fewer = free / kv_bytes_per_token(replace(spec, num_kv_heads=spec.num_heads))
    return Capacity(
        max_requests=tokens / context,
        max_batch_size=int(lengths.steady_rows(tokens)),
        max_requests_without_gqa=fewer / context,
        max_batch_size_without_gqa=int(lengths.steady_rows(fewer)),
    )


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """KV of one token in all layers."""
    return ELEMENT_BYTES * spec.kv_elements_per_token_per_layer * spec.num_layers
