"""Which code runs a rank on which kind of device: the one place that knows both.

Knows nothing of Ray, plans or clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosearch.specs import ModelSpec
from worker import cuda_limits
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.executor import LocalExecutor, Worker
from worker.memory_need import check_memory
from worker.rank_executor import RankExecutor
from worker.store_client import open_store
from worker.store_keys import page_identities
from worker.store_prefixes import StorePrefixes
from worker.weights import Progress


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a configuration allows at most. How much of it fits is known when it is loaded: `Executor.capacity`."""

    max_model_len: int
    max_batch_tokens: int


def check(config: WorkerConfig, rank: int = 0) -> Bounds:
    """Refuse what cannot run, before anything is loaded and on a machine that need not have the device.

    Raises UnsupportedModelError, ShardingError or CapacityError, and StoreError for files that the KV store wants.
    """
    if config.kv_store is not None:
        open_store(config).close()
    if config.device == "cuda":
        spec = ModelSpec.from_folder(config.model_dir)
        cuda_limits.check(config, spec)
        return Bounds(min(config.max_model_len or spec.max_position, spec.max_position), config.max_batch_tokens)
    capacity = Worker(config, rank).capacity
    return Bounds(capacity.max_model_len, capacity.max_batch_tokens)


def check_memory_here(config: WorkerConfig) -> None:
    """Raises CapacityError where all ranks together would take more memory than this machine has left."""
    if config.device != "cuda":
        worker = Worker(config)
        check_memory(config, worker.spec, worker.capacity)


def open_prefix_store(config: WorkerConfig) -> StorePrefixes:
    """What the scheduler asks of the KV store that the configuration names."""
    return StorePrefixes(open_store(config), page_identities(config))


def open_executor(
    config: WorkerConfig, rank: int = 0, progress: Progress = lambda what, share: None, rendezvous: str = ""
) -> RankExecutor:
    """Load one rank, which joins the others at `rendezvous`; plans may be submitted at once.

    Raises what check() does, and ModelLoadError.
    """
    if config.device == "cuda":
        return CudaExecutor(config, progress)
    if config.tensor_parallel_size == 1:  # other ranks may be filling the memory already
        check_memory_here(config)
    worker = Worker(config, rank)
    worker.load(progress, rendezvous)
    return LocalExecutor(worker)
