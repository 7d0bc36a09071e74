"""What a rank on the CPU will take of memory, and whether the machine has it, before anything is allocated.

Linux promises memory that it does not have and ends some process later; and what even it refuses would be an error
that names no option. Knows nothing of GPUs, which size their cache by what is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosearch.specs import ModelSpec
from scheduler.plan import EngineCapacity
from worker.config import WorkerConfig
from worker.executor import CapacityError
from worker.host_memory import available_memory_bytes
from worker.models.parameters import model_parameters
from worker.sharding import shard

_ELEMENT_BYTES = 4  # float32
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of all ranks together, by what asks for them."""

    weights: int
    kv_cache: int  # --kv-cache-memory-bytes, --num-gpu-blocks-override
    batch: int  # --max-num-batched-tokens
    requests: int  # --max-num-seqs

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.batch + self.requests


def memory_need(config: WorkerConfig, spec: ModelSpec, capacity: EngineCapacity) -> MemoryNeed:
    """Of all ranks, which share one machine. Buffers of a step are counted roughly, the rest exactly."""
    part, ranks = shard(spec, config.tensor_parallel_size, 0), config.tensor_parallel_size
    parameters = model_parameters(spec, part, spec.tie_embeddings).values()
    weights = sum(math.prod(each.part_shape) for parts in parameters for each in parts)
    tokens = capacity.num_pages * capacity.page_size
    kv_cache = 2 * spec.num_layers * part.num_kv_heads * spec.head_dim * tokens
    widths = 4 * spec.hidden_size + 2 * (part.num_heads + part.num_kv_heads) * spec.head_dim
    widths += 3 * spec.intermediate_size // ranks * max(1, spec.experts_per_token)
    logits = min(capacity.max_slots, capacity.max_batch_tokens) * part.vocab_size
    batch = capacity.max_batch_tokens * widths + logits
    request_bytes = 8 * (capacity.max_model_len + 1) + 4 * -(-capacity.max_model_len // capacity.page_size)
    return MemoryNeed(
        weights=ranks * _ELEMENT_BYTES * weights,
        kv_cache=ranks * _ELEMENT_BYTES * kv_cache,
        batch=ranks * _ELEMENT_BYTES * batch,
        requests=ranks * capacity.max_slots * request_bytes,
    )


def check_memory(config: WorkerConfig, spec: ModelSpec, capacity: EngineCapacity) -> None:
    """Raises CapacityError where not everything fits."""
    need, available = memory_need(config, spec, capacity), available_memory_bytes()
    if need.total <= available:
        return
    cache_flag = "kv-cache-memory-bytes" if config.num_pages is None else "num-gpu-blocks-override"
    asks = {
        f"the weights ({config.model_dir.name})": need.weights,
        f"--{cache_flag} ({capacity.num_pages} KV pages)": need.kv_cache,
        f"--max-num-batched-tokens {capacity.max_batch_tokens}": need.batch,
        f"--max-num-seqs {capacity.max_slots}": need.requests,
    }
    most = max(asks, key=lambda each: asks[each])
    raise CapacityError(
        f"{most} would take {asks[most] / _GIB:.1f} GiB and all together {need.total / _GIB:.1f} GiB, but "
        f"{available / _GIB:.1f} GiB is available: "
        + ("use a smaller model or more memory" if most.startswith("the weights") else "lower it")
    )
