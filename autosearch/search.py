"""The whole search for one batch: Stage I, Stage II, candidates, and which of them is kept.

The sequential schedule is always a candidate, and is kept where nothing beats it by more than the profile's
spread. Predictions are the simulator's, under the paper's pairwise interference. Knows nothing of files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autosearch.blocks import RANGE_STEP, Layer, build_layer
from autosearch.cost_model import optimal_tokens_per_s_per_gpu
from autosearch.decode_beside import KERNELS, DecodeBeside
from autosearch.errors import AutosearchError
from autosearch.growth import REAL_GAIN, add_near_bubble, first_slots, improves
from autosearch.interference import Pairwise
from autosearch.operator_times import OperatorTimes
from autosearch.operators import Collectives, Resource
from autosearch.pipeline import Figures, PipelineSchedule, nanobatch_only, sequential
from autosearch.placement import Overlap, Placement
from autosearch.precedence import ChainedLayers
from autosearch.simulate import simulate
from autosearch.solvers import SolveReport, SolverOptions
from autosearch.stage1 import COARSE_STEPS, FINE_STEPS, Stage1Problem, search_structure
from autosearch.stage2 import Stage2Problem, Stage2Result, flows, search_shares

_FLOWS = 2  # structures that Stage II is given per placement
_ROUNDS = 2  # of Stage I with the slowdowns that Stage II found


class SearchError(AutosearchError):
    """A request that has no plan; the message says why."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How hard to look."""

    solver: SolverOptions = field(default_factory=SolverOptions)
    overlap: Overlap = Overlap.ALL
    collectives: tuple[Collectives, ...] = tuple(Collectives)
    num_candidates: int = 3  # pipelines to keep beside the sequential schedule
    growth_budget_s: float = 20.0  # no more ranges are tried after this; shared by the collective alternatives


@dataclass(frozen=True, slots=True)
class StageReport:
    """One solve, for the record."""

    stage: str
    collectives: str
    solve: SolveReport


@dataclass(frozen=True)
class SearchResult:
    """What was found for one batch, best first; the sequential schedule is among the candidates."""

    kept: PipelineSchedule
    candidates: tuple[PipelineSchedule, ...]
    sequential: PipelineSchedule
    lower_bound_us: float  # of a layer: the busiest resource
    optimal_tokens_per_s_per_gpu: float
    spread: float
    reports: tuple[StageReport, ...]
    seconds: float

    @property
    def num_nano_operations(self) -> dict[str, int]:
        """By operator, of the kept schedule."""
        counts: dict[str, int] = {}
        for operation in self.kept.operations:
            counts[operation.operator] = counts.get(operation.operator, 0) + 1
        return counts


def search(times: OperatorTimes, options: SearchOptions) -> SearchResult:
    """Find the best schedule for the target's batch. Raises SearchError where the batch cannot be planned."""
    begin = time.monotonic()
    batch = times.target.work.batch_tokens
    check_batch(batch)
    layers = [build_layer(times, collectives) for collectives in _alternatives(times, options)]
    base = predicted(sequential(times.operators(Collectives.ALL_REDUCE), batch), times, None)
    reports: list[StageReport] = []
    found = [predicted(plan, times, base) for layer in layers for plan in _plans(layer, batch, options, reports)]
    if options.overlap is Overlap.ALL and times.target.num_gpus == 1:
        found += _decode_beside(times, base)
    ranked = best_of_each_kind(found)[: options.num_candidates]
    kept = base
    if ranked and gain(ranked[0]) > times.table.spread:
        kept = ranked[0]
    return SearchResult(
        kept=kept,
        candidates=tuple(sorted((*ranked, base), key=lambda plan: -_figures(plan).tokens_per_s_per_gpu)),
        sequential=base,
        lower_bound_us=layers[0].lower_bound_us(batch),
        optimal_tokens_per_s_per_gpu=optimal_tokens_per_s_per_gpu(
            times.target.gpu, times.target.model.optimum_parameters
        ),
        spread=times.table.spread,
        reports=tuple(reports),
        seconds=time.monotonic() - begin,
    )


def check_batch(batch_tokens: int) -> None:
    """Raise SearchError where the batch cannot be cut into nano-batches."""
    if batch_tokens % RANGE_STEP:
        raise SearchError(f"batch size {batch_tokens} is no multiple of {RANGE_STEP}: nano-batches are")


def gain(plan: PipelineSchedule) -> float:
    """Predicted throughput over sequential, less one."""
    figures = _figures(plan)
    return figures.tokens_per_s_per_gpu / figures.sequential_tokens_per_s_per_gpu - 1


def predicted(plan: PipelineSchedule, times: OperatorTimes, base: PipelineSchedule | None) -> PipelineSchedule:
    """The schedule with the simulator's figures; `base` is the sequential one (None: the schedule is it)."""
    layers = times.target.model.spec.num_layers
    timeline = simulate(plan, times, Pairwise(times.table), layers)
    rate = plan.batch_tokens / (timeline.makespan_us * 1e-6) / times.target.num_gpus
    reference = _figures(base).tokens_per_s_per_gpu if base else rate
    work = times.target.work
    return replace(
        plan,
        model=times.target.model.name,
        gpu=times.target.gpu.name,
        num_gpus=times.target.num_gpus,
        decode_share=work.decode_share,
        mean_context=work.mean_context,
        prefill_pairs=work.prefill_pairs,
        predicted=Figures(timeline.layer_us, rate, reference),
    )


def nano_batches_only(times: OperatorTimes, count: int = 2) -> PipelineSchedule:
    """The ablation's nano-batches without overlap, with its figures."""
    operators, batch = times.operators(Collectives.ALL_REDUCE), times.target.work.batch_tokens
    base = predicted(sequential(operators, batch), times, None)
    return predicted(nanobatch_only(operators, batch, count), times, base)


def throughput(plan: PipelineSchedule) -> float:
    """Predicted tokens/s/GPU of a schedule with figures."""
    return _figures(plan).tokens_per_s_per_gpu


def _figures(plan: PipelineSchedule) -> Figures:
    assert plan.predicted is not None
    return plan.predicted


def _alternatives(times: OperatorTimes, options: SearchOptions) -> tuple[Collectives, ...]:
    """Without tensor parallelism there are no collectives to choose between."""
    return options.collectives if times.target.num_gpus > 1 else (Collectives.ALL_REDUCE,)


def best_of_each_kind(plans: list[PipelineSchedule]) -> list[PipelineSchedule]:
    """Fastest first, but the fastest of each collective, then of each number of ranges before all others.

    Variety to measure, and something for a worker that runs one of the collectives only. The same plan comes once.
    """
    ranked = sorted(plans, key=throughput, reverse=True)
    chosen: dict[tuple[object, ...], PipelineSchedule] = {}
    for kind in (_collectives_of, _ranges_of, _all_of):
        leaders: dict[tuple[object, ...], PipelineSchedule] = {}
        for plan in ranked:
            leaders.setdefault(kind(plan), plan)
        for plan in leaders.values():
            chosen.setdefault(_all_of(plan), plan)
    return list(chosen.values())


def _collectives_of(plan: PipelineSchedule) -> tuple[object, ...]:
    return (plan.collectives,)


def _ranges_of(plan: PipelineSchedule) -> tuple[object, ...]:
    return (plan.name, plan.collectives)


def _all_of(plan: PipelineSchedule) -> tuple[object, ...]:
    return (plan.operations, plan.collectives)


def _plans(layer: Layer, batch: int, options: SearchOptions, reports: list[StageReport]) -> Iterator[PipelineSchedule]:
    """Stage I at more and more ranges, Stage II for each, then both again with the slowdowns found."""
    results: list[tuple[Stage2Result, Mapping[str, int]]] = []
    deadline = time.monotonic() + options.growth_budget_s / len(_alternatives(layer.times, options))
    slots: Mapping[str, int] = first_slots(layer, batch)
    # Two ranges on both grids: either may be the better start for Stage II. More of them on the coarse one alone: the
    # fine one takes many times as long and seldom gains.
    grids = (COARSE_STEPS, FINE_STEPS) if batch > COARSE_STEPS * RANGE_STEP else (COARSE_STEPS,)
    firsts = [_stage1(layer, batch, slots, {}, None, steps, options, reports) for steps in grids]
    placements = [placement for placement in firsts if placement is not None]
    for placement in placements:
        results += [(result, slots) for result in _stage2(placement, options, reports)]
    best = min(placements, key=lambda placement: placement.period_us, default=None)
    proposals = add_near_bubble(best, slots) if best else []
    while best and proposals and time.monotonic() < deadline:
        slots = proposals.pop(0)
        grown = _stage1(layer, batch, slots, {}, best.period_us, COARSE_STEPS, options, reports)
        if grown is not None and improves(grown.period_us, best.period_us):
            best, proposals = grown, add_near_bubble(grown, slots)
            results += [(result, slots) for result in _stage2(grown, options, reports)]
    for _ in range(_ROUNDS):
        if not results:
            return
        leader, leader_slots = min(results, key=lambda item: item[0].period_us)
        replanned = _stage1(layer, batch, leader_slots, slowdowns(leader), None, FINE_STEPS, options, reports)
        again = _stage2(replanned, options, reports) if replanned else []
        results += [(result, leader_slots) for result in again]
        if not any(improves(result.period_us, leader.period_us) for result in again):
            break
    yield from (result.schedule for result, _ in results if result.schedule)


def _decode_beside(times: OperatorTimes, base: PipelineSchedule) -> list[PipelineSchedule]:
    """Schedules of the family that one GPU is tuned in, up to the best: the MILPs have no operations that help."""
    target, operators = times.target, times.operators(Collectives.ALL_REDUCE)
    num_decodes, num_sms = round(target.work.decode_rows), times.table.measured_on.num_sms
    family = DecodeBeside(operators, target.work.batch_tokens, num_decodes, num_sms, KERNELS[:1])
    rated: dict[str, PipelineSchedule] = {}
    steps = family.start()
    while steps:
        rated |= {schedule.name: predicted(schedule, times, base) for schedule in steps}
        best = max(rated.values(), key=throughput)
        steps = [near for near in family.near(best) if near.name not in rated]
    return list(rated.values())


def _stage1(
    layer: Layer,
    batch: int,
    slots: Mapping[str, int],
    slowdown: Mapping[Resource, float],
    best_us: float | None,
    grid_steps: int,
    options: SearchOptions,
    reports: list[StageReport],
) -> Placement | None:
    below = best_us * (1 - REAL_GAIN) if best_us is not None else None
    problem = Stage1Problem(layer, batch, slots, options.overlap, slowdown, below, grid_steps)
    result = search_structure(problem, options.solver)
    reports.append(StageReport("I", layer.collectives.value, result.report))
    return result.placement


def _stage2(placement: Placement, options: SearchOptions, reports: list[StageReport]) -> list[Stage2Result]:
    results = []
    for flow in flows(placement, _FLOWS):
        result = search_shares(Stage2Problem(flow), options.solver, _name(placement))
        reports.append(StageReport("II", placement.layer.collectives.value, result.report))
        if result.schedule is not None:
            operators = placement.layer.times.operators(placement.layer.collectives)
            operations = ChainedLayers(result.schedule.operations, operators).without_implied_waits()
            results.append(replace(result, schedule=replace(result.schedule, operations=operations)))
    return results


def _name(placement: Placement) -> str:
    counts: dict[str, set[tuple[int, int]]] = {group: set() for group in placement.layer.groups}
    for placed in placement.placed:
        counts[placed.block.group].add((placed.start, placed.end))
    return f"pipeline-{placement.batch_tokens}-" + "-".join(str(len(ranges)) for ranges in counts.values())


def slowdowns(result: Stage2Result) -> dict[Resource, float]:
    """How much longer than alone each resource's operations take in a Stage II answer."""
    alone = dict.fromkeys(Resource, 0.0)
    beside = dict.fromkeys(Resource, 0.0)
    problem = Stage2Problem(result.placement)
    for index, placed in enumerate(result.placement.placed):
        alone[placed.block.resource] += problem.alone_us(index)
        beside[placed.block.resource] += placed.end_us - placed.begin_us
    return {resource: beside[resource] / alone[resource] for resource in Resource if alone[resource] > 0}
