"""The memory that is asked for, against what really gets allocated, and refusals that name the option."""

import dataclasses

import psutil
import pytest
import torch

from worker import memory_need as module
from worker.backend import check_memory_here, open_executor
from worker.config import WorkerConfig
from worker.executor import CapacityError, Worker
from worker.kv_cache import KVCache, KVCacheShape
from worker.memory_need import memory_need
from worker.models.loading import load_weights
from worker.sharding import shard
from worker.weights import DummySource

CPU = torch.device("cpu")


def small(folder, **changes):
    fields = {"max_batch_tokens": 16, "page_size": 8, "num_pages": 8, "num_threads": 1, "load_format": "dummy"}
    return WorkerConfig(folder, **{**fields, **changes})


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_cache_are_counted_exactly(random_model, family, ranks):
    config = small(random_model(family), tensor_parallel_size=ranks)
    worker = Worker(config)
    need = memory_need(config, worker.spec, worker.capacity)
    weights = cache = 0
    for rank in range(ranks):
        part = shard(worker.spec, ranks, rank)
        loaded = load_weights(worker.spec, part, DummySource(), torch.float32, CPU)
        weights += sum(tensor.nbytes for tensor in loaded.values())
        shape = KVCacheShape(worker.spec.num_layers, 8, part.num_kv_heads, 8, worker.spec.head_dim)
        cache += sum(layer.nbytes for layer in KVCache(shape, torch.float32, CPU).layers)
    assert need.weights == weights
    assert need.kv_cache == cache
    assert need.total == need.weights + need.kv_cache + need.batch + need.requests


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pages": 10**10}, "--num-gpu-blocks-override (10000000000 KV pages)"),
        ({"num_pages": None, "kv_cache_bytes": 10**15, "max_slots": 10**9}, "--kv-cache-memory-bytes"),
        ({"max_batch_tokens": 10**11}, "--max-num-batched-tokens 100000000000"),
        ({"max_slots": 10**12}, "--max-num-seqs 1000000000000"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(random_model, changes, words):
    config = small(random_model("llama"), **changes)
    with pytest.raises(CapacityError, match=r"would take .* GiB .* GiB is available: lower it") as error:
        open_executor(config)
    assert words in str(error.value)


def test_a_model_that_does_not_fit_is_named(random_model, monkeypatch):
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 1000)
    config = small(random_model("llama"), num_pages=1, max_slots=1, max_batch_tokens=1)
    with pytest.raises(CapacityError, match=r"the weights .* would take .*smaller model"):
        check_memory_here(dataclasses.replace(config, max_model_len=8))


def test_what_fits_is_not_refused(random_model):
    config = small(random_model("llama"))
    worker = Worker(config)
    assert memory_need(config, worker.spec, worker.capacity).total < psutil.virtual_memory().available
    check_memory_here(config)
