"""`bench ablation`: what nano-batches cost and what overlapping them gains, over the best sequential engine.

On steady iterations (quick), or on whole runs. Tables on stderr, one JSON line at the end. Knows nothing of how
schedules are found or run.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autosearch.layer_trace import Peaks
from autosearch.operators import layer_operators
from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from control_plane.bench import ablation_runs
from control_plane.bench.ablation_plan import Load
from control_plane.bench.ablation_plot import save_bars, title_of
from control_plane.bench.ablation_steady import Ablation, MeteredBench, SteadyOptions
from control_plane.bench.ablation_table import LoadResult, table
from control_plane.bench.ablation_traces import Tracer
from control_plane.bench.gpu_meter import GpuMeter, gemm_rate
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from scheduler.plan import EngineCapacity, IterationPlan
from scheduler.ports import Executor
from worker.backend import open_executor
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_loading import LoadedModel, load_model, schedules_of
from worker.power_meter import NvmlCard
from worker.schedule_bench import ScheduleBench
from worker.steady_batch import SteadyBatchError, SteadyMix, fill_pages, steady_plan

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
        "model": engine.model.resolve().name,
        "load_format": engine.load_format,
        "schedules": None if engine.schedules is None else str(engine.schedules),
        "num_repeats": options.num_repeats,
        **on,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - began, 1),
        "loads": [result.to_json() for result in results],
    }
    print(json.dumps(found), flush=True)
    if options.plot is not None:
        save_bars(results, options.plot, title_of(found))
    return found


def _steady(engine: EngineConfig, options: Options) -> tuple[list[LoadResult], dict[str, Any]]:
    config = replace(single_rank_config(engine), schedules=(), nano_batches=1)
    tuned = None if engine.schedules is None else _tuned(engine)
    loaded = _load(config)
    cuda, capacity = loaded.model.view.block.is_cuda, loaded.capacity
    mixes = [load.steady_mix(config.max_batch_tokens, *_room(capacity)) for load in options.loads]
    plans = [_plan(loaded, mix) for mix in mixes]
    options.steady.check(loaded.model.num_sms)
    on = _device(cuda)
    fill_pages(loaded.cache)
    tracer = _tracer(engine, options, loaded, on["device"])
    steady = replace(options.steady, effort=replace(options.steady.effort, num_repeats=options.num_repeats))
    results = []
    for load, mix, plan in zip(options.loads, mixes, plans):
        _say(f"load {load.name}: {mix.rows} rows, {mix.num_decodes} decodes of {mix.mean_context} KV tokens")
        bench = ScheduleBench(loaded.model, plan, NvmlCard().joules if cuda else lambda: 0.0)
        metered = MeteredBench(bench, GpuMeter if cuda else None)
        ablation = Ablation(metered, layer_operators(loaded.spec), mix, loaded.model.num_sms, steady, _say)
        result, schedules = ablation.run(load.name, tuned)
        _say("\n".join(table(result)))
        results.append(result)
        if tracer is not None:
            tracer.write(bench, plan, result, schedules)
    return results, on


def _load(config: WorkerConfig) -> LoadedModel:
    line = ProgressLine()
    try:
        return load_model(config, line.share, [config.max_batch_tokens])
    finally:
        line.done()


def _tuned(engine: EngineConfig) -> tuple[PipelineSchedule, ...]:
    config = replace(single_rank_config(engine), nano_batches=1)
    return schedules_of(config, ModelSpec.from_folder(config.model_dir))


def _plan(loaded: LoadedModel, mix: SteadyMix) -> IterationPlan:
    num_pages, vocab_size = loaded.capacity.num_pages, loaded.spec.vocab_size
    try:
        return steady_plan(loaded.limits, mix, num_pages=num_pages, vocab_size=vocab_size)
    except SteadyBatchError as error:
        raise ConfigError(str(error)) from None


def _room(capacity: EngineCapacity) -> tuple[int, int, int]:
    return capacity.max_slots, capacity.num_pages, capacity.page_size


def _tracer(engine: EngineConfig, options: Options, loaded: LoadedModel, device: str) -> Tracer | None:
    if options.traces is None:
        return None
    options.traces.mkdir(parents=True, exist_ok=True)
    peaks = Peaks(0.0, 0.0)  # nothing is known of a CPU
    if loaded.model.view.block.is_cuda:
        peaks = Peaks(gemm_rate(loaded.spec, loaded.dtype), NvmlCard().memory_bytes_per_s())
    return Tracer(options.traces, loaded.spec, engine.model.resolve().name, device, peaks, _say)


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
        on = _device(executor.is_cuda)
        if executor.is_cuda:
            gemm_rate(executor.spec, executor.dtype)  # the card is as warm for the first run as for the last
        effort, repeats, results = options.steady.sweep_effort, options.num_repeats, []
        for load in options.loads:
            results.append(ablation_runs.run_load(engine, executor, load, prepared, repeats, effort, _say))
            _say("\n".join(table(results[-1])))
    finally:
        executor.close()
    return results, on


def _device(cuda: bool) -> dict[str, Any]:
    if not cuda:
        return {"device": "cpu", "driver": None}
    return {"device": torch.cuda.get_device_name(), "driver": NvmlCard().driver()}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
