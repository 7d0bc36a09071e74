"""Schedules on the GPU executor: sequential, nano-batched and overlapped ones give the same tokens in the same kernels.

On a CPU the same executor runs the reference kernels, lane after lane.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, InvalidScheduleError, PipelineSchedule, nanobatch_only, sequential
from autosearch.schedule_store import read_folder
from autosearch.specs import ModelSpec
from scheduler.loop import EngineLoop
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_loading import check
from worker.executor import CapacityError
from worker.folded_norms import fold_norms

ROWS, SLOTS = 160, 12
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
KERNELS = {"decode_attention": "4x4", **dict.fromkeys(("qkv", "o", "up_gate", "down"), "128x256")}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def same_kernels(schedule: PipelineSchedule) -> PipelineSchedule:
    """Whatever part of the device an operation has."""
    operations = tuple(replace(op, kernel=KERNELS.get(op.operator, "")) for op in schedule.operations)
    return replace(schedule, operations=operations)


def schedules(folder) -> dict[str, PipelineSchedule]:
    operators = layer_operators(ModelSpec.from_folder(folder))
    return {
        "sequential": sequential(operators, ROWS),
        "nano-batches": nanobatch_only(operators, ROWS, 3),
        # The cut lies within the decodes, at their end, and within the prefill rows.
        **{f"overlapped at {cut}": decode_beside(operators, ROWS, cut, 0.5) for cut in (4, SLOTS, 100)},
        "little beside attention": decode_beside(operators, ROWS, SLOTS, 0.25, num_beside=1),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the latter has biases
@pytest.mark.parametrize("device", DEVICES)
def test_folded_norms_give_the_same_tokens_in_any_schedule(device, family, random_model):
    """To each other, and on a CPU, where nothing is rounded, to norms that are passes of their own."""
    folder = random_model(family, **SHAPE, max_position_embeddings=512)
    seen = {}
    for name, schedule in schedules(folder).items():
        folded = fold_norms(replace(schedule, name=name.replace(" ", "-")))
        decode = tuple(
            replace(op, kernel="4x4") if op.operator == "decode_attention" else op for op in folded.operations
        )
        seen[name], num_overlapped = run(config_for(folder, device, [replace(folded, operations=decode)]))
        assert num_overlapped > 2, name
    assert all(tokens == seen["sequential"] for tokens in seen.values())
    if device == "cpu":
        assert seen["sequential"] == run(config_for(folder, device))[0]


def run(config: WorkerConfig) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how many iterations ran by another schedule than the sequential one."""
    executor = CudaExecutor(config)
    draw = torch.Generator().manual_seed(1)
    lengths = [1, 16, 17, 63, 65, 130, 200, 40, 90]
    requests = [
        NewRequest(
            f"r{number}",
            tuple(torch.randint(0, 101, (length,), generator=draw).tolist()),
            SamplingParams(max_tokens=12, temperature=0.0),
        )
        for number, length in enumerate(lengths)
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    left, num_overlapped = set(tokens), 0

    def emit(batch) -> None:
        nonlocal num_overlapped
        num_overlapped += batch.stats.overlapped
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            tokens[name].append(token)
        left.difference_update(end.request_id for end in batch.ends)
        if not left:
            loop.stop()

    loop = EngineLoop(Scheduler(SchedulerConfig(), executor.capacity), executor, emit, 60.0)
    loop.submit(requests)
    loop.run()
    executor.close()
    return tokens, num_overlapped


def config_for(folder, device: str, schedules=()) -> WorkerConfig:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    limits = {"max_batch_tokens": ROWS, "max_slots": SLOTS, "page_size": 16, "num_pages": 400}
    dtype = "float32" if device == "cpu" else "bfloat16"
    return WorkerConfig(folder, device=device, dtype=dtype, schedules=tuple(schedules), **limits)


@pytest.mark.parametrize("device", DEVICES)
def test_all_schedules_give_the_same_tokens(device, random_model):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    seen = {}
    for name, schedule in schedules(folder).items():
        seen[name], num_overlapped = run(config_for(folder, device, [same_kernels(replace(schedule, name=name))]))
        assert num_overlapped > 2, name
    assert all(tokens == seen["sequential"] for tokens in seen.values())


def test_only_batches_that_were_measured_run_by_a_measured_schedule(random_model):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    schedule = replace(
        schedules(folder)["overlapped at 12"],
        decode_share=0.08,
        mean_context=100.0,
        prefill_pairs=1e4,
        measured=Figures(100.0, 1040.0, 1000.0),
    )
    _, some = run(config_for(folder, "cpu", [schedule]))
    slower = replace(schedule, name="slower", measured=Figures(100.0, 990.0, 1000.0))
    _, none = run(config_for(folder, "cpu", [slower]))
    assert some > 0
    assert none == 0


def test_built_in_nano_batches_run_too(random_model):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    expected, none = run(config_for(folder, "cpu"))
    tokens, num_overlapped = run(replace(config_for(folder, "cpu"), nano_batches=2))
    assert tokens == expected
    assert none == 0 < num_overlapped


def test_schedules_that_cannot_run_are_refused_before_anything_is_loaded(random_model):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    spec = ModelSpec.from_folder(folder)
    operators = layer_operators(spec)
    config = config_for(folder, "cpu")

    def refused(schedule: PipelineSchedule, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            check(replace(config, schedules=(schedule,)), spec)

    refused(sequential(operators, 2 * ROWS), CapacityError, "raise --max-num-batched-tokens")
    refused(sequential(operators[:-1], ROWS), InvalidScheduleError, "down covers 0")
    half = replace(sequential(operators, ROWS), operations=fold_norms(sequential(operators, ROWS)).operations[:3])
    rest = sequential(operators, ROWS).operations[3:]
    refused(replace(half, operations=(*half.operations, *rest)), InvalidScheduleError, "everywhere or nowhere")
    refused(nanobatch_only(operators, ROWS, 16), InvalidScheduleError, "more than 15 ranges")


def test_two_schedules_of_one_name_are_told_apart_or_refused(random_model, tmp_path):
    """Files by their own names; within a process a second one of a name is not taken for the first."""
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    operators = layer_operators(ModelSpec.from_folder(folder))
    expected, _ = run(config_for(folder, "cpu"))
    for rows in (64, ROWS):
        path = tmp_path / f"of {rows}.json"
        path.write_text(replace(decode_beside(operators, rows, rows // 2, 0.5), name="mine").to_json())
    tokens, num_overlapped = run(config_for(folder, "cpu", read_folder(tmp_path)))
    assert tokens == expected
    assert num_overlapped > 2
    executor = CudaExecutor(config_for(folder, "cpu"))
    first, second = (replace(decode_beside(operators, ROWS, cut, 0.5), name="mine") for cut in (64, 100))
    executor.model.use_schedules([first, first])
    with pytest.raises(InvalidScheduleError, match="two schedules are named 'mine'"):
        executor.model.use_schedules([second])
    executor.close()
