"""The executor of one GPU in this process: plans in, step results out, the GPU always a step ahead of Python.

submit() packs a plan into pinned memory and queues copy, graph and read-back on one stream, all without waiting; the
result is read when its event has passed. With device "cpu" the same code runs on the reference kernels, step by
step, for tests. Knows nothing of Ray, text or clients.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from autosearch.specs import ModelSpec
from scheduler.plan import EngineCapacity, IterationPlan, ScheduleBucket, SlotFault, StepResult
from scheduler.ports import ExecutorError
from worker.config import WorkerConfig
from worker.cuda_model import CudaModel, GraphKey, parameter_bytes, unsupported
from worker.device_batch import RANDOM_ROWS, BatchLimits, BlockView, HostSlots, Packed
from worker.executor import CapacityError
from worker.kernel_set import KernelSet, ReferenceKernels, TritonKernels
from worker.kv_cache import KVCache, KVCacheShape
from worker.models.loading import load_weights
from worker.sharding import shard
from worker.weights import DUMMY_SCALE, DummySource, Progress, SafetensorsSource, TensorPart

log = logging.getLogger(__name__)

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_RESERVE_BYTES = 3 << 30  # left free beside the KV cache: graphs, logits of sampled rows, the allocator's slack
_SAMPLE_SIZES = (16, 64, RANDOM_ROWS)  # random rows are padded to one of these: no shape is met first while serving
_RING = 4  # pinned blocks: one more than plans can be on their way


class DeviceDummySource(DummySource):
    """Dummy weights made on the device: as DummySource defines them, but with the device's generator."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__(seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    def read(self, part: TensorPart, start: int, stop: int) -> torch.Tensor:
        shape = (*part.shape[: part.dim], stop - start, *part.shape[part.dim + 1 :])
        values = torch.empty(shape, device=self._generator.device)
        return values.uniform_(-DUMMY_SCALE, DUMMY_SCALE, generator=self._generator)


class _Stage:
    """One pinned block with the read-back buffer and events of the step that used it last."""

    def __init__(self, limits: BatchLimits, num_samples: int, cuda: bool) -> None:
        self.view = BlockView(limits, torch.zeros(BlockView.size(limits), dtype=torch.int32, pin_memory=cuda))
        self.sampled = torch.zeros(num_samples, dtype=torch.int32, pin_memory=cuda)
        if cuda:
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.done = torch.cuda.Event()


class CudaExecutor:
    """Loads a model and runs plans in the order of submission. To be called from one thread."""

    def __init__(self, config: WorkerConfig, progress: Progress = lambda what, share: None) -> None:
        """Raises UnsupportedModelError, CapacityError or ModelLoadError."""
        self.spec = ModelSpec.from_folder(config.model_dir)
        if (reason := unsupported(self.spec)) or config.tensor_parallel_size != 1:
            raise CapacityError(reason or "tensor_parallel_size above 1 is not supported on GPUs yet")
        if config.dtype not in _DTYPES:
            raise CapacityError(f"dtype {config.dtype!r} is not supported: use one of {', '.join(_DTYPES)}")
        self._config, self._device = config, torch.device(config.device)
        self._cuda = self._device.type == "cuda"
        self._dtype = _DTYPES[config.dtype]
        self._buckets = _buckets(config.max_batch_tokens)
        max_len = min(config.max_model_len or self.spec.max_position, self.spec.max_position)
        group = self.spec.num_heads // self.spec.num_kv_heads
        self._limits = BatchLimits(
            rows=self._buckets[-1],
            slots=config.max_slots,
            page_size=config.page_size,
            pages_per_slot=-(-max_len // config.page_size),
            prefill_tokens=128 >> (group - 1).bit_length(),
            decode_target=max(1, 4 * 132 // self.spec.num_kv_heads) * 2,
        )
        with torch.inference_mode():
            self._load(progress, max_len)
        self._slots = HostSlots(self._limits)
        num_samples = min(self._limits.rows, self._limits.slots)
        self._stages = [_Stage(self._limits, num_samples, self._cuda) for _ in range(_RING)]
        self._last: _Stage | None = None
        self._num_submitted = 0
        self._closed = False

    @property
    def capacity(self) -> EngineCapacity:
        return self._capacity

    def submit(self, plan: IterationPlan) -> CudaStep:
        """Queue a plan on the device and return at once. Raises ExecutorError once closed."""
        if self._closed:
            raise ExecutorError("the executor is closed")
        stage, before = self._stages[self._num_submitted % _RING], self._last
        if self._cuda and self._num_submitted >= _RING:
            stage.done.synchronize()  # its block is free again
        with torch.inference_mode():
            packed = self._slots.pack(plan, stage.view)
            self._queue(plan, packed, stage)
        self._num_submitted += 1
        self._last = stage
        return CudaStep(plan.step, packed, stage, before, self._cuda)

    def close(self) -> None:
        """Wait for the device and free everything. Idempotent."""
        if not self._closed and self._cuda:
            torch.cuda.synchronize()
        self._closed = True
        self.__dict__.pop("_model", None)

    def _queue(self, plan: IterationPlan, packed: Packed, stage: _Stage) -> None:
        model = self._model
        model.view.block.copy_(stage.view.block, non_blocking=True)
        if len(packed.extra_cells):
            cells, pages = (torch.from_numpy(a).to(self._device) for a in (packed.extra_cells, packed.extra_pages))
            model.page_table.view(-1)[cells.long()] = pages
        if self._cuda:
            stage.begin.record()
        model.run(GraphKey(self._buckets[plan.bucket], packed.has_prefill))
        self._sample(packed)
        if self._cuda:
            stage.end.record()
        stage.sampled.copy_(model.sampled, non_blocking=True)
        if self._cuda:
            stage.done.record()

    def _sample(self, packed: Packed) -> None:
        """Replace the greedy choices where a temperature asks for it: queued, like all else."""
        for first in range(0, packed.num_random, RANDOM_ROWS):
            left = packed.num_random - first
            self._model.sample(first, next(size for size in _SAMPLE_SIZES if size >= min(left, RANDOM_ROWS)))

    def _load(self, progress: Progress, max_len: int) -> None:
        config, spec, device = self._config, self.spec, self._device
        source = (
            DeviceDummySource(device, config.seed)
            if config.load_format == "dummy"
            else SafetensorsSource(config.model_dir)
        )
        weights = load_weights(spec, shard(spec, 1, 0), source, self._dtype, device, progress)
        kernels: KernelSet = ReferenceKernels()
        if self._cuda:
            group = spec.num_heads // spec.num_kv_heads
            kernels = TritonKernels(
                device, spec.num_kv_heads, group, spec.head_dim, self._limits.max_partials, self._limits.rows
            )
        self._model = CudaModel(spec, weights, self._limits, kernels, max_len, device)
        keys = [GraphKey(rows, prefill) for rows in reversed(self._buckets) for prefill in (True, False)]
        if self._cuda:
            # The largest batch first, on a token of cache: what it takes is gone before the KV cache is sized.
            self._model.use_cache(KVCache(self._shape(1), self._dtype, device))
            for number, key in enumerate(keys):
                progress("compiling kernels", number / len(keys))
                self._model.run(key)
            for size in _SAMPLE_SIZES:
                self._model.sample(0, size)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        num_pages = self._num_pages()
        self._model.use_cache(KVCache(self._shape(num_pages), self._dtype, device))
        if self._cuda:
            pool = torch.cuda.graph_pool_handle()
            for number, key in enumerate(keys):
                progress("capturing graphs", number / len(keys))
                self._model.capture(key, pool)
            free, total = torch.cuda.mem_get_info()
            log.info(
                "weights %.2f GiB, KV cache %.2f GiB (%d pages of %d tokens), %d graphs, free %.2f of %.2f GiB",
                parameter_bytes(weights) / 2**30,
                self._page_bytes() * num_pages / 2**30,
                num_pages,
                config.page_size,
                len(keys),
                free / 2**30,
                total / 2**30,
            )
        self._capacity = EngineCapacity(
            num_pages=num_pages,
            page_size=config.page_size,
            max_slots=config.max_slots,
            max_model_len=min(max_len, num_pages * config.page_size),
            buckets=tuple(ScheduleBucket(number, rows) for number, rows in enumerate(self._buckets)),
        )
        progress("ready", 1.0)

    def _shape(self, num_pages: int) -> KVCacheShape:
        spec = self.spec
        return KVCacheShape(spec.num_layers, num_pages, spec.num_kv_heads, self._config.page_size, spec.head_dim)

    def _page_bytes(self) -> int:
        return self._shape(1).elements_per_page * self._dtype.itemsize

    def _num_pages(self) -> int:
        config = self._config
        if config.num_pages is not None:
            return config.num_pages
        room = config.kv_cache_bytes
        if self._cuda:
            room = torch.cuda.mem_get_info()[0] - _RESERVE_BYTES
        num_pages = min(room // self._page_bytes(), config.max_slots * self._limits.pages_per_slot)
        if num_pages < 1:
            raise CapacityError(f"{room} bytes are free for the KV cache: not one page of {self._page_bytes()} fits")
        return num_pages


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A plan on the device."""

    step: int
    packed: Packed
    stage: _Stage
    before: _Stage | None
    cuda: bool

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
        return StepResult(self.step, np.maximum(sampled, 0), faults, idle_s, run_s)

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


def _buckets(max_batch_tokens: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: powers of two up to the largest, and multiples of 256 near it."""
    if max_batch_tokens < 1:
        raise CapacityError("max_batch_tokens must be at least 1")
    sizes = {1 << power for power in range(max_batch_tokens.bit_length()) if 1 << power < max_batch_tokens}
    sizes |= {size for size in (768, 1280, 1536, 1792) if size < max_batch_tokens}
    return tuple(sorted({*sizes, max_batch_tokens}))
