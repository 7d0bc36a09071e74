"""The GPU executor against the CPU worker: greedy tokens of a trained model, mixed chunks and decodes.

Without a GPU the same code runs on the reference kernels in fp32.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from scheduler.loop import EngineLoop
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.executor import LocalExecutor, Worker

SHARED = Path(os.environ.get("NANOFLOW_SHARED", Path(__file__).parents[2].parent / "shared"))
MODEL = SHARED / "models" / "stories260K"


def generate(executor, requests: list[NewRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    open_requests = set(tokens)

    def emit(batch) -> None:
        for request_id, token in zip(batch.request_ids, batch.token_ids.tolist()):
            tokens[request_id].append(token)
        for end in batch.ends:
            assert end.finish_reason == "length", end
            open_requests.discard(end.request_id)
        if not open_requests:
            loop.stop()

    loop = EngineLoop(Scheduler(SchedulerConfig(), executor.capacity), executor, emit, 60.0)
    loop.submit(requests)
    loop.run()
    executor.close()
    return tokens


def make_requests(temperature: float) -> list[NewRequest]:
    torch.manual_seed(3)
    lengths = [1, 5, 16, 17, 63, 64, 65, 130]
    return [
        NewRequest(
            f"r{n}",
            tuple(torch.randint(3, 500, (length,)).tolist()),
            SamplingParams(max_tokens=40, temperature=temperature, top_k=20, top_p=0.9, seed=n),
        )
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_equal_the_cpu_worker(device, temperature):
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is absent")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.set_num_threads(1)
    common = {"model_dir": MODEL, "max_batch_tokens": 48, "max_slots": 8, "page_size": 16, "num_pages": 120}
    worker = Worker(WorkerConfig(**common))
    worker.load()
    expected = generate(LocalExecutor(worker), make_requests(temperature))
    # fp16 keeps ten bits: a trained model's margins are wider nearly everywhere.
    dtype = "float32" if device == "cpu" else "float16"
    found = generate(CudaExecutor(WorkerConfig(**common, device=device, dtype=dtype)), make_requests(temperature))
    if device == "cpu":
        assert found == expected
    else:
        first = [next((i for i, (a, b) in enumerate(zip(found[r], expected[r])) if a != b), 40) for r in expected]
        assert sum(first) > 0.8 * 40 * len(first), first


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_page_changes_that_do_not_fit_the_block_change_nothing(monkeypatch, device):
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is absent")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.set_num_threads(1)
    dtype = "float32" if device == "cpu" else "float16"
    config = WorkerConfig(
        MODEL, device=device, dtype=dtype, max_batch_tokens=48, max_slots=8, page_size=4, num_pages=480
    )
    expected = generate(CudaExecutor(config), make_requests(0.0))
    monkeypatch.setattr("worker.device_batch.MAX_CHANGES", 2)
    assert generate(CudaExecutor(config), make_requests(0.0)) == expected


def test_more_random_rows_than_a_piece_among_greedy_ones(monkeypatch):
    monkeypatch.setattr("worker.cuda_executor.RANDOM_ROWS", 16)
    monkeypatch.setattr("worker.cuda_executor.SAMPLE_SIZES", (4, 16))
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is absent")
    torch.set_num_threads(1)
    common = {"model_dir": MODEL, "max_batch_tokens": 98, "max_slots": 49, "page_size": 16, "num_pages": 49}
    kinds = [(0.8, 0, 1.0), (0.0, 0, 1.0), (1.0, 40, 0.9), (1.2, 0, 0.7), (1.0, 1, 1.0), (0.9, 0, 0.99), (2.0, 5, 1.0)]
    requests = [
        NewRequest(
            f"r{n}",
            (1, 3 + n),
            SamplingParams(max_tokens=3, temperature=temperature, top_k=top_k, top_p=top_p, seed=n),
        )
        for n in range(49)
        for temperature, top_k, top_p in [kinds[n % 7]]
    ]
    worker = Worker(WorkerConfig(**common))
    worker.load()
    expected = generate(LocalExecutor(worker), requests)
    assert generate(CudaExecutor(WorkerConfig(**common, device="cpu", dtype="float32")), requests) == expected
