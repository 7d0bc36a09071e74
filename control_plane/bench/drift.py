"""`bench drift`: the measured choice of a schedule beside the best fixed plan, while the share of decodes drifts.

On one steady batch for each part of the drift (quick), or on a trace that is served. Tables on stderr, one JSON line at
the end. Knows nothing of how schedules are found, chosen or run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autosearch.pipeline import PipelineSchedule
from control_plane.bench.ablation_engine import (
    bench_of,
    device_facts,
    is_cuda,
    load_largest,
    room,
    setting,
    tuned_schedules,
)
from control_plane.bench.ablation_steady import MeteredBench, words
from control_plane.bench.drift_plan import Part, fixed_plans, forced
from control_plane.bench.drift_served import CHOICE, DriftTrace, part_result
from control_plane.bench.drift_table import LIMIT, PartResult, summary, table
from control_plane.bench.gpu_meter import GpuMeter, gemm_rate
from control_plane.bench.throughput import run_until_done
from control_plane.config import EngineConfig
from control_plane.engine import make_loop, single_rank_config
from control_plane.options import ConfigError
from control_plane.planning_options import say
from control_plane.progress import ProgressLine
from scheduler.ports import Executor
from worker.backend import open_executor
from worker.cuda_executor import CudaExecutor
from worker.schedule_bench import sequential_ways
from worker.schedule_choice import ScheduleChoice
from worker.steady_batch import SteadyMix, fill_pages
from worker.tuner import Effort

OpenExecutor = Callable[..., Executor]  # as worker.backend.open_executor
Found = tuple[list[PartResult], dict[str, Any]]  # of each part, and what it ran on
_EFFORT = Effort()


@dataclass(frozen=True, slots=True)
class Options:
    """Which drift, and for how long each plan is measured."""

    shares: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # of decodes, a part each, in this order
    request_tokens: int = 512  # mean tokens of a request, prompt and output together
    served: bool = False  # requests through scheduler and engine, instead of a steady batch for each part
    effort: Effort = _EFFORT


def run(engine: EngineConfig, options: Options, opened: OpenExecutor = open_executor) -> dict[str, Any]:
    """Load once, measure all parts; what was found, also printed as one JSON line.

    Raises ConfigError for what does not fit, and what the worker raises for a model that it cannot load.
    """
    began = time.perf_counter()
    parts = [Part.of(share, options.request_tokens) for share in options.shares]
    if not parts or len({part.name for part in parts}) < len(parts) or options.effort.num_repeats < 1:
        raise ConfigError("a drift has at least one share, each once in whole percents, and one repeat")
    if engine.schedules is None:
        raise ConfigError("schedules: the choice is among the schedules of a folder; `nanoflow tune` makes them")
    engine = replace(engine, enable_prefix_caching=False, kv_store=None)
    if options.served:
        results, on = _served(engine, parts, options.effort, opened)
    else:
        results, on = _steady(engine, parts, options.effort)
    say("\n".join(summary(results)))
    found = {
        "benchmark": "drift",
        "of": "a served trace" if options.served else "steady iterations",
        **setting(engine),
        "request_tokens": options.request_tokens,
        "num_repeats": options.effort.num_repeats,
        **on,
        "seconds": round(time.perf_counter() - began, 1),
        "limit": LIMIT,
        "worst_behind": round(max(result.behind for result in results), 4),
        "is_within": all(result.is_within for result in results),
        "parts": [result.to_json() for result in results],
    }
    print(json.dumps(found), flush=True)
    return found


def _steady(engine: EngineConfig, parts: Sequence[Part], effort: Effort) -> Found:
    tuned = tuned_schedules(engine)
    loaded = load_largest(engine)
    rows = single_rank_config(engine).max_batch_tokens
    plans = fixed_plans(sequential_ways(loaded.model, rows)[0], tuned)
    mixes = [part.full_mix(rows, *room(loaded.capacity)) for part in parts]
    fill_pages(loaded.cache)
    results = []
    for part, mix in zip(parts, mixes):
        say(f"part {part.name}: {words(mix)}")
        bench = MeteredBench(bench_of(loaded, mix), GpuMeter if is_cuda(loaded) else None)
        results.append(_steady_part(part, mix, bench, plans, tuned, effort))
        say("\n".join(table(results[-1])))
    return results, device_facts(is_cuda(loaded))


def _steady_part(
    part: Part,
    mix: SteadyMix,
    bench: MeteredBench,
    plans: Sequence[PipelineSchedule],
    tuned: Sequence[PipelineSchedule],
    effort: Effort,
) -> PartResult:
    """What is chosen for one batch is one of the plans, the same graph: it is not measured twice."""
    fixed = tuple(bench.row("fixed", measured) for measured in bench.in_turns(plans, effort, say))
    choice = ScheduleChoice(tuned).choose(mix.rows, mix.num_decodes, mix.num_decodes * mix.mean_context)
    chosen = next((schedule for schedule in tuned if schedule.name == choice.name), plans[0])
    index = [plan.what_runs for plan in plans].index(chosen.what_runs)
    return PartResult(
        part.name,
        words(mix),
        mix.num_decodes / mix.rows,
        replace(fixed[index], name=CHOICE),
        fixed,
        float(index > 0),
        float(not choice.is_known),
    )


def _served(engine: EngineConfig, parts: Sequence[Part], effort: Effort, opened: OpenExecutor) -> Found:
    tuned = tuned_schedules(engine)
    executor = _open_with(tuned, engine, opened)
    try:
        if not isinstance(executor, CudaExecutor):
            raise ConfigError("a trace is served on GPUs: leave --served out")
        capacity = executor.capacity
        rows, longest = capacity.max_batch_tokens, max(part.longest for part in parts)
        if longest > capacity.max_model_len:
            raise ConfigError(
                f"requests of {longest} tokens do not fit {capacity.max_model_len}: lower --request-tokens"
            )
        mixes = [part.full_mix(rows, *room(capacity)) for part in parts]
        plans = fixed_plans(sequential_ways(executor.model, rows)[0], tuned)
        choices: dict[str, ScheduleChoice | None] = {CHOICE: ScheduleChoice(tuned), plans[0].name: None}
        choices |= {plan.name: ScheduleChoice([forced(plan)]) for plan in plans[1:]}
        if executor.is_cuda:
            gemm_rate(executor.spec, executor.dtype)  # the card is warm
        meter = GpuMeter if executor.is_cuda else None
        trace = DriftTrace(
            parts,
            choices,
            executor.use_choice,
            rows=rows,
            vocab_size=executor.spec.vocab_size,
            effort=effort,
            meter=meter,
            say=say,
        )
        loop = make_loop(engine, executor, trace)
        trace.begin(loop.submit)
        run_until_done(loop, trace)
    finally:
        executor.close()
    names = [plan.name for plan in plans]
    results = [part_result(part, words(mix), trace.turns[part.name], names) for part, mix in zip(parts, mixes)]
    for result in results:
        say("\n".join(table(result)))
    return results, device_facts(executor.is_cuda)


def _open_with(tuned: Sequence[PipelineSchedule], engine: EngineConfig, opened: OpenExecutor) -> Executor:
    """An engine that can run each of them, whatever it was measured for."""
    line = ProgressLine()
    try:
        config = replace(single_rank_config(engine), nano_batches=1, schedules=tuple(map(forced, tuned)))
        return opened(config, progress=line.share)
    finally:
        line.done()
