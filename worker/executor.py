"""One worker rank on a CPU, and the in-process executor: plans in, step results out.

A Worker loads its part of the model, fits the KV cache into memory and runs iteration plans one after the other.
LocalExecutor does that in a thread, so that the scheduler can plan the next iteration meanwhile. Knows nothing of
Ray, text or clients.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from autosearch.operators import layer_operators
from autosearch.pipeline import PipelineSchedule, nanobatch_only
from autosearch.specs import ModelSpec
from autosearch.workload import fitted_batch_tokens
from scheduler.plan import EngineCapacity, IterationPlan, ScheduleBucket, SlotFault, StepResult
from scheduler.ports import ExecutorError
from worker.batch_input import SampleRows, SlotTable, build_batch
from worker.config import CPU_KV_CACHE_BYTES, WorkerConfig
from worker.cpu_schedules import CpuSchedules
from worker.kv_cache import KVCache, KVCacheShape
from worker.models.decoder import Decoder, Rows
from worker.models.loading import load_weights
from worker.nano_pipeline import NanoPipeline
from worker.parallel import TensorParallelGroup, make_group
from worker.sampler import SamplingRows, sample
from worker.schedule_choice import SEQUENTIAL
from worker.schedule_sets import ScheduleRules, ScheduleSets
from worker.sharding import Shard, shard
from worker.store_client import open_mover
from worker.store_pages import PageMover
from worker.weights import DummySource, ModelLoadError, Progress, SafetensorsSource

log = logging.getLogger(__name__)

EMPTY_STEP_S = 1e-3  # how long a plan without rows waits for a move to end
_DTYPES = {"auto": torch.float32, "float32": torch.float32}


class CapacityError(ValueError):
    """The limits asked for leave no room to run; the message says which to change."""


class Worker:
    """One rank. All methods but __init__ are to be called from one thread at a time."""

    def __init__(self, config: WorkerConfig, rank: int = 0) -> None:
        """Raises UnsupportedModelError, ShardingError, CapacityError or ModelLoadError. Loads nothing yet."""
        if config.device != "cpu":
            raise CapacityError(f"device {config.device!r} is not a CPU: worker.backend chooses what runs on which")
        if config.dtype not in _DTYPES:
            raise CapacityError(f"dtype {config.dtype!r} is not supported on a CPU: use float32")
        self.config = config
        self.rank = rank
        self.spec = ModelSpec.from_folder(config.model_dir)
        self._shard: Shard = shard(self.spec, config.tensor_parallel_size, rank)
        self._cache_shape = _cache_shape(config, self.spec, self._shard)
        sizes, self._schedules = _schedules(config, self.spec, self._cache_shape)
        self._capacity = _capacity(config, self.spec, self._cache_shape, sizes)
        self._runner = CpuSchedules(layer_operators(self.spec, config.tensor_parallel_size))
        rules = ScheduleRules(config.model_dir.name, config.device, frozenset(sizes), config.schedule_room)
        self.schedules = ScheduleSets(rules, self._runner, self._schedules)
        self._group: TensorParallelGroup | None = None
        self._mover: PageMover | None = None
        self._model: Decoder | None = None
        self._last_end_s: float | None = None

    @property
    def capacity(self) -> EngineCapacity:
        """The fitted limits, the same on all ranks."""
        return self._capacity

    def load(self, progress: Progress = lambda what, share: None, rendezvous: str = "") -> None:
        """Join the other ranks (at `rendezvous`, a torch.distributed init method) and load the weights.

        Raises ModelLoadError where tensors are missing or do not fit config.json.
        """
        config, capacity = self.config, self._capacity
        torch.set_num_threads(config.num_threads or _default_threads(config.tensor_parallel_size))
        device, dtype = torch.device(config.device), _DTYPES[config.dtype]
        source = DummySource(config.seed) if config.load_format == "dummy" else SafetensorsSource(config.model_dir)
        with torch.inference_mode():
            weights = load_weights(self.spec, self._shard, source, dtype, device, progress)
            progress("joining the other ranks", 0.0)
            self._group = make_group(self.rank, self._shard.size, rendezvous, config.join_timeout_s)
            cache = KVCache(self._cache_shape, dtype, device)
            if config.kv_store is not None:
                self._mover = open_mover(config, self.rank, cache)
            self._slots = SlotTable(capacity.max_slots, capacity.max_model_len, capacity.page_size, device)
            self._model = Decoder(
                self.spec,
                self._shard,
                weights,
                cache,
                self._group,
                max_rows=capacity.max_batch_tokens,
                max_model_len=capacity.max_model_len,
            )
        self._runner.load(self._model.operators(), self._schedules)
        progress("ready", 1.0)

    def execute(self, plan: IterationPlan) -> StepResult:
        """Run one plan. A row with logits that are not finite becomes a SlotFault; its neighbours go on."""
        assert self._model is not None, "load() comes first"
        start_s = time.perf_counter()
        idle_s = 0.0 if self._last_end_s is None else start_s - self._last_end_s
        if self._mover is not None:
            self._mover.start(plan.moves)
        rows = self._capacity.buckets[plan.bucket].batch_tokens
        assert plan.num_tokens <= rows, "the scheduler fills at most the bucket"
        choice = None if self.schedules.choice is None else self.schedules.choice.choose_for(plan, rows)
        pipeline = self._runner.pipeline(rows, SEQUENTIAL if choice is None else choice.name)
        with torch.inference_mode():
            sampled, faults = self._run(self._model, plan, pipeline)
        self._last_end_s = time.perf_counter()
        run_s = self._last_end_s - start_s
        moves = () if self._mover is None else self._mover.take_ended(0.0 if len(plan.slots) else EMPTY_STEP_S)
        overlapped, unmeasured = (False, False) if choice is None else (bool(choice.name), not choice.is_known)
        return StepResult(plan.step, sampled, faults, idle_s, run_s, moves, overlapped, unmeasured)

    def close(self) -> None:
        """Leave the other ranks and free the memory. Idempotent."""
        self.schedules.close()
        if self._mover is not None:
            self._mover.close()
        if self._group is not None:
            self._group.close()
        self._group = self._model = None

    def _run(
        self, model: Decoder, plan: IterationPlan, pipeline: NanoPipeline[Rows]
    ) -> tuple[np.ndarray, tuple[SlotFault, ...]]:
        slots = self._slots
        slots.apply(plan)
        if not len(plan.slots):
            return np.empty(0, np.int32), ()
        batch = build_batch(plan, pipeline.boundaries, pipeline.schedule.decodes_first)
        model.begin(batch, slots.token_ids(batch.slots, batch.positions), slots.page_table)
        pipeline.run(batch.num_rows, self.spec.num_layers, model.rows)
        samples = batch.samples
        if not len(samples.rows):
            return np.empty(0, np.int32), ()
        chosen = sample(model.logits(torch.from_numpy(samples.rows)), _sampling_rows(slots, samples))
        slots.append(samples, chosen.token_ids)
        faults = tuple(
            SlotFault(int(slot), "the model's logits are not finite") for slot in samples.slots[chosen.faulty]
        )
        return chosen.token_ids.numpy().astype(np.int32), faults


class LocalExecutor:
    """The executor of one rank in this process: runs plans in a thread of its own, in order of submission."""

    def __init__(self, worker: Worker) -> None:
        """The worker must be loaded, and is closed with the executor."""
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._failure: BaseException | None = None

    @property
    def capacity(self) -> EngineCapacity:
        return self._worker.capacity

    def submit(self, plan: IterationPlan) -> LocalStep:
        """Hand over a plan and return at once. Raises ExecutorError once closed."""
        try:
            return LocalStep(self._thread.submit(self._execute, plan))
        except RuntimeError as error:
            raise ExecutorError(f"the executor is closed: {error}") from None

    def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """As worker.rank_executor.RankExecutor says."""
        self._worker.schedules.prepare(number, schedules)

    def drop_schedules(self, number: int) -> None:
        """As worker.rank_executor.RankExecutor says."""
        self._worker.schedules.drop(number)

    def use_schedules(self, number: int) -> None:
        """Plans submitted from now on run by the set that was prepared under this number."""
        with suppress(RuntimeError):  # closed: there are no such plans
            self._thread.submit(self._use, number)

    def close(self) -> None:
        """Drop plans that have not begun, wait for the one that has, free everything. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.close()

    def _use(self, number: int) -> None:
        try:
            self._worker.schedules.use(number)
        except Exception as error:  # nobody waits for this call: the next plan's result tells
            log.exception("schedules %d cannot be used", number)
            self._failure = error

    def _execute(self, plan: IterationPlan) -> StepResult:
        # After a failed step the KV cache is not what later plans count on.
        if self._failure is not None:
            raise ExecutorError(f"an earlier step failed: {self._failure}")
        try:
            return self._worker.execute(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._failure = error
            raise


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A plan in the executor's thread."""

    future: Future[StepResult]

    def done(self) -> bool:
        """Whether result() would return or raise at once."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step. Raises ExecutorError when it failed, was dropped, or takes longer than timeout_s."""
        try:
            return self.future.result(timeout_s)
        except ExecutorError:
            raise
        except CancelledError:
            raise ExecutorError("the executor was closed before the step began") from None
        except FutureTimeoutError:
            raise ExecutorError(f"the step did not end within {timeout_s} s") from None
        except Exception as error:
            raise ExecutorError(f"the step failed: {error}") from error


def fitted_model_len(wanted: int | None, max_position: int, kv_tokens: int) -> int:
    """Tokens of one request at most, fitted to model and pages. Raises CapacityError where more were asked for."""
    if wanted is not None and wanted > max_position:
        raise CapacityError(f"max_model_len {wanted} is more than the model's context of {max_position}")
    if wanted is not None and wanted > kv_tokens:
        raise CapacityError(
            f"max_model_len {wanted} does not fit into the KV cache of {kv_tokens} tokens: "
            "lower it, or give more memory"
        )
    if kv_tokens < 2:
        raise CapacityError(
            f"the KV cache holds {kv_tokens} tokens, and a request needs two at least: give more pages or larger ones "
            "(--num-gpu-blocks-override, --kv-cache-memory-bytes, --block-size)"
        )
    return min(wanted or max_position, kv_tokens)


def _default_threads(num_ranks: int) -> int:
    """A rank's share of the cores; torch's own choice would follow whatever OMP_NUM_THREADS a launcher has set."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _sampling_rows(slots: SlotTable, samples: SampleRows) -> SamplingRows:
    rows = samples.slots
    return SamplingRows(
        temperature=slots.temperature[rows],
        top_k=slots.top_k[rows],
        top_p=slots.top_p[rows],
        seed=slots.seed[rows],
        position=samples.positions.astype(np.int64),
    )


def _schedules(
    config: WorkerConfig, spec: ModelSpec, shape: KVCacheShape
) -> tuple[tuple[int, ...], tuple[PipelineSchedule, ...]]:
    """Batch sizes, ascending, and the schedules beside the sequential ones. Raises InvalidScheduleError."""
    if config.max_batch_tokens < 1 or config.nano_batches < 1:
        raise CapacityError("max_batch_tokens and nano_batches must be at least 1")
    most = config.max_batch_tokens
    if (largest := max((schedule.batch_tokens for schedule in config.schedules), default=0)) > most:
        raise CapacityError(f"a schedule is for {largest} rows: raise --max-num-batched-tokens from {most}")
    if config.expected_input_len is not None and config.expected_output_len is not None:
        kv_tokens = shape.num_pages * shape.page_size
        most = fitted_batch_tokens(kv_tokens, config.expected_input_len, config.expected_output_len, most)
    schedules = [schedule for schedule in config.schedules if schedule.batch_tokens <= most]
    # Smaller buckets let the scheduler say how full a batch is; rows that are not there cost nothing here.
    sizes = {max(1, most >> halvings) for halvings in range(4)} | {schedule.batch_tokens for schedule in schedules}
    operators = layer_operators(spec, config.tensor_parallel_size)
    if config.nano_batches > 1:
        schedules += [nanobatch_only(operators, size, config.nano_batches) for size in sizes]
    for schedule in config.schedules:
        schedule.validate(operators)
    return tuple(sorted(sizes)), tuple(schedules)


def _cache_shape(config: WorkerConfig, spec: ModelSpec, part: Shard) -> KVCacheShape:
    if config.page_size < 1 or config.max_slots < 1:
        raise CapacityError("page_size and max_slots must be at least 1")
    shape = KVCacheShape(spec.num_layers, 1, part.num_kv_heads, config.page_size, spec.head_dim)
    num_pages = config.num_pages
    if num_pages is None:
        page_bytes = shape.elements_per_page * _DTYPES[config.dtype].itemsize
        # No more than all slots can use.
        longest = min(config.max_model_len or spec.max_position, spec.max_position)
        kv_cache_bytes = CPU_KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
        num_pages = min(kv_cache_bytes // page_bytes, config.max_slots * -(-longest // config.page_size))
        if num_pages < 1:
            raise CapacityError(f"a KV cache of {kv_cache_bytes} bytes does not hold one page of {page_bytes} bytes")
    if num_pages < 1:
        raise CapacityError(f"num_pages is {num_pages}: at least 1 is needed")
    return KVCacheShape(spec.num_layers, num_pages, part.num_kv_heads, config.page_size, spec.head_dim)


def _capacity(
    config: WorkerConfig, spec: ModelSpec, shape: KVCacheShape, batch_sizes: tuple[int, ...]
) -> EngineCapacity:
    """Raises CapacityError."""
    max_model_len = fitted_model_len(config.max_model_len, spec.max_position, shape.num_pages * shape.page_size)
    return EngineCapacity(
        num_pages=shape.num_pages,
        page_size=shape.page_size,
        max_slots=config.max_slots,
        max_model_len=max_model_len,
        buckets=tuple(ScheduleBucket(number, rows) for number, rows in enumerate(batch_sizes)),
    )


__all__ = ["CapacityError", "LocalExecutor", "LocalStep", "ModelLoadError", "Worker", "WorkerConfig"]
