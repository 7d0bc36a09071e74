"""`nanoflow tune`: measures schedules on this machine's GPU and writes the fastest of each batch for --schedules.

A batch is a size, a share of decodes and a mean context. Prints the candidates as they are measured, then a table, and
ends in one JSON line. Knows nothing of how schedules are run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autosearch.decode_beside import DecodeBeside
from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule, named_by_file
from autosearch.schedule_store import INDEX
from autosearch.specs import ModelSpec
from control_plane.bench.ablation_engine import bench_of, device_facts, is_cuda, load_for
from control_plane.config import EngineConfig
from control_plane.engine import device_of, single_rank_config
from control_plane.options import ConfigError
from control_plane.planning_options import say
from worker.cuda_limits import schedules_of
from worker.cuda_loading import LoadedModel
from worker.cuda_model import num_sms_of
from worker.schedule_bench import sequential_ways
from worker.steady_batch import SteadyMix, fill_pages
from worker.streams import LaneOrder
from worker.tuner import Effort, Tuned, tune

_EFFORT = Effort()


@dataclass(frozen=True, slots=True)
class Batches:
    """What is measured: every size with every share and context."""

    sizes: tuple[int, ...]
    decode_shares: tuple[float, ...]
    mean_contexts: tuple[int, ...]
    prompt_len: int
    num_decodes: tuple[int, ...] = ()  # instead of shares, where they are no more than the rows

    def mixes(self) -> Iterator[SteadyMix]:
        """Raises ConfigError for numbers that no batch has."""
        if not all(0 < share <= 1 for share in self.decode_shares) or min(*self.sizes, *self.mean_contexts) < 1:
            raise ConfigError("batch sizes and contexts must be at least 1, decode shares between 0 and 1")
        for size in self.sizes:
            shares = [round(share * size) for share in self.decode_shares]
            for decodes in [count for count in self.num_decodes if 0 < count <= size] if self.num_decodes else shares:
                for context in self.mean_contexts:
                    yield SteadyMix(size, decodes, context, self.prompt_len)


def run(
    engine: EngineConfig, batches: Batches, out: Path, proposed: Sequence[Path] = (), effort: Effort = _EFFORT
) -> dict[str, Any]:
    """Measure and write; what was found, also printed as one JSON line.

    proposed: schedules to measure beside the built-in family. Raises ConfigError, and what the worker raises for a
    model that it cannot load.
    """
    mixes, began = list(batches.mixes()), time.perf_counter()
    _check_candidates(engine, proposed, batches.sizes)
    loaded = load_for(engine, batches.sizes)
    gpu = device_facts(is_cuda(loaded))["device"]
    fill_pages(loaded.cache)
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for mix in mixes:
        say(f"batch of {mix.rows} rows, {mix.num_decodes} of them decodes with {mix.mean_context} tokens each")
        tuned = _tune_one(loaded, mix, list(_read(proposed, mix.rows)), effort)
        name = f"measured-{mix.rows}-{mix.num_decodes}-{mix.mean_context}"
        best = replace(tuned.best, name=name, model=engine.model.resolve().name, gpu=gpu)
        (out / f"{name}.json").write_text(best.to_json() + "\n", encoding="utf-8")
        found.append(_report(mix, tuned))
        _show(tuned)
    result = {
        "command": "tune",
        "model": engine.model.resolve().name,
        "gpu": gpu,
        "out": str(out),
        "seconds": round(time.perf_counter() - began, 1),
        "batches": found,
    }
    print(json.dumps(result), flush=True)
    return result


def _tune_one(loaded: LoadedModel, mix: SteadyMix, proposed: list[PipelineSchedule], effort: Effort) -> Tuned:
    operators = layer_operators(loaded.spec)
    family = DecodeBeside(operators, mix.rows, mix.num_decodes, loaded.model.num_sms)
    return tune(
        bench_of(loaded, mix),
        sequential_ways(loaded.model, mix.rows),
        family,
        proposed,
        mix.workload,
        loaded.spec.num_layers,
        effort,
        say,
    )


def _check_candidates(engine: EngineConfig, proposed: Sequence[Path], sizes: Sequence[int]) -> None:
    """Before anything is loaded. Raises ConfigError, InvalidScheduleError or PartitionError for what cannot run."""
    config = single_rank_config(engine)
    spec = ModelSpec.from_folder(config.model_dir)
    operators, num_sms = layer_operators(spec), num_sms_of(torch.device(config.device))
    for rows in dict.fromkeys(sizes):
        candidates = tuple(_read(proposed, rows))
        schedules_of(replace(config, schedules=candidates, nano_batches=1), spec)
        for schedule in candidates:
            LaneOrder(schedule, operators, num_sms)


def _read(proposed: Sequence[Path], rows: int) -> Iterator[PipelineSchedule]:
    """Schedules of this batch size; folders are searched. Raises ConfigError."""
    names: set[str] = set()
    for path in proposed:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        for file in files:
            if file.name == INDEX:
                continue
            try:
                schedule = named_by_file(file)
            except (OSError, InvalidScheduleError) as error:
                raise ConfigError(f"candidates={file}: {error}") from None
            if schedule.batch_tokens == rows:
                if schedule.name in names:
                    raise ConfigError(f"candidates={file}: two candidates are named {schedule.name}: rename one file")
                names.add(schedule.name)
                yield schedule


def _report(mix: SteadyMix, tuned: Tuned) -> dict[str, Any]:
    return {
        **asdict(mix),
        "best": tuned.finalists[0].schedule.name,
        "gain": round(tuned.gain, 4),
        "finalists": {
            one.schedule.name: {"ms": [round(ms, 3) for ms in one.ms], "joules": round(one.joules, 3)}
            for one in tuned.finalists
        },
        "screened": {name: round(ms, 3) for name, ms in tuned.screened},
    }


def _show(tuned: Tuned) -> None:
    baseline = tuned.sequential.median_ms
    say(f"  {'finalist':<44}{'least':>9}{'median':>9}{'most':>9} ms {'gain':>7}{'joules':>9}")
    for one in tuned.finalists:
        times = f"{min(one.ms):>9.2f}{one.median_ms:>9.2f}{max(one.ms):>9.2f}"
        say(f"  {one.schedule.name:<44}{times}    {baseline / one.median_ms:>7.3f}{one.joules:>9.2f}")


def check(engine: EngineConfig) -> None:
    """Raises ConfigError where there is nothing to measure."""
    if device_of(engine) != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA GPU here, and schedules are measured for a GPU: `nanoflow doctor` says more"
        )
