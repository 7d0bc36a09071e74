"""The executor of one GPU in this process: plans in, step results out, the GPU always a step ahead of Python.

submit() packs a plan into pinned memory and queues copy, graph and read-back on one stream, all without waiting; the
result is read when its event has passed. With device "cpu" the same code runs on the reference kernels, step by
step, for tests. Knows nothing of Ray, text or clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from autosearch.specs import ModelSpec
from autosearch.workload import fitted_batch_tokens
from scheduler.plan import EngineCapacity, IterationPlan, ScheduleBucket, SlotFault, StepResult
from scheduler.ports import ExecutorError
from worker.config import CPU_KV_CACHE_BYTES, WorkerConfig
from worker.cuda_model import CudaModel, GraphKey, parameter_bytes, unsupported
from worker.device_batch import RANDOM_ROWS, BatchLimits, BlockView, HostSlots, Packed
from worker.device_memory import GIB, DeviceMemory
from worker.executor import CapacityError
from worker.kernel_set import KernelSet, ReferenceKernels, TritonKernels
from worker.kv_cache import KVCache, KVCacheShape
from worker.models.loading import load_weights
from worker.sharding import shard
from worker.weights import DUMMY_SCALE, DummySource, Progress, SafetensorsSource, TensorPart

log = logging.getLogger(__name__)

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_GRAPH_BYTES = 32 << 20  # of one graph, more than any was seen to take
_NO_PREFILL_ROWS = 128  # up to here batches of decodes alone have a graph of their own
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
        self.spec = ModelSpec.from_folder(config.model_dir)
        check(config, self.spec)
        self._config, self._device = config, torch.device(config.device)
        self._cuda = self._device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise CapacityError("there is no CUDA GPU here: `nanoflow doctor` says what is missing, or use the CPU")
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
        self.memory: DeviceMemory | None = None  # known on a GPU only
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

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._dtype

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The GPU's memory by purpose; empty without a GPU."""
        return asdict(self.memory) if self.memory else {}

    def snapshot(self, step: int) -> Snapshot | None:
        """The block of one of the latest steps; None when another has taken its place."""
        if not self._num_submitted - _RING <= step < self._num_submitted:
            return None
        stage = self._stages[step % _RING]
        return Snapshot(stage.key, stage.view.block.clone())

    def replay(self, snapshot: Snapshot, parts: Collection[str], rows: int | None = None) -> Callable[[], None]:
        """What runs these operators of the iteration once, on so many rows instead of its own. After all steps only."""
        with torch.inference_mode():
            self._model.view.block.copy_(snapshot.block)
            key = snapshot.key if rows is None else _graph_key(rows, snapshot.key.has_prefill)
            return self._model.capture_parts(key, parts).replay

    def _queue(self, plan: IterationPlan, packed: Packed, stage: _Stage) -> None:
        model = self._model
        model.view.block.copy_(stage.view.block, non_blocking=True)
        if len(packed.extra_cells):
            cells, pages = (torch.from_numpy(a).to(self._device) for a in (packed.extra_cells, packed.extra_pages))
            model.page_table.view(-1)[cells.long()] = pages
        if self._cuda:
            stage.begin.record()
        stage.key = _graph_key(self._buckets[plan.bucket], packed.has_prefill)
        model.run(stage.key)
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
            kernels = TritonKernels(device, spec.num_kv_heads, group, spec.head_dim, self._limits.max_partials)
        self._model = CudaModel(spec, weights, self._limits, kernels, max_len, device)
        if self._cuda:
            self._warm_up(self._buckets, progress)
        num_pages = self._num_pages(parameter_bytes(weights))
        self._model.use_cache(KVCache(self._shape(num_pages), self._dtype, device))
        self._fit_buckets(num_pages)
        if self._cuda:
            self._capture(progress)
        self._capacity = EngineCapacity(
            num_pages=num_pages,
            page_size=config.page_size,
            max_slots=config.max_slots,
            max_model_len=min(max_len, num_pages * config.page_size),
            buckets=tuple(ScheduleBucket(number, rows) for number, rows in enumerate(self._buckets)),
        )
        progress("ready", 1.0)

    def _warm_up(self, buckets: Sequence[int], progress: Progress) -> None:
        """Compile and choose all kernels, the largest batch first, on one page of cache."""
        self._model.use_cache(KVCache(self._shape(1), self._dtype, self._device))
        torch.cuda.reset_peak_memory_stats()
        keys = _graph_keys(buckets)
        for number, key in enumerate(keys):
            progress("compiling kernels", number / len(keys))
            self._model.run(key)
        for size in _SAMPLE_SIZES:
            self._model.sample(0, size)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _fit_buckets(self, num_pages: int) -> None:
        """No larger batch than memory keeps full, for the lengths that the user expects."""
        config = self._config
        if config.expected_input_len is None or config.expected_output_len is None:
            return
        kv_tokens, most = num_pages * config.page_size, self._buckets[-1]
        fitted = fitted_batch_tokens(kv_tokens, config.expected_input_len, config.expected_output_len, most)
        if fitted not in self._buckets and self._cuda:
            self._warm_up([fitted], lambda what, share: None)
        self._buckets = (*(rows for rows in self._buckets if rows < fitted), fitted)

    def _capture(self, progress: Progress) -> None:
        keys, pool = _graph_keys(self._buckets), torch.cuda.graph_pool_handle()
        before = torch.cuda.mem_get_info()[0]
        for number, key in enumerate(keys):
            progress("capturing graphs", number / len(keys))
            self._model.capture(key, pool)
        taken = before - torch.cuda.mem_get_info()[0]
        log.info("%s; %d graphs took %.2f", self.memory, len(keys), taken / GIB)

    def _shape(self, num_pages: int) -> KVCacheShape:
        spec = self.spec
        return KVCacheShape(spec.num_layers, num_pages, spec.num_kv_heads, self._config.page_size, spec.head_dim)

    def _num_pages(self, weight_bytes: int) -> int:
        config, page_bytes = self._config, self._shape(1).elements_per_page * self._dtype.itemsize
        if self._cuda:
            self.memory = self._list_memory(weight_bytes)
        num_pages = config.num_pages
        if num_pages is None:
            room = config.kv_cache_bytes
            if room is None:
                room = CPU_KV_CACHE_BYTES if self.memory is None else self.memory.room
            num_pages = min(room // page_bytes, config.max_slots * self._limits.pages_per_slot)
            if num_pages < 1:
                raise CapacityError(
                    f"{room} bytes for the KV cache do not hold one page of {page_bytes}: {self.memory}"
                )
        if self.memory is not None:
            if num_pages * page_bytes > self.memory.room:
                raise CapacityError(
                    f"a KV cache of {num_pages * page_bytes} bytes does not fit, lower --num-gpu-blocks-override or "
                    f"--kv-cache-memory-bytes: {self.memory}"
                )
            self.memory = replace(self.memory, kv_cache=num_pages * page_bytes)
        return num_pages

    def _list_memory(self, weight_bytes: int) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        return DeviceMemory(
            total=total,
            spared=int(total * (1 - self._config.gpu_memory_utilization)),
            others=total - free - reserved,
            weights=weight_bytes,
            buffers=reserved - weight_bytes,
            # Twice: for launches outside of graphs and, in the graphs' own pool, for those inside.
            working=2 * (torch.cuda.max_memory_allocated() - allocated),
            graphs=len(_graph_keys(self._buckets)) * _GRAPH_BYTES,
        )


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


def check(config: WorkerConfig, spec: ModelSpec) -> None:
    """Raises CapacityError for what cannot run on a GPU, whether there is one here or not."""
    if (reason := unsupported(spec)) or config.tensor_parallel_size != 1:
        raise CapacityError(reason or "--tensor-parallel-size above 1 is not supported on GPUs yet")
    if config.nano_batches != 1 or config.schedule_files:
        raise CapacityError("a GPU runs the sequential schedule only, so far: leave --nano-batches at 1")
    known = [name for name, dtype in _DTYPES.items() if config.device == "cpu" or dtype != torch.float32]
    if config.dtype not in known:
        raise CapacityError(f"dtype {config.dtype!r} is not supported on a GPU: use one of {', '.join(known)}")
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise CapacityError(f"max_model_len {config.max_model_len} is more than the model's {spec.max_position}")


def _buckets(max_batch_tokens: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: powers of two, multiples of 128 from there on, and wider steps above 2,048."""
    if max_batch_tokens < 1:
        raise CapacityError("max_batch_tokens must be at least 1")
    sizes = [1 << power for power in range(7)] + list(range(128, 2049, 128))
    while sizes[-1] < max_batch_tokens:
        sizes.append(sizes[-1] + max(512, 1 << (sizes[-1].bit_length() - 3)))
    return (*(size for size in sizes if size < max_batch_tokens), max_batch_tokens)


def _graph_key(rows: int, has_prefill: bool) -> GraphKey:
    """Above _NO_PREFILL_ROWS an idle prefill launch costs less than another graph."""
    return GraphKey(rows, has_prefill or rows > _NO_PREFILL_ROWS)


def _graph_keys(buckets: Sequence[int]) -> list[GraphKey]:
    """All graphs of these batch sizes, largest first."""
    sizes = sorted(buckets, reverse=True)
    return list(dict.fromkeys(_graph_key(rows, prefill) for rows in sizes for prefill in (True, False)))
