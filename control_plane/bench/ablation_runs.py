"""The ablation on whole runs: all requests of a load submitted at once, fill and drain included, mode after mode.

The model is loaded once, with the schedules of all modes; between two runs the engine is only told by which of them to
choose. Turns go there and back (A B B A). Knows nothing of steady iterations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosearch.specs import ModelSpec
from control_plane.bench.ablation_plan import Load, Mode, in_turns
from control_plane.bench.ablation_table import LoadResult, Row
from control_plane.bench.gpu_meter import GpuMeter
from control_plane.bench.record import Record
from control_plane.bench.throughput import play
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from worker.cuda_executor import CudaExecutor
from worker.cuda_loading import read_schedules
from worker.schedule_choice import ScheduleChoice

Choices = Mapping[Mode, ScheduleChoice | None]


@dataclass(frozen=True, slots=True)
class Played:
    """One run."""

    tokens_per_s: float
    num_steps: int
    num_overlapped: int  # iterations that ran by a schedule other than the sequential one
    watts: float | None
    sm_mhz: float | None
    joules_per_token: float | None


def choices(engine: EngineConfig) -> dict[Mode, ScheduleChoice | None]:
    """By what each mode chooses, of the schedules that such an engine loads. Raises InvalidScheduleError."""
    config = single_rank_config(engine)
    spec = ModelSpec.from_folder(config.model_dir)
    found: dict[Mode, ScheduleChoice | None] = {Mode.NON_OVERLAP: None}
    if config.nano_batches > 1:
        found[Mode.NANO_BATCH] = ScheduleChoice(read_schedules(replace(config, schedule_files=()), spec))
    if config.schedule_files:
        found[Mode.OVERLAP] = ScheduleChoice(read_schedules(replace(config, nano_batches=1), spec))
    return found


def run_load(
    engine: EngineConfig,
    executor: CudaExecutor,
    load: Load,
    by_mode: Choices,
    num_repeats: int,
    meter: Callable[[], GpuMeter] | None,
    say: Callable[[str], None],
) -> LoadResult:
    """All modes in turns on an engine that was loaded with their schedules."""
    played: dict[Mode, list[Played]] = {mode: [] for mode in by_mode}
    for mode in in_turns(list(by_mode), num_repeats):
        executor.use_choice(by_mode[mode])
        played[mode].append(_play(engine, executor, load, meter))
        say(f"  {load.name} {mode}: {played[mode][-1].tokens_per_s:.0f} tokens/s")
    rows = tuple(_row(mode, runs) for mode, runs in played.items())
    return LoadResult(load.name, str(load.workload), rows)


def _play(engine: EngineConfig, executor: CudaExecutor, load: Load, meter: Callable[[], GpuMeter] | None) -> Played:
    requests = load.workload.requests(executor.spec.vocab_size)
    record = Record(len(requests))
    submitted, power = play(engine, executor, record, requests, meter() if meter else None)
    lengths = load.workload.lengths()
    figures = record.figures(submitted, sum(prompt for prompt, _ in lengths), sum(output for _, output in lengths))
    return Played(
        figures["tokens_per_s"],
        figures["num_steps"],
        sum(stats.overlapped for _, stats in record.steps),
        power.get("watts"),
        power.get("sm_mhz"),
        power.get("joules_per_token"),
    )


def _row(mode: Mode, runs: list[Played]) -> Row:
    def median(name: str) -> Any:
        values = [getattr(run, name) for run in runs]
        return None if None in values else statistics.median(values)

    overlapped, steps = runs[0].num_overlapped, runs[0].num_steps
    what = (
        f"{overlapped} of {steps} iterations by the mode's schedules" if mode is not Mode.NON_OVERLAP else "sequential"
    )
    return Row(
        mode,
        what,
        tuple(run.tokens_per_s for run in runs),
        median("watts"),
        median("sm_mhz"),
        median("joules_per_token"),
    )
