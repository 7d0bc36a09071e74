"""A GPU's memory as listed at the start, before the KV cache was sized, against what the device says is taken."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_model import CudaModel
from worker.device_memory import DeviceMemory

pytestmark = pytest.mark.gpu

PAGE = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 32,  # so that graphs are as large as those of LLaMA-3-8B
    "vocab_size": 101,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
PAGE_BYTES = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * 64 * PAGE * 2
ROOM = 7 << 30  # less than all requests at their longest would fill, so that memory is what decides
SLACK = 64 << 20  # what the allocator gives back between the listing and the end of the start


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_what_is_taken_is_what_was_listed(tmp_path, monkeypatch, planner, ask):
    """After the start, and when iterations of all kinds have run: what was to be spared is spared."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    gc.collect()  # executors of earlier tests: what goes meanwhile would count as room
    torch.cuda.empty_cache()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    taken, capture = [], CudaModel.capture

    def watched(model: CudaModel, key, pool) -> None:
        before = free_bytes()
        capture(model, key, pool)
        taken.append(before - free_bytes())

    monkeypatch.setattr(CudaModel, "capture", watched)
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free - ROOM) / total  # whatever else is there
    limits = {"max_batch_tokens": 448, "max_slots": 400, "page_size": PAGE, "gpu_memory_utilization": share}
    executor = CudaExecutor(WorkerConfig(tmp_path, device="cuda", dtype="float16", load_format="dummy", **limits))
    listed, free = DeviceMemory(**executor.memory_bytes), free_bytes()
    print(f"{listed}; {len(taken)} graphs took {sum(taken) >> 20} MiB, {(listed.total - free) >> 20} MiB are taken")
    assert listed.total == total
    assert listed.spared == int(listed.total * (1 - share))
    # The KV cache has all that is left, to the page.
    assert 0 <= listed.room < PAGE_BYTES
    assert listed.kv_cache == executor.capacity.num_pages * PAGE_BYTES
    # Half of what iterations work in is the graphs' own.
    assert len(taken) > 10
    assert 0 < sum(taken) <= listed.graphs + listed.working // 2
    fixed = listed.others + listed.weights + listed.buffers + listed.staging + listed.kv_cache
    assert listed.total - free > fixed - SLACK
    assert free >= listed.spared + listed.room

    class Driven:
        capacity = executor.capacity

        def execute(self, plan):
            return executor.submit(plan).result(60.0)

    asks = [ask([1 + n % 100] * (1 + n % 90), 4, temperature=0.8 * (n % 4 > 0), seed=n) for n in range(400)]
    planner(Driven()).run(asks)
    assert free_bytes() >= listed.spared + listed.room
    executor.close()
