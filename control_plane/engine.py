"""From the user's options to an engine: the configs of its parts, and the engine in this process.

Knows nothing of Ray, transport or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from autosearch.pipeline import PipelineSchedule
from autosearch.schedule_store import StoreError, read_folder
from autosearch.specs import ModelSpec
from control_plane.config import EngineConfig
from control_plane.instance import LocalInstance
from control_plane.model_info import ModelInfo
from control_plane.options import ConfigError
from scheduler.loop import EngineLoop
from scheduler.plan import OutputBatch
from scheduler.ports import Executor
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig, WritePolicy
from worker.backend import open_executor, open_prefix_store
from worker.config import DEVICE_DEFAULTS, StoreAccess, WorkerConfig
from worker.rank_executor import RankExecutor

Progress = Callable[[str, float], None]  # a step, and how much of it is done


def device_of(engine: EngineConfig) -> str:
    """cpu or cuda; `auto` is a GPU where this machine has one."""
    if engine.device != "auto":
        return engine.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(engine: EngineConfig) -> None:
    """For an instance on this machine. Raises ConfigError for a GPU where there is none."""
    if device_of(engine) == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: there is no CUDA GPU here: `nanoflow doctor` says what is missing, or use cpu")


def worker_config(engine: EngineConfig) -> WorkerConfig:
    """What every rank needs."""
    device = device_of(engine)
    defaults = DEVICE_DEFAULTS[device]
    return WorkerConfig(
        model_dir=engine.model.resolve(),
        load_format=engine.load_format,
        dtype=engine.dtype,
        device=device,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_batch_tokens=_or(engine.max_num_batched_tokens, defaults.max_batch_tokens),
        max_slots=_or(engine.max_num_seqs, defaults.max_slots),
        max_model_len=engine.max_model_len,
        page_size=_or(engine.block_size, defaults.page_size),
        num_pages=engine.num_gpu_blocks_override,
        kv_cache_bytes=engine.kv_cache_memory_bytes,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_store=_store_address(engine),
        kv_store_access=StoreAccess(
            token_file=_absolute(engine.kv_store_token_file),
            tls_ca=_absolute(engine.kv_store_tls_ca),
            tls_cert=_absolute(engine.kv_store_tls_cert),
            tls_key=_absolute(engine.kv_store_tls_key),
        ),
        expected_input_len=engine.expected_input_len,
        expected_output_len=engine.expected_output_len,
        nano_batches=engine.nano_batches,
        max_schedules=engine.max_schedules,
        schedules=() if engine.schedules is None else read_schedules(engine.schedules),
        seed=engine.seed,
        num_threads=engine.num_threads,
    )


def read_schedules(folder: Path) -> tuple[PipelineSchedule, ...]:
    """All schedules of a folder. Raises ConfigError where it has none, or one that cannot be read."""
    try:
        return read_folder(folder)
    except StoreError as error:
        raise ConfigError(f"schedules={folder}: {error}") from None


def single_rank_config(engine: EngineConfig) -> WorkerConfig:
    """For an engine in one process. Raises ConfigError where more ranks are asked for."""
    if engine.tensor_parallel_size != 1:
        raise ConfigError("tensor-parallel-size must be 1 in one process; `nanoflow serve` runs several ranks")
    return replace(worker_config(engine), max_schedules=0)  # nobody exchanges them


def scheduler_config(engine: EngineConfig, max_waiting: int = 0) -> SchedulerConfig:
    """What the scheduler needs; it takes at least max_waiting requests, which the front end bounds."""
    target_itl_s = None if engine.target_itl_ms is None else 1e-3 * engine.target_itl_ms
    config = SchedulerConfig(
        enable_prefix_caching=engine.enable_prefix_caching,
        target_itl_s=target_itl_s,
        store=StoreConfig(
            policy=PrefetchPolicy(engine.kv_store_policy),
            timeout_s=engine.kv_store_timeout,
            write_policy=WritePolicy(engine.kv_store_write_policy),
        ),
    )
    return replace(config, max_waiting=max(config.max_waiting, max_waiting))


def model_info(engine: EngineConfig, name: str | None = None) -> ModelInfo:
    """Facts of the model from its folder, before anything heavy is started. Raises UnsupportedModelError."""
    return ModelInfo.from_folder(engine.model, ModelSpec.from_folder(engine.model), name)


def open_engine(engine: EngineConfig, progress: Progress) -> RankExecutor:
    """Load the model into this process.

    Raises ConfigError, and whatever the worker raises for a model that it cannot load.
    """
    return open_executor(single_rank_config(engine), progress=progress)


def make_loop(
    engine: EngineConfig, executor: Executor, emit: Callable[[OutputBatch], None], max_waiting: int = 0
) -> EngineLoop:
    """The loop over an executor, one iteration ahead."""
    worker = worker_config(engine)
    store = open_prefix_store(worker) if worker.kv_store else None
    scheduler = Scheduler(scheduler_config(engine, max_waiting), executor.capacity, store)
    return EngineLoop(scheduler, executor, emit, engine.step_timeout)


async def start_local_instance(engine: EngineConfig, progress: Progress) -> LocalInstance:
    """An instance in this process. Must be called on the asyncio loop that will use it. Raises as open_engine does."""
    executor = await asyncio.to_thread(open_engine, engine, progress)
    return LocalInstance(
        "local", executor.capacity, lambda emit: make_loop(engine, executor, emit), release=executor.close
    )


def _store_address(engine: EngineConfig) -> str | None:
    if engine.kv_store is None:
        return None
    if not engine.enable_prefix_caching:
        raise ConfigError("kv-store needs prefix caching: leave enable-prefix-caching on, or kv-store out")
    return engine.kv_store


def _absolute(path: Path | None) -> Path | None:
    """Ranks need not run in this folder."""
    return None if path is None else path.absolute()


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
