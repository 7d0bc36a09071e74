"""From a model, a GPU and a profile to schedules in a folder: checks, cache, search, report.

One call per bucket (B_dense, decode share, mean context). Knows nothing of command lines.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autosearch.blocks import build_layer
from autosearch.cost_model import kv_bytes_per_token
from autosearch.operator_costs import ELEMENT_BYTES
from autosearch.operator_times import OperatorTimes, Target
from autosearch.operators import Collectives
from autosearch.pipeline import PipelineSchedule, sequential
from autosearch.placement import Overlap
from autosearch.profile_table import ProfileTable
from autosearch.schedule_store import ScheduleStore, StoredPlan
from autosearch.search import (
    SearchError,
    SearchOptions,
    SearchResult,
    check_batch,
    nano_batches_only,
    predicted,
    search,
    throughput,
)
from autosearch.workload import Workload, from_bucket

_ALIKE = 0.03  # of the sequential time: blocks of a similar model differ by no more
GRID_BATCHES, GRID_DECODE_SHARES, GRID_CONTEXTS = (512, 1024, 2048), (0.33, 0.67), (512.0, 1024.0)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One batch size of a sweep, in tokens/s/GPU."""

    batch_tokens: int
    pipeline: float  # the best pipeline, whether it is kept or not
    sequential: float
    kept_pipeline: bool


@dataclass(frozen=True)
class Plan:
    """What a bucket got."""

    report: dict[str, Any]  # JSON fields, as docs/autosearch.md lists them
    schedules: tuple[PipelineSchedule, ...]  # the kept one first, the sequential one always among them
    warnings: tuple[str, ...]


def buckets(
    batches: Sequence[int] = GRID_BATCHES,
    decode_shares: Sequence[float] = GRID_DECODE_SHARES,
    contexts: Sequence[float] = GRID_CONTEXTS,
) -> Iterator[Workload]:
    """The grid that a server chooses its schedule from at each iteration."""
    for batch, share, context in itertools.product(batches, decode_shares, contexts):
        yield from_bucket(batch, share, context)


def plan(
    target: Target,
    table: ProfileTable,
    options: SearchOptions,
    store: ScheduleStore | None = None,
    reuse_similar: bool = False,
) -> Plan:
    """The bucket's plan: known, borrowed from a similar model if allowed, or searched for.

    Raises AutosearchError's kinds: an infeasible model, another GPU's profile, an impossible batch.
    """
    begin = time.monotonic()
    warnings = check_memory(target)
    times = OperatorTimes(table, target)
    key = fingerprint(target, table, options)
    known = store.plans().get(key) if store else None
    if store and known:
        report = {**known.report, "cached": True, "seconds": round(time.monotonic() - begin, 3)}
        return Plan(report, tuple(store.schedule(name) for name in known.files), tuple(warnings))
    shares = block_shares(times)
    if store and reuse_similar:
        borrowed = _borrow(times, store, shares, begin)
        if borrowed:
            return replace(borrowed, warnings=(*warnings, *borrowed.warnings))
    result = search(times, options)
    report = _report(times, result, options, key)
    schedules = [replace(schedule, fingerprint=key) for schedule in _kept_first(result)]
    if store:
        names = _file_names(times.target, schedules)
        report["files"] = list(names)
        store.save(StoredPlan(key, names, report, shares), dict(zip(names, schedules)))
    return Plan(report, tuple(schedules), tuple(warnings))


def check(target: Target, table: ProfileTable) -> None:
    """Whether `plan` has any chance, before other buckets are searched for minutes. Raises AutosearchError's kinds."""
    check_batch(target.work.batch_tokens)
    check_memory(target)
    OperatorTimes(table, target)


def check_memory(target: Target) -> list[str]:
    """Warnings of what does not fit. Raises SearchError where not even the weights do."""
    memory = target.num_gpus * target.gpu.memory_gb * 1e9
    weights = ELEMENT_BYTES * target.model.exact.total
    where = f"{target.num_gpus} x {target.gpu.name} ({memory / 1e9:.0f} GB)"
    if weights >= memory:
        raise SearchError(f"{target.model.name} has {weights / 1e9:.0f} GB of weights, too many for {where}: add GPUs")
    context = kv_bytes_per_token(target.model.spec) * target.work.decode_context_tokens
    if weights + context <= memory:
        return []
    return [
        f"a batch of {target.work.batch_tokens} rows reads {context / 1e9:.0f} GB of KV, but {where} holds "
        f"{(memory - weights) / 1e9:.0f} GB beside the weights: it needs a smaller batch or shorter contexts"
    ]


def fingerprint(target: Target, table: ProfileTable, options: SearchOptions) -> str:
    """Hash of everything that the answer depends on."""
    given = [asdict(target), table.fingerprint, asdict(options)]
    return hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=8).hexdigest()


def block_shares(times: OperatorTimes) -> dict[str, float]:
    """Each block's part of the sequential time."""
    layer, rows = build_layer(times, Collectives.ALL_REDUCE), times.target.work.batch_tokens
    whole = layer.sequential_us(rows)
    if not whole:
        raise SearchError(f"by profile {times.table.name} the layer takes no time: there is nothing to plan")
    return {block.name: round(layer.time_us(block, rows) / whole, 5) for block in layer.blocks}


def _borrow(times: OperatorTimes, store: ScheduleStore, shares: dict[str, float], begin: float) -> Plan | None:
    """A similar model's kept schedule, with this model's figures."""
    target = times.target
    for known in store.alike(shares, target.work.batch_tokens, _ALIKE):
        same_place = known.report["gpu"] == target.gpu.name and known.report["num_gpus"] == target.num_gpus
        if not same_place or known.report["model"] == target.model.name:
            continue
        operators = times.operators(Collectives.ALL_REDUCE)
        base = predicted(sequential(operators, target.work.batch_tokens), times, None)
        schedule = predicted(store.schedule(known.files[0]), times, base)
        assert schedule.predicted is not None
        report = {
            **known.report,
            "model": target.model.name,
            "reused_from": known.report["model"],
            "predicted_tokens_per_s_per_gpu": schedule.predicted.tokens_per_s_per_gpu,
            "sequential_tokens_per_s_per_gpu": schedule.predicted.sequential_tokens_per_s_per_gpu,
            "layer_us": schedule.predicted.layer_us,
            "seconds": round(time.monotonic() - begin, 3),
        }
        warning = (
            f"the plan of {known.report['model']} is reused for {target.model.name}: their blocks' parts of the "
            f"time differ by less than {_ALIKE:.0%}; search without --reuse-similar for its own"
        )
        return Plan(report, (schedule, base), (warning,))
    return None


def _kept_first(result: SearchResult) -> list[PipelineSchedule]:
    others = [schedule for schedule in result.candidates if schedule is not result.kept]
    return [result.kept, *others]


def _file_names(target: Target, schedules: Sequence[PipelineSchedule]) -> tuple[str, ...]:
    work = target.work
    bucket = f"b{work.batch_tokens}-d{work.decode_share:.2f}-c{work.mean_context:.0f}"
    where = f"{target.model.name}-{target.gpu.name}x{target.num_gpus}-{bucket}"
    kinds = ["sequential" if schedule.name.startswith("sequential") else "pipeline" for schedule in schedules]
    return tuple(f"{where}-{rank}-{kind}.json" for rank, kind in enumerate(kinds, start=1))


def _report(times: OperatorTimes, result: SearchResult, options: SearchOptions, key: str) -> dict[str, Any]:
    kept, target = result.kept, times.target
    assert kept.predicted is not None
    figures = kept.predicted
    return {
        "model": target.model.name,
        "gpu": target.gpu.name,
        "num_gpus": target.num_gpus,
        "profile": times.table.name,
        "batch_tokens": target.work.batch_tokens,
        "decode_share": round(target.work.decode_share, 4),
        "mean_context": round(target.work.mean_context, 1),
        "plan": kept.name,
        "collectives": kept.collectives,
        "predicted_tokens_per_s_per_gpu": figures.tokens_per_s_per_gpu,
        "sequential_tokens_per_s_per_gpu": figures.sequential_tokens_per_s_per_gpu,
        "optimal_tokens_per_s_per_gpu": result.optimal_tokens_per_s_per_gpu,
        "share_of_optimal": figures.tokens_per_s_per_gpu / result.optimal_tokens_per_s_per_gpu,
        "gain": figures.tokens_per_s_per_gpu / figures.sequential_tokens_per_s_per_gpu - 1,
        "spread": result.spread,
        "layer_us": figures.layer_us,
        "lower_bound_us": result.lower_bound_us,
        "num_nano_operations": result.num_nano_operations,
        "candidates": [
            {"plan": plan.name, "collectives": plan.collectives, **asdict(plan.predicted)}
            for plan in result.candidates
            if plan.predicted
        ],
        "solver": options.solver.name,
        "solves": [
            {
                "stage": report.stage,
                "collectives": report.collectives,
                "seconds": round(report.solve.seconds, 3),
                "gap": report.solve.gap,
                "found": report.solve.found,
            }
            for report in result.reports
        ],
        "fingerprint": key,
        "cached": False,
        "seconds": round(result.seconds, 3),
    }


def ablation(target: Target, table: ProfileTable, options: SearchOptions, found: Plan) -> dict[str, float]:
    """The paper's ablation (section 6.4), predicted, in tokens/s/GPU."""
    times = OperatorTimes(table, target)
    network = search(times, replace(options, overlap=Overlap.NETWORK, num_candidates=1))
    pipelines = {"nano_batches_only": nano_batches_only(times), "network_overlap_only": network.candidates[0]}
    figures = {name: throughput(schedule) for name, schedule in pipelines.items()}
    return {
        "nano_batches_only": figures["nano_batches_only"],
        "sequential": found.report["sequential_tokens_per_s_per_gpu"],
        "network_overlap_only": figures["network_overlap_only"],
        "all": found.report["predicted_tokens_per_s_per_gpu"],
    }


def sweep_point(target: Target, table: ProfileTable, options: SearchOptions) -> SweepPoint:
    """Pipeline and sequential schedule at one batch size."""
    result = search(OperatorTimes(table, target), options)
    pipelines = [throughput(plan) for plan in result.candidates if plan is not result.sequential]
    base = throughput(result.sequential)
    kept = result.kept is not result.sequential
    return SweepPoint(target.work.batch_tokens, max(pipelines, default=base), base, kept)
