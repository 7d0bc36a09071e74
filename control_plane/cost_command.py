"""`nanoflow cost-model`: the paper's cost model on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from autosearch.catalog import find_gpu, find_model
from autosearch.cost_model import Capacity, IterationCost, capacity, iteration_cost, optimal_tokens_per_s_per_gpu
from autosearch.operators import check_parallel
from control_plane.planning_options import (
    DEFAULT_LENGTHS,
    ContextOption,
    GpuOption,
    InputOption,
    JsonOption,
    ModelOption,
    NumGpusOption,
    OutputOption,
    PairsOption,
    batch_work,
    mean_lengths,
)


def cost_model(
    model: ModelOption,
    gpu: GpuOption,
    num_gpus: NumGpusOption = 1,
    batch_size: Annotated[int, typer.Option("--batch-size", help="B_dense: token rows of an iteration.")] = 2048,
    decode_context_tokens: ContextOption = None,
    prefill_pairs: PairsOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """The paper's cost model: what bounds an iteration, per operator, and the optimal throughput."""
    known, card = find_model(model), find_gpu(gpu)
    check_parallel(known.spec, num_gpus)
    lengths = mean_lengths(input_len, output_len)
    work = batch_work(batch_size, decode_context_tokens, prefill_pairs, lengths)
    cost = iteration_cost(known, card, num_gpus, work)
    held = capacity(known, card, num_gpus, lengths or DEFAULT_LENGTHS)
    optima = {
        "nominal": optimal_tokens_per_s_per_gpu(card, known.optimum_parameters),
        "exact": optimal_tokens_per_s_per_gpu(card, known.exact.active),
    }
    if as_json:
        setting = {"model": known.name, "gpu": card.name, "num_gpus": num_gpus, **asdict(work)}
        print(json.dumps({**setting, **_cost_fields(cost, held, optima)}))
    else:
        _print_cost(cost, held, optima)


def _cost_fields(cost: IterationCost, held: Capacity, optima: dict[str, float]) -> dict[str, Any]:
    def times(row: Any) -> dict[str, Any]:
        return {**asdict(row), "bound": row.bound.value}

    return {
        "operators": {name: times(row) for name, row in cost.operators.items()},
        "total": times(cost.total),
        "t_mem_ms": cost.t_mem_ms,
        "t_compute_ms": cost.t_compute_ms,
        "t_net_ms": cost.t_net_ms,
        "t_net_approximate_ms": cost.t_net_approximate_ms,
        "t_r": cost.t_r,
        "t_net_over_t_compute": cost.net_ratio,
        "bound": cost.bound.value,
        "optimal_tokens_per_s_per_gpu": optima["nominal"],
        "optimal_tokens_per_s_per_gpu_exact": optima["exact"],
        "max_batch_size": held.max_batch_size,
        "max_requests": int(held.max_requests),
        "max_requests_without_gqa": int(held.max_requests_without_gqa),
        "max_batch_size_without_gqa": held.max_batch_size_without_gqa,
    }


def _print_cost(cost: IterationCost, held: Capacity, optima: dict[str, float]) -> None:
    print(f"{'operator':<18}{'GFLOP':>12}{'mem GB':>9}{'net GB':>9}{'comp ms':>10}{'mem ms':>9}{'net ms':>9}  bound")
    for name, row in [*cost.operators.items(), ("total", cost.total)]:
        print(
            f"{name:<18}{row.gflop:>12.1f}{row.mem_gb:>9.1f}{row.net_gb:>9.1f}"
            f"{row.compute_ms:>10.2f}{row.mem_ms:>9.2f}{row.net_ms:>9.2f}  {row.bound.value}"
        )
    print(f"T_mem {cost.t_mem_ms:.2f} ms, T_compute {cost.t_compute_ms:.2f} ms, T_net {cost.t_net_ms:.2f} ms")
    print(f"T_R = T_mem / T_compute {cost.t_r:.3f}, T_net / T_compute {cost.net_ratio:.3f}: {cost.bound.value}-bound")
    print(f"optimum {optima['nominal']:.0f} tokens/s/GPU ({optima['exact']:.0f} by the exact parameter count)")
    print(
        f"memory holds {held.max_requests:.0f} requests, B_dense up to {held.max_batch_size} "
        f"(without GQA {held.max_requests_without_gqa:.0f}, {held.max_batch_size_without_gqa})"
    )
