"""The executor of one GPU in this process: plans in, step results out, the GPU always a step ahead of Python.

submit() packs a plan into pinned memory and queues copy, graph and read-back on one stream, all without waiting; the
result is read when its event has passed. With device "cpu" the same code runs on the reference kernels, step by
step, for tests. Knows nothing of Ray, text or clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autosearch.pipeline import PipelineSchedule
from scheduler.plan import EngineCapacity, IterationPlan, SlotFault, StepResult
from scheduler.ports import ExecutorError
from worker.config import WorkerConfig
from worker.cuda_loading import SAMPLE_SIZES, LoadedModel, load_model
from worker.cuda_model import CudaModel, GraphKey
from worker.device_batch import RANDOM_ROWS, BatchLimits, BlockView, HostSlots, Packed
from worker.executor import EMPTY_STEP_S
from worker.schedule_choice import ScheduleChoice
from worker.store_client import open_mover
from worker.store_pages import PageMover
from worker.weights import Progress

_RING = 4  # pinned blocks: one more than plans can be on their way


class _Stage:
    """One pinned block with the read-back buffer and events of the step that used it last."""

    def __init__(self, limits: BatchLimits, num_samples: int, cuda: bool) -> None:
        self.view = BlockView(limits, torch.zeros(BlockView.size(limits), dtype=torch.int32, pin_memory=cuda))
        self.sampled = torch.zeros(num_samples, dtype=torch.int32, pin_memory=cuda)
        if cuda:
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.done = torch.cuda.Event()
        self.key = GraphKey(0, False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An iteration as it was handed over: to be run again, in parts, by benchmarks."""

    key: GraphKey
    block: torch.Tensor


class CudaExecutor:
    """Loads a model and runs plans in the order of submission. To be called from one thread."""

    def __init__(self, config: WorkerConfig, progress: Progress = lambda what, share: None) -> None:
        """Raises UnsupportedModelError, CapacityError or ModelLoadError."""
        self._loaded: LoadedModel | None = load_model(config, progress)
        self.spec, self.dtype, limits = self._loaded.spec, self._loaded.dtype, self._loaded.limits
        self._capacity, self._memory = self._loaded.capacity, self._loaded.memory
        self._schedules = self._loaded.schedules
        self._device = torch.device(config.device)
        self._cuda = self._device.type == "cuda"
        self._mover: PageMover | None = None
        if config.kv_store is not None:
            with torch.inference_mode():
                self._mover = open_mover(config, 0, self._loaded.cache, self._loaded.staging)
        self._slots = HostSlots(limits)
        num_samples = min(limits.rows, limits.slots)
        self._stages = [_Stage(limits, num_samples, self._cuda) for _ in range(_RING)]
        self._last: _Stage | None = None
        self._num_submitted = 0
        self._closed = False

    @property
    def capacity(self) -> EngineCapacity:
        return self._capacity

    def submit(self, plan: IterationPlan) -> CudaStep | MovesStep:
        """Queue a plan on the device and return at once. Raises ExecutorError once closed."""
        if self._closed:
            raise ExecutorError("the executor is closed")
        stage, before = self._stages[self._num_submitted % _RING], self._last
        if self._cuda and self._num_submitted >= _RING:
            stage.done.synchronize()  # its block is free again
        if self._mover is not None:
            self._mover.start(plan.moves)
        self._num_submitted += 1
        key, unmeasured = self._key(plan)
        with torch.inference_mode():
            packed = self._slots.pack(plan, stage.view, self.model.cuts(key))
            if self._mover is not None and not len(plan.slots):
                cells = plan.page_slots.astype(np.int64) * self._slots.limits.pages_per_slot + plan.page_indexes
                self._set_pages(cells, plan.page_ids)
                self._last = None
                return MovesStep(plan.step, self._mover)
            stage.key = key
            self._queue(packed, stage)
        self._last = stage
        return CudaStep(plan.step, packed, stage, before, self._cuda, self._mover, bool(key.schedule), unmeasured)

    def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """As worker.rank_executor.RankExecutor says."""
        self._schedules.prepare(number, schedules)

    def drop_schedules(self, number: int) -> None:
        """As worker.rank_executor.RankExecutor says."""
        self._schedules.drop(number)

    def use_schedules(self, number: int) -> None:
        """Plans submitted from now on run by the set that was prepared under this number."""
        if not self._closed:
            self._schedules.use(number)

    def close(self) -> None:
        """Wait for the device and free everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._schedules.close()
            if self._mover is not None:
                self._mover.close()
            if self._cuda:
                with suppress(RuntimeError):  # a device's fault has been told by the iteration that met it
                    torch.cuda.synchronize()
        finally:
            self._loaded = None

    @property
    def model(self) -> CudaModel:
        """What the plans run on; gone once closed."""
        assert self._loaded is not None, "closed"
        return self._loaded.model

    @property
    def is_cuda(self) -> bool:
        """False where the reference kernels stand in for a GPU's, for tests."""
        return self._cuda

    def use_choice(self, choice: ScheduleChoice | None) -> None:
        """By which of the loaded schedules later plans run; None: all sequential. Between runs, for benchmarks."""
        self._schedules.use_choice(choice)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The GPU's memory by purpose; empty without a GPU."""
        return asdict(self._memory) if self._memory else {}

    def snapshot(self, step: int) -> Snapshot | None:
        """The block of one of the latest steps; None when another has taken its place."""
        if not self._num_submitted - _RING <= step < self._num_submitted:
            return None
        stage = self._stages[step % _RING]
        return Snapshot(stage.key, stage.view.block.clone())

    def replay(self, snapshot: Snapshot, parts: Collection[str], rows: int | None = None) -> Callable[[], None]:
        """What runs these operators of the iteration once, on so many rows instead of its own. After all steps only."""
        with torch.inference_mode():
            self.model.view.block.copy_(snapshot.block)
            key = snapshot.key if rows is None else self.model.sequential_key(rows, snapshot.key.has_prefill)
            return self.model.capture_parts(key, parts).replay

    def _key(self, plan: IterationPlan) -> tuple[GraphKey, bool]:
        """The graph to run, and whether no schedule was measured for batches like it although some were."""
        rows = self._capacity.buckets[plan.bucket].batch_tokens
        sequential = self.model.sequential_key(rows, len(plan.slots) > plan.num_decodes)
        if self._schedules.choice is None:
            return sequential, False
        choice = self._schedules.choice.choose_for(plan, rows)
        return GraphKey(rows, True, choice.name) if choice.name else sequential, not choice.is_known

    def _queue(self, packed: Packed, stage: _Stage) -> None:
        model = self.model
        model.view.block.copy_(stage.view.block, non_blocking=True)
        self._set_pages(packed.extra_cells, packed.extra_pages)
        if self._cuda:
            stage.begin.record()
        model.run(stage.key)
        self._sample(packed)
        if self._cuda:
            stage.end.record()
        stage.sampled.copy_(model.sampled, non_blocking=True)
        if self._cuda:
            stage.done.record()

    def _set_pages(self, cells: NDArray[np.integer], pages: NDArray[np.int32]) -> None:
        """Page table changes that no block carries, from pinned memory: the host waits for no iteration."""
        if len(cells):
            changes = (torch.from_numpy(each) for each in (cells, pages))
            pinned = (each.pin_memory() if self._cuda else each for each in changes)
            places, values = (each.to(self._device, non_blocking=True) for each in pinned)
            self.model.page_table.view(-1)[places.long()] = values

    def _sample(self, packed: Packed) -> None:
        """Replace the greedy choices where a temperature asks for it: queued, like all else."""
        for first in range(0, packed.num_random, RANDOM_ROWS):
            left = packed.num_random - first
            self.model.sample(first, next(size for size in SAMPLE_SIZES if size >= min(left, RANDOM_ROWS)))


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A plan on the device."""

    step: int
    packed: Packed
    stage: _Stage
    before: _Stage | None
    cuda: bool
    mover: PageMover | None
    overlapped: bool
    unmeasured: bool

    def done(self) -> bool:
        """Whether result() would return at once."""
        return not self.cuda or self.stage.done.query()

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step. Raises ExecutorError when the device failed or takes longer than timeout_s."""
        idle_s = run_s = 0.0
        if self.cuda:
            self._wait(timeout_s)
            run_s = self.stage.begin.elapsed_time(self.stage.end) / 1e3
            if self.before is not None:
                idle_s = self.before.end.elapsed_time(self.stage.begin) / 1e3
        slots = self.packed.sample_slots
        sampled = self.stage.sampled.numpy()[: len(slots)].copy()
        faults = tuple(SlotFault(int(slot), "the model's logits are not finite") for slot in slots[sampled < 0])
        moves = () if self.mover is None else self.mover.take_ended()
        sampled = np.maximum(sampled, 0)
        return StepResult(self.step, sampled, faults, idle_s, run_s, moves, self.overlapped, self.unmeasured)

    def _wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.stage.done.query():
                if deadline is not None and time.monotonic() > deadline:
                    raise ExecutorError(f"step {self.step} did not end within {timeout_s} s")
                time.sleep(2e-5)
        except RuntimeError as error:
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"the device failed in step {self.step}: {error}") from error


@dataclass(frozen=True, slots=True)
class MovesStep:
    """A plan without rows: only moves, which the device's steps neither wait for nor delay."""

    step: int
    mover: PageMover

    def done(self) -> bool:
        """Whether result() would return soon: always."""
        return True

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait until a move has ended, or a moment."""
        moves = self.mover.take_ended(EMPTY_STEP_S)
        return StepResult(self.step, np.empty(0, np.int32), (), 0.0, 0.0, moves)
