"""A short profile of a tiny model on a real GPU."""

from __future__ import annotations

import math
import time

import pytest
import torch

from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.power_meter import NvmlCard
from worker.profile_cuda import CudaDevice
from worker.profile_device import Bench
from worker.profile_points import Scope, bursts
from worker.profiler import measure
from worker.steady_batch import SteadyMix

pytestmark = pytest.mark.gpu


def test_a_short_profile_on_a_gpu(random_model):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    shapes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 512}
    folder = random_model(**shapes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024)
    config = WorkerConfig(folder, device="cuda", max_batch_tokens=512, max_slots=512, page_size=64, num_pages=4000)
    loaded = load_model(config, lambda what, share: None, (512,))
    bench = Bench(loaded, SteadyMix(512, 256, 300, 200))
    scope = Scope(bench.operators, bench.model.num_sms, (256, 512))
    bench.prepare(bursts(scope))
    began = time.monotonic()
    found = measure(CudaDevice(bench, NvmlCard()), scope, began + 60)
    assert time.monotonic() - began < 75
    assert found.pairs
    for reading in (*found.alone.values(), *(each for pair in found.pairs.values() for each in pair)):
        assert 0 < reading.time_us < 1e4
        assert math.isfinite(reading.time_us)
        assert reading.watts is not None
        assert 20 < reading.watts < 2000
    assert found.spread < 0.3
