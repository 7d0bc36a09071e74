"""What is decided before a model runs on a GPU: batch sizes, graphs, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, sequential
from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_limits import batch_sizes_of, check
from worker.cuda_loading import load_model
from worker.cuda_model import GraphKey
from worker.executor import CapacityError
from worker.folded_norms import fold_norms


@given(st.integers(1, 8192), st.data())
def test_every_batch_has_a_bucket_that_wastes_little(most, data):
    sizes = batch_sizes_of(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    rows = data.draw(st.integers(1, most))
    bucket = next(size for size in sizes if size >= rows)
    assert bucket <= max(2 * rows, 128)
    assert bucket - rows < max(128, rows / 16)
    assert len(sizes) < 56


def test_each_batch_finds_its_graph_and_there_are_few(random_model):
    sizes = batch_sizes_of(2048)
    config = WorkerConfig(random_model("llama"), dtype="float32", max_slots=8, page_size=16, num_pages=32)
    model = load_model(config, lambda what, share: None, [1]).model
    keys = {model.sequential_key(rows, prefill) for rows in sizes for prefill in (True, False)}
    assert len(keys) <= 32
    assert {key.rows for key in keys} == set(sizes)
    assert all(GraphKey(rows, True) in keys for rows in sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size"),
        ({"max_model_len": 9999}, "max_model_len"),
        ({"page_size": 96}, "block-size 96"),
        ({"max_batch_tokens": 10**18}, "max-num-batched-tokens 1000000000000000000"),
        ({"page_size": 1, "max_slots": 2**24}, "page table of 2147483648 entries"),
        ({"hidden_size": 36}, "hidden_size 36"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"vocab_size": 600_000}, "vocabulary"),
    ],
)
def test_what_a_gpu_cannot_run_is_refused_wherever_it_is_asked(tmp_path, changes, message):
    model = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    model |= {"architectures": ["LlamaForCausalLM"], "vocab_size": 99, "max_position_embeddings": 128, "head_dim": 8}
    options = {name: value for name, value in changes.items() if name not in model}
    (tmp_path / "config.json").write_text(json.dumps(model | {k: v for k, v in changes.items() if k in model}))
    with pytest.raises(CapacityError, match=message):
        check(WorkerConfig(tmp_path, device="cuda", **options), ModelSpec.from_folder(tmp_path))


@pytest.mark.parametrize(("width", "dtype", "reason"), [(80, "float16", "bfloat16"), (84, "auto", "multiples of 8")])
def test_a_schedule_with_norms_that_cannot_be_folded_is_refused_before_anything_is_loaded(
    random_model, width, dtype, reason
):
    folder = random_model("llama", intermediate_size=width)
    spec = ModelSpec.from_folder(folder)
    schedule = sequential(layer_operators(spec), 64)
    config = WorkerConfig(folder, device="cuda", dtype=dtype, schedules=(schedule,))
    check(config, spec)
    with pytest.raises(InvalidScheduleError, match=f"cannot be folded: .*{reason}"):
        check(replace(config, schedules=(fold_norms(schedule),)), spec)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 128])
def test_pages_that_a_tile_of_keys_divides_or_holds_are_taken(random_model, page_size):
    folder = random_model("llama")
    check(WorkerConfig(folder, device="cuda", page_size=page_size), ModelSpec.from_folder(folder))


def test_too_little_memory_is_one_clear_line(random_model, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("worker.cuda_loading.load_weights", full)
    with pytest.raises(CapacityError, match="--max-num-batched-tokens"):
        load_model(WorkerConfig(random_model("llama"), dtype="float32"), lambda what, share: None)


def test_without_a_gpu_the_executor_says_so(tmp_path, monkeypatch, random_model):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapacityError, match="no CUDA GPU"):
        CudaExecutor(WorkerConfig(random_model("llama"), device="cuda"))


def test_a_gpu_older_than_hopper_is_refused(monkeypatch, random_model):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(CapacityError, match="A100 is older than Hopper"):
        CudaExecutor(WorkerConfig(random_model("llama"), device="cuda"))


@pytest.mark.parametrize(("lengths", "expected"), [((None, None), 64), ((16, 16), 64), ((300, 300), 10)])
def test_expected_lengths_bound_the_batch_by_what_memory_keeps_full(random_model, lengths, expected):
    config = WorkerConfig(
        random_model("llama"),
        dtype="float32",
        max_batch_tokens=64,
        max_slots=8,
        page_size=16,
        num_pages=150,
        expected_input_len=lengths[0],
        expected_output_len=lengths[1],
    )
    executor = CudaExecutor(config)
    assert executor.capacity.max_batch_tokens == expected
    executor.close()


def test_schedules_for_larger_batches_than_memory_keeps_full_are_named(random_model, caplog):
    folder = random_model("llama")
    operators = layer_operators(ModelSpec.from_folder(folder))
    schedules = tuple(replace(sequential(operators, rows), name=f"mine-{rows}") for rows in (8, 64))
    limits = {"max_batch_tokens": 64, "max_slots": 8, "page_size": 16, "num_pages": 150, "schedules": schedules}
    expected = {"expected_input_len": 300, "expected_output_len": 300}
    executor = CudaExecutor(WorkerConfig(folder, dtype="float32", **limits, **expected))
    assert executor.capacity.max_batch_tokens == 10
    assert [record.getMessage() for record in caplog.records] == [
        "B_dense is 10 for the lengths expected: mine-64 will not run"
    ]
    executor.close()


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"max_model_len": 100, "num_pages": 4}, "KV cache of 64 tokens"), ({"num_pages": 0}, "holds 0 token")],
)
def test_more_tokens_for_a_request_than_there_are_pages_for_are_refused_as_on_a_cpu(random_model, limits, message):
    with pytest.raises(CapacityError, match=message):
        CudaExecutor(WorkerConfig(random_model("llama"), dtype="float32", page_size=16, **limits))


def test_a_fault_of_the_device_does_not_keep_an_executor_from_closing(random_model, monkeypatch):
    def fault():
        raise RuntimeError("an illegal memory access was encountered")

    executor = CudaExecutor(WorkerConfig(random_model("llama"), dtype="float32", max_slots=4, num_pages=20))
    executor._cuda = True
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    executor.close()
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = executor.model
