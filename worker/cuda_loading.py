"""Loading a model on one GPU: weights, kernels, memory, graphs, in this order and before the first plan.

With device "cpu" the same is loaded for the reference kernels, without graphs. Knows nothing of plans or of what
happens after the start.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from autosearch.workload import fitted_batch_tokens
from scheduler.plan import EngineCapacity, ScheduleBucket
from worker.config import CPU_KV_CACHE_BYTES, WorkerConfig
from worker.cuda_layers import interleave_gates
from worker.cuda_limits import DTYPES, batch_sizes_of, check, schedules_of
from worker.cuda_model import CudaModel, GraphKey, parameter_bytes
from worker.cuda_schedules import CudaSchedules
from worker.device_batch import RANDOM_ROWS, BatchLimits
from worker.device_memory import GIB, DeviceMemory
from worker.executor import CapacityError, fitted_model_len
from worker.graph_memory import capture_within
from worker.kernel_set import KernelSet, ReferenceKernels
from worker.kv_cache import KVCache, KVCacheShape
from worker.models.loading import load_weights
from worker.page_copy_cuda import take_staging
from worker.schedule_choice import may_be_chosen
from worker.schedule_sets import ScheduleRules, ScheduleSets
from worker.sharding import shard
from worker.triton_kernels import TritonKernels
from worker.weights import DUMMY_SCALE, DummySource, Progress, SafetensorsSource, TensorPart
from worker.work_lists import prefill_tokens

log = logging.getLogger(__name__)

SAMPLE_SIZES = (16, 64, RANDOM_ROWS)  # random rows are padded to one of these: no shape is met first while serving
_GRAPH_BYTES = 32 << 20  # of one graph, more than any was seen to take
_CAPTURE_BYTES = 128 << 20  # of all together: cuBLAS's workspaces for the stream that they are captured on
_EXCHANGE_BYTES = 128 << 20  # cuBLAS's workspaces for the thread and streams that prepare schedules while serving
_OLDEST = (9, 0)  # compute capability: TMA, programmatic dependent launch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and the limits that were found."""

    spec: ModelSpec
    model: CudaModel
    limits: BatchLimits
    capacity: EngineCapacity
    dtype: torch.dtype  # of weights, activations and KV
    cache: KVCache
    staging: torch.Tensor | None  # for pages on their way to and from a KV store (page_copy_cuda)
    memory: DeviceMemory | None  # None without a GPU
    schedules: ScheduleSets


def load_model(config: WorkerConfig, progress: Progress, batch_sizes: Sequence[int] = ()) -> LoadedModel:
    """batch_sizes: ascending, those to have graphs of; empty: those for serving.

    Raises UnsupportedModelError, CapacityError or ModelLoadError.
    """
    try:
        with torch.inference_mode():
            return _Loader(config, progress, batch_sizes).load()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            "the GPU's memory does not hold the model and the buffers of its largest batch: use a smaller model, lower "
            f"--max-num-batched-tokens or --max-num-seqs, or end what else runs there: {str(error).partition('. ')[0]}"
        ) from None


class DeviceDummySource(DummySource):
    """Dummy weights made on the device: as DummySource defines them, but with the device's generator."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__(seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    def read(self, part: TensorPart, start: int, stop: int) -> torch.Tensor:
        shape = (*part.shape[: part.dim], stop - start, *part.shape[part.dim + 1 :])
        values = torch.empty(shape, device=self._generator.device)
        return values.uniform_(-DUMMY_SCALE, DUMMY_SCALE, generator=self._generator)


class _Loader:
    """Loads one model once."""

    def __init__(self, config: WorkerConfig, progress: Progress, batch_sizes: Sequence[int]) -> None:
        self._config, self._progress = config, progress
        self._spec = spec = ModelSpec.from_folder(config.model_dir)
        check(config, spec)
        self._device = torch.device(config.device)
        self._cuda = self._device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise CapacityError("there is no CUDA GPU here: `nanoflow doctor` says what is missing, or use the CPU")
        if self._cuda and torch.cuda.get_device_capability(self._device) < _OLDEST:
            name = torch.cuda.get_device_name(self._device)
            raise CapacityError(f"{name} is older than Hopper, whose instructions the kernels use: use the CPU")
        if self._cuda and config.kv_store is not None and importlib.util.find_spec("cupy") is None:
            raise CapacityError("--kv-store on a GPU needs CuPy: pip install cupy-cuda13x, or the one of your CUDA")
        self._dtype = DTYPES[config.dtype]
        self._schedules = schedules_of(config, spec)
        planned = {schedule.batch_tokens for schedule in self._schedules}
        self._buckets = tuple(sorted({*(batch_sizes or batch_sizes_of(config.max_batch_tokens)), *planned}))
        self._max_len = min(config.max_model_len or spec.max_position, spec.max_position)
        group = spec.num_heads // spec.num_kv_heads
        self._limits = BatchLimits(
            rows=self._buckets[-1],
            slots=config.max_slots,
            page_size=config.page_size,
            pages_per_slot=-(-self._max_len // config.page_size),
            prefill_tokens=prefill_tokens(group),
            decode_target=max(1, 4 * 132 // spec.num_kv_heads) * 2,
        )
        self._page_bytes = self._shape(1).elements_per_page * self._dtype.itemsize
        self._staging: torch.Tensor | None = None
        self._memory: DeviceMemory | None = None

    def load(self) -> LoadedModel:
        config, spec, device = self._config, self._spec, self._device
        self._tell_foreign()
        source = (
            DeviceDummySource(device, config.seed)
            if config.load_format == "dummy"
            else SafetensorsSource(config.model_dir)
        )
        weights = load_weights(spec, shard(spec, 1, 0), source, self._dtype, device, self._progress)
        interleave_gates(spec, weights)
        self._make_models(weights)
        self._model.use_schedules(self._served)
        if self._cuda and config.kv_store is not None:
            self._staging = take_staging(self._page_bytes, device)
        if self._cuda:
            self._warm_up(self._graph_keys(self._buckets, self._served), self._progress)
        num_pages = self._num_pages(parameter_bytes(weights))
        max_model_len = fitted_model_len(config.max_model_len, spec.max_position, num_pages * config.page_size)
        cache = KVCache(self._shape(num_pages), self._dtype, device)
        self._fit_buckets(num_pages)
        self._model.use_cache(cache)  # after the last warm-up, which has one of its own
        pool = self._capture() if self._cuda else None
        capacity = EngineCapacity(
            num_pages=num_pages,
            page_size=config.page_size,
            max_slots=config.max_slots,
            max_model_len=max_model_len,
            buckets=tuple(ScheduleBucket(number, rows) for number, rows in enumerate(self._buckets)),
        )
        runner = CudaSchedules(self._model, self._twin, pool)
        sets = ScheduleSets(self._rules, runner, self._schedules)
        if self._twin:
            self._progress("rehearsing an exchange of schedules", 0.0)
            sets.rehearse(runner.rehearse)
        self._progress("ready", 1.0)
        return LoadedModel(
            spec,
            self._model,
            self._limits,
            capacity,
            self._dtype,
            cache,
            self._staging,
            self._memory,
            sets,
        )

    def _make_models(self, weights: dict[str, torch.Tensor]) -> None:
        """The one that serves, and its twin where schedules may be exchanged later."""
        spec, limits = self._spec, self._limits
        kernels: KernelSet = ReferenceKernels()
        self._twin: CudaModel | None = None
        if self._cuda:
            group = spec.num_heads // spec.num_kv_heads
            kernels = TritonKernels(self._device, spec.num_kv_heads, group, spec.head_dim, limits.max_partials)
        self._model = CudaModel(spec, weights, limits, kernels, self._max_len, self._device)
        if isinstance(kernels, TritonKernels) and self._config.schedule_room:
            self._twin = self._model.twin(kernels.twin())
            self._twin.use_cache(KVCache(self._shape(1), self._dtype, self._device))

    @property
    def _rules(self) -> ScheduleRules:
        """For schedules that are to take the place of those that serve."""
        device = torch.cuda.get_device_name(self._device) if self._cuda else "cpu"
        return ScheduleRules(self._config.model_dir.name, device, frozenset(self._buckets), self._config.schedule_room)

    @property
    def _served(self) -> list[PipelineSchedule]:
        """Of the schedules, those to have graphs of."""
        return [schedule for schedule in self._schedules if may_be_chosen(schedule)]

    def _tell_foreign(self) -> None:
        """A schedule is faster than the sequential one where it was measured: elsewhere that is only a guess."""
        here = self._rules.device
        for schedule in self._served:
            if schedule.measured is not None and schedule.gpu != here:
                where = schedule.gpu or "an unknown GPU"
                log.warning("%s was measured on %s, not on %s: `nanoflow tune` measures it", schedule.name, where, here)

    def _warm_up(self, keys: Sequence[GraphKey], progress: Progress) -> None:
        """Compile and choose all kernels, the largest batch first, on one page of cache."""
        self._model.use_cache(KVCache(self._shape(1), self._dtype, self._device))
        torch.cuda.reset_peak_memory_stats()
        for number, key in enumerate(keys):
            progress("compiling kernels", number / len(keys))
            self._model.run(key)
        for size in SAMPLE_SIZES:
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
            self._warm_up(self._graph_keys([fitted]), lambda what, share: None)
        self._buckets = (*(rows for rows in self._buckets if rows < fitted), fitted)
        too_large = [schedule.name for schedule in config.schedules if schedule.batch_tokens > fitted]
        if too_large:
            log.warning("B_dense is %d for the lengths expected: %s will not run", fitted, ", ".join(too_large))
        self._schedules = tuple(schedule for schedule in self._schedules if schedule.batch_tokens <= fitted)

    def _graph_keys(self, buckets: Sequence[int], schedules: Sequence[PipelineSchedule] = ()) -> list[GraphKey]:
        """All graphs of these batch sizes, largest first."""
        keys = [self._model.sequential_key(rows, prefill) for rows in buckets for prefill in (True, False)]
        keys += [GraphKey(schedule.batch_tokens, True, schedule.name) for schedule in schedules]
        return sorted(dict.fromkeys(keys), key=lambda key: -key.rows)

    def _capture(self) -> Any:
        """All graphs; the pool of their memory."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        keys, pool = self._graph_keys(self._buckets, self._served), torch.cuda.graph_pool_handle()
        assert self._memory is not None, "sized by now"

        def capture(number: int) -> None:
            self._progress("capturing graphs", number / len(keys))
            self._model.capture(keys[number], pool)

        taken = capture_within(self._memory, range(len(keys)), capture, lambda: torch.cuda.mem_get_info()[0])
        log.info("%s; %d graphs took %.2f", self._memory, len(keys), taken / GIB)
        return pool

    def _shape(self, num_pages: int) -> KVCacheShape:
        spec = self._spec
        return KVCacheShape(spec.num_layers, num_pages, spec.num_kv_heads, self._config.page_size, spec.head_dim)

    def _num_pages(self, weight_bytes: int) -> int:
        config, page_bytes = self._config, self._page_bytes
        if self._cuda:
            self._memory = self._list_memory(weight_bytes)
        num_pages = config.num_pages
        if num_pages is None:
            room = config.kv_cache_bytes
            if room is None:
                room = CPU_KV_CACHE_BYTES if self._memory is None else self._memory.room
            num_pages = min(room // page_bytes, config.max_slots * self._limits.pages_per_slot)
            if num_pages < 1:
                raise CapacityError(
                    f"{room} bytes for the KV cache do not hold one page of {page_bytes}: {self._memory}"
                )
        if self._memory is not None:
            if num_pages * page_bytes > self._memory.room:
                raise CapacityError(
                    f"a KV cache of {num_pages * page_bytes} bytes does not fit, lower --num-gpu-blocks-override or "
                    f"--kv-cache-memory-bytes: {self._memory}"
                )
            self._memory = replace(self._memory, kv_cache=num_pages * page_bytes)
        return num_pages

    def _list_memory(self, weight_bytes: int) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        staging = 0 if self._staging is None else self._staging.nbytes
        num_schedules = max(len(self._served), self._config.schedule_room)
        return DeviceMemory(
            total=total,
            spared=int(total * (1 - self._config.gpu_memory_utilization)),
            others=total - free - reserved,
            weights=weight_bytes,
            buffers=reserved - weight_bytes - staging,
            staging=staging,
            # Twice: for launches outside of graphs and, in the graphs' own pool, for those inside.
            working=2 * (torch.cuda.max_memory_allocated() - allocated),
            graphs=(len(self._graph_keys(self._buckets)) + num_schedules) * _GRAPH_BYTES
            + _CAPTURE_BYTES
            + (_EXCHANGE_BYTES if self._twin else 0),
        )
