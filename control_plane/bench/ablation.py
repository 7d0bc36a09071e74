"""`bench ablation`: what nano-batches cost and what overlapping them gains, over the best sequential engine.

On steady iterations (quick), or on whole runs. Tables on stderr, one JSON line at the end. Knows nothing of how
schedules are found or run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosearch.layer_trace import Peaks
from autosearch.operators import layer_operators
from control_plane.bench import ablation_runs
from control_plane.bench.ablation_engine import (
    bench_of,
    device_facts,
    is_cuda,
    load_largest,
    room,
    setting,
    tuned_schedules,
)
from control_plane.bench.ablation_plan import Load
from control_plane.bench.ablation_plot import save_bars, title_of
from control_plane.bench.ablation_steady import Ablation, MeteredBench, SteadyOptions
from control_plane.bench.ablation_table import LoadResult, table
from control_plane.bench.ablation_traces import Tracer
from control_plane.bench.gpu_meter import GpuMeter, gemm_rate
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from control_plane.options import ConfigError
from control_plane.planning_options import say
from control_plane.progress import ProgressLine
from scheduler.ports import Executor
from worker.backend import open_executor
from worker.cuda_executor import CudaExecutor
from worker.cuda_loading import LoadedModel
from worker.power_meter import NvmlCard
from worker.steady_batch import fill_pages

OpenExecutor = Callable[..., Executor]  # as worker.backend.open_executor
_STEADY = SteadyOptions()


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared, and where pictures go."""

    loads: tuple[Load, ...]
    steady: SteadyOptions = _STEADY
    whole_runs: bool = False
    num_repeats: int = 4  # of each mode, half of them on the way back
    plot: Path | None = None
    traces: Path | None = None  # folder for a layer's trace of each load and mode


def run(engine: EngineConfig, options: Options, opened: OpenExecutor = open_executor) -> dict[str, Any]:
    """Load once, measure all loads; what was found, also printed as one JSON line.

    Raises ConfigError for what does not fit, and what the worker raises for a model that it cannot load.
    """
    began = time.perf_counter()
    if options.num_repeats < 1 or not options.loads:
        raise ConfigError("an ablation has at least one load and one repeat")
    engine = replace(engine, enable_prefix_caching=False, kv_store=None)
    results, on = _whole_runs(engine, options, opened) if options.whole_runs else _steady(engine, options)
    found = {
        "benchmark": "ablation",
        "of": "whole runs" if options.whole_runs else "steady iterations",
        **setting(engine),
        "num_repeats": options.num_repeats,
        **on,
        "seconds": round(time.perf_counter() - began, 1),
        "loads": [result.to_json() for result in results],
    }
    print(json.dumps(found), flush=True)
    if options.plot is not None:
        save_bars(results, options.plot, title_of(found))
    return found


def _steady(engine: EngineConfig, options: Options) -> tuple[list[LoadResult], dict[str, Any]]:
    tuned = None if engine.schedules is None else tuned_schedules(engine)
    loaded = load_largest(engine)
    cuda, rows = is_cuda(loaded), single_rank_config(engine).max_batch_tokens
    mixes = [load.steady_mix(rows, *room(loaded.capacity)) for load in options.loads]
    benches = [bench_of(loaded, mix) for mix in mixes]
    options.steady.check(loaded.model.num_sms)
    on = device_facts(cuda)
    fill_pages(loaded.cache)
    tracer = _tracer(engine, options, loaded, on["device"])
    steady = replace(options.steady, effort=replace(options.steady.effort, num_repeats=options.num_repeats))
    results = []
    for load, mix, bench in zip(options.loads, mixes, benches):
        say(f"load {load.name}: {mix.rows} rows, {mix.num_decodes} decodes of {mix.mean_context} KV tokens")
        metered = MeteredBench(bench, GpuMeter if cuda else None)
        model, operators = loaded.model, layer_operators(loaded.spec)
        ablation = Ablation(metered, operators, mix, model.num_sms, model.can_fold, steady, say)
        result, schedules = ablation.run(load.name, tuned)
        say("\n".join(table(result)))
        results.append(result)
        if tracer is not None:
            tracer.write(bench, bench.plan, result, schedules)
    return results, on


def _tracer(engine: EngineConfig, options: Options, loaded: LoadedModel, device: str) -> Tracer | None:
    if options.traces is None:
        return None
    options.traces.mkdir(parents=True, exist_ok=True)
    peaks = Peaks(0.0, 0.0)  # nothing is known of a CPU
    if is_cuda(loaded):
        peaks = Peaks(gemm_rate(loaded.spec, loaded.dtype), NvmlCard().memory_bytes_per_s())
    return Tracer(options.traces, loaded.spec, engine.model.resolve().name, device, peaks, say)


def _whole_runs(
    engine: EngineConfig, options: Options, opened: OpenExecutor
) -> tuple[list[LoadResult], dict[str, Any]]:
    line = ProgressLine()
    prepared = ablation_runs.prepare(engine, options.steady.nano_batches[0])
    executor = opened(prepared.config, progress=line.share)
    line.done()
    try:
        if not isinstance(executor, CudaExecutor):
            raise ConfigError("whole runs are for GPUs: leave --whole-runs out")
        on = device_facts(executor.is_cuda)
        if executor.is_cuda:
            gemm_rate(executor.spec, executor.dtype)  # the card is as warm for the first run as for the last
        repeats, results = options.num_repeats, []
        for load in options.loads:
            results.append(ablation_runs.run_load(engine, executor, load, prepared, repeats, say))
            say("\n".join(table(results[-1])))
    finally:
        executor.close()
    return results, on
