"""What one GPU can run, decided before anything is loaded, on a machine that need not have one: refusals, batch sizes.

Knows nothing of memory, or of how anything is run.
"""

from __future__ import annotations

import torch

from autosearch.operators import layer_operators
from autosearch.pipeline import PipelineSchedule, nanobatch_only
from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.cuda_layers import unsupported, why_not_folded
from worker.cuda_model import NO_PREFILL_ROWS, check_schedule
from worker.executor import CapacityError

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KEY_TILE = 64  # keys that attention kernels read at once, from one page where pages hold as many
_MAX_ROWS = 1 << 20  # of a batch: no GPU has memory for more, and sizes far beyond overflow
_MAX_TABLE_CELLS = 2**31 - 1  # a place in the page table is an int32 on its way to the GPU


def check(config: WorkerConfig, spec: ModelSpec) -> None:
    """Raises CapacityError for what cannot run on a GPU, whether there is one here or not."""
    if (reason := unsupported(spec)) or config.tensor_parallel_size != 1:
        raise CapacityError(reason or "--tensor-parallel-size above 1 is not supported on GPUs yet")
    if config.max_batch_tokens > _MAX_ROWS:
        raise CapacityError(
            f"--max-num-batched-tokens {config.max_batch_tokens} is not supported on a GPU: {_MAX_ROWS} at most"
        )
    known = [name for name, dtype in DTYPES.items() if config.device == "cpu" or dtype != torch.float32]
    if config.dtype not in known:
        raise CapacityError(f"dtype {config.dtype!r} is not supported on a GPU: use one of {', '.join(known)}")
    schedules = schedules_of(config, spec)
    largest = max((schedule.batch_tokens for schedule in schedules), default=0)
    if largest > config.max_batch_tokens:
        raise CapacityError(
            f"a schedule is for {largest} rows: raise --max-num-batched-tokens from {config.max_batch_tokens}"
        )
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise CapacityError(f"max_model_len {config.max_model_len} is more than the model's {spec.max_position}")
    if config.page_size > _KEY_TILE and config.page_size % _KEY_TILE:
        raise CapacityError(
            f"--block-size {config.page_size} is not supported on a GPU: at most {_KEY_TILE}, or a multiple of it"
        )
    cells = config.max_slots * -(-(config.max_model_len or spec.max_position) // config.page_size)
    if cells > _MAX_TABLE_CELLS:
        raise CapacityError(
            f"--max-num-seqs {config.max_slots} makes a page table of {cells} entries, {_MAX_TABLE_CELLS} at most are "
            "possible on a GPU: lower it or --max-model-len, or raise --block-size"
        )


def schedules_of(config: WorkerConfig, spec: ModelSpec) -> tuple[PipelineSchedule, ...]:
    """The schedules to hold beside the sequential ones. Raises InvalidScheduleError."""
    operators = layer_operators(spec)
    schedules = list(config.schedules)
    if config.nano_batches > 1:
        rows = [size for size in batch_sizes_of(config.max_batch_tokens) if size > NO_PREFILL_ROWS]
        schedules += [nanobatch_only(operators, size, config.nano_batches) for size in rows]
    for schedule in schedules:
        check_schedule(schedule, operators, why_not_folded(spec, DTYPES[config.dtype]))
    return tuple(schedules)


def can_fold(config: WorkerConfig, spec: ModelSpec) -> bool:
    """As CudaModel.can_fold, before anything is loaded."""
    return not why_not_folded(spec, DTYPES[config.dtype])


def batch_sizes_of(max_batch_tokens: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: powers of two, multiples of 128 from there on, wider steps above 4,096.

    A batch is padded to the next one: what that costs is rows of GEMMs, what one more costs is a graph's memory.
    """
    if max_batch_tokens < 1:
        raise CapacityError("max_batch_tokens must be at least 1")
    sizes = [1 << power for power in range(7)] + list(range(128, 2049, 128))
    while sizes[-1] < max_batch_tokens:
        sizes.append(sizes[-1] + max(128, 1 << (sizes[-1].bit_length() - 5)))
    return (*(size for size in sizes if size < max_batch_tokens), max_batch_tokens)
