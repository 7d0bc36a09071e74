"""The ablation on whole runs: all requests of a load submitted at once, fill and drain included, mode after mode.

The model is loaded once, with the schedules of all modes; between two runs the engine is only told by which of them to
choose. Turns go there and back (A B B A). Knows nothing of steady iterations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from control_plane.bench.ablation_plan import Load, Mode, in_turns
from control_plane.bench.ablation_table import LoadResult, Row
from control_plane.bench.gpu_meter import GpuMeter
from control_plane.bench.record import Record
from control_plane.bench.throughput import play
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from control_plane.options import ConfigError
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_limits import can_fold, schedules_of
from worker.folded_norms import fold_norms
from worker.schedule_choice import ScheduleChoice

Meter = Callable[[], GpuMeter]


@dataclass(frozen=True, slots=True)
class Played:
    """One run."""

    tokens_per_s: float
    num_steps: int
    num_overlapped: int  # iterations that ran by a schedule other than the sequential one
    watts: float | None
    sm_mhz: float | None
    joules_per_token: float | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The schedules of all modes, and how to load an engine that has them."""

    config: WorkerConfig
    tuned: tuple[PipelineSchedule, ...]
    nano_batches: tuple[PipelineSchedule, ...]  # of every batch size that is large enough
    nano_batches_folded: tuple[PipelineSchedule, ...]  # of the same sizes, with folded norms; empty where none can be

    def choices(self, folds: Callable[[int], bool]) -> dict[Mode, ScheduleChoice | None]:
        """By what each mode chooses; folds: whether a batch size's sequential schedule has folded norms."""
        pairs = zip(self.nano_batches, self.nano_batches_folded or self.nano_batches)
        like_sequential = [folded if folds(plain.batch_tokens) else plain for plain, folded in pairs]
        return {
            Mode.NON_OVERLAP: None,
            Mode.NANO_BATCH: ScheduleChoice(like_sequential),
            Mode.OVERLAP: ScheduleChoice(self.tuned),
        }


def prepare(engine: EngineConfig, num_nano_batches: int) -> Prepared:
    """Raises ConfigError without schedules of the user's, InvalidScheduleError for those that cannot run."""
    if engine.schedules is None:
        raise ConfigError("schedules: whole runs compare the schedules of a folder; `nanoflow tune` makes them")
    config = single_rank_config(replace(engine, nano_batches=num_nano_batches))
    spec = ModelSpec.from_folder(config.model_dir)
    tuned = schedules_of(replace(config, nano_batches=1), spec)
    nano_batches = schedules_of(replace(config, schedules=()), spec)
    nano_batches_folded = tuple(map(fold_norms, nano_batches)) if can_fold(config, spec) else ()
    config = replace(config, schedules=(*config.schedules, *nano_batches_folded))
    return Prepared(config, tuned, nano_batches, nano_batches_folded)


def run_load(
    engine: EngineConfig,
    executor: CudaExecutor,
    load: Load,
    prepared: Prepared,
    num_repeats: int,
    say: Callable[[str], None],
) -> LoadResult:
    """All modes in turns on an engine that was loaded with their schedules."""
    model = executor.model
    meter = GpuMeter if executor.is_cuda else None
    by_mode = prepared.choices(lambda rows: model.sequential_key(rows, True).folded)
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
