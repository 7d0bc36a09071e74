"""What the benchmarks of schedules share: the model, steady batches on it, the user's schedules, the setting.

Knows nothing of what they compare.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from scheduler.plan import EngineCapacity
from worker.cuda_limits import schedules_of
from worker.cuda_loading import LoadedModel, load_model
from worker.power_meter import NvmlCard
from worker.schedule_bench import ScheduleBench
from worker.steady_batch import SteadyBatchError, SteadyMix, steady_plan


def load_largest(engine: EngineConfig) -> LoadedModel:
    """The model for full batches alone."""
    return load_for(engine, [single_rank_config(engine).max_batch_tokens])


def load_for(engine: EngineConfig, sizes: Sequence[int]) -> LoadedModel:
    """The model for batches of these sizes alone, without schedules: benches bring theirs."""
    config = replace(single_rank_config(engine), max_batch_tokens=max(sizes), schedules=(), nano_batches=1)
    line = ProgressLine()
    try:
        return load_model(config, line.share, sorted(set(sizes)))
    finally:
        line.done()


def tuned_schedules(engine: EngineConfig) -> tuple[PipelineSchedule, ...]:
    """The user's, as serving reads them. Raises InvalidScheduleError."""
    config = replace(single_rank_config(engine), nano_batches=1)
    return schedules_of(config, ModelSpec.from_folder(config.model_dir))


def bench_of(loaded: LoadedModel, mix: SteadyMix) -> ScheduleBench:
    """Of one steady batch. Raises ConfigError where it does not fit."""
    num_pages, vocab_size = loaded.capacity.num_pages, loaded.spec.vocab_size
    try:
        plan = steady_plan(loaded.limits, mix, num_pages=num_pages, vocab_size=vocab_size)
    except SteadyBatchError as error:
        raise ConfigError(str(error)) from None
    return ScheduleBench(loaded.model, plan, NvmlCard().joules if is_cuda(loaded) else lambda: 0.0)


def is_cuda(loaded: LoadedModel) -> bool:
    """False where the reference kernels stand in for a GPU's, for tests."""
    return loaded.model.view.block.is_cuda


def room(capacity: EngineCapacity) -> tuple[int, int, int]:
    """Slots, pages and the tokens of a page."""
    return capacity.max_slots, capacity.num_pages, capacity.page_size


def device_facts(cuda: bool) -> dict[str, Any]:
    """What it ran on."""
    if not cuda:
        return {"device": "cpu", "driver": None}
    return {"device": torch.cuda.get_device_name(), "driver": NvmlCard().driver()}


def setting(engine: EngineConfig) -> dict[str, Any]:
    """What it ran, and with which versions."""
    return {
        "model": engine.model.resolve().name,
        "load_format": engine.load_format,
        "schedules": None if engine.schedules is None else str(engine.schedules),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
