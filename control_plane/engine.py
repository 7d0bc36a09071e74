"""From the user's options to an engine: the configs of its parts, and the in-process instance.

Knows nothing of Ray, transport or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from autosearch.specs import ModelSpec
from control_plane.config import EngineConfig
from control_plane.instance import LocalInstance
from control_plane.model_info import ModelInfo
from control_plane.options import ConfigError
from scheduler.loop import EngineLoop
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.executor import LocalExecutor, Worker

Progress = Callable[[str, float], None]  # a step, and how much of it is done


def worker_config(engine: EngineConfig) -> WorkerConfig:
    """What every rank needs."""
    return WorkerConfig(
        model_dir=engine.model.resolve(),
        load_format=engine.load_format,
        dtype=engine.dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_batch_tokens=engine.max_num_batched_tokens,
        max_slots=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        page_size=engine.block_size,
        num_pages=engine.num_gpu_blocks_override,
        kv_cache_bytes=engine.kv_cache_memory_bytes,
        nano_batches=engine.nano_batches,
        seed=engine.seed,
        num_threads=engine.num_threads,
    )


def single_rank_config(engine: EngineConfig) -> WorkerConfig:
    """For an engine in one process. Raises ConfigError where more ranks are asked for."""
    if engine.tensor_parallel_size != 1:
        raise ConfigError("tensor-parallel-size must be 1 in one process; `nanoflow serve` runs several ranks")
    return worker_config(engine)


def scheduler_config(engine: EngineConfig, max_waiting: int = 0) -> SchedulerConfig:
    """What the scheduler needs; it takes at least max_waiting requests, which the front end bounds."""
    config = SchedulerConfig(enable_prefix_caching=engine.enable_prefix_caching)
    return replace(config, max_waiting=max(config.max_waiting, max_waiting))


def model_info(engine: EngineConfig, name: str | None = None) -> ModelInfo:
    """Facts of the model from its folder, before anything heavy is started. Raises UnsupportedModelError."""
    return ModelInfo.from_folder(engine.model, ModelSpec.from_folder(engine.model), name)


async def start_local_instance(engine: EngineConfig, progress: Progress) -> LocalInstance:
    """Load the model into this process. Must be called on the asyncio loop that will use the instance.

    Raises ConfigError, and whatever the worker raises for a model that it cannot load.
    """
    worker = Worker(single_rank_config(engine))
    await asyncio.to_thread(worker.load, progress)
    executor = LocalExecutor(worker)
    scheduler = Scheduler(scheduler_config(engine), worker.capacity)
    return LocalInstance(
        "local",
        worker.capacity,
        lambda emit: EngineLoop(scheduler, executor, emit, engine.step_timeout),
        release=executor.close,
    )
