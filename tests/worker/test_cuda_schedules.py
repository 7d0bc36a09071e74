"""Schedules on the GPU executor: sequential, nano-batched and overlapped ones give the same tokens in the same kernels.

On a CPU the same executor runs the reference kernels, lane after lane.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, InvalidScheduleError, PipelineSchedule, nanobatch_only, sequential
from autosearch.schedule_store import read_folder
from autosearch.specs import ModelSpec
from scheduler.loop import EngineLoop
from scheduler.plan import StepStats
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_limits import check
from worker.cuda_loading import _EXCHANGE_BYTES, _GRAPH_BYTES
from worker.executor import CapacityError
from worker.folded_norms import fold_norms
from worker.kernel_set import ReferenceKernels
from worker.schedule_bench import sequential_ways
from worker.schedule_sets import SchedulesRefusedError

ROWS, SLOTS = 160, 12
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
KERNELS = {"decode_attention": "4x4", **dict.fromkeys(("qkv", "o", "up_gate", "down"), "128x256")}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


BEFORE = ((1, 4), (2, 100), (4, 4), (4, 100))


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
        "an odd part for attention": decode_beside(operators, ROWS, SLOTS, 68 / 132),
        # The cut lies within the decodes and within a prompt, whose first rows come before attention.
        **{f"{n} before, {cut}": decode_beside(operators, ROWS, cut, 0.5, 4, num_before=n) for n, cut in BEFORE},
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


def test_a_sequential_schedule_with_folded_norms_serves_where_the_kernels_want_it(random_model, monkeypatch):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    expected, _ = run(config_for(folder, "cpu"))
    asked = []

    def folds_norms(self, rows, shapes):
        asked.append((rows, tuple(shapes)))
        return rows == ROWS

    monkeypatch.setattr(ReferenceKernels, "folds_norms", folds_norms)
    assert run(config_for(folder, "cpu")) == (expected, 0)  # and it counts as sequential
    assert {rows for rows, _ in asked} >= {ROWS}
    assert {shapes for _, shapes in asked} == {((512, 256), (256, 256), (768, 256), (256, 384))}
    model = CudaExecutor(config_for(folder, "cpu")).model
    assert [model.sequential_key(rows, True).folded for rows in (ROWS, ROWS - 32)] == [True, False]
    assert sequential_ways(model, ROWS)[0].name == f"sequential-{ROWS}-folded"
    half = CudaExecutor(replace(config_for(folder, "cpu"), dtype="float16")).model
    assert not half.sequential_key(ROWS, True).folded
    assert [way.name for way in sequential_ways(half, ROWS)] == [f"sequential-{ROWS}"]


def test_norms_are_not_folded_where_rows_are_no_whole_16_bytes(random_model, monkeypatch):
    """The kernels that fold read them by TMA: such a model is served, tuned and rehearsed without."""
    monkeypatch.setattr(ReferenceKernels, "folds_norms", lambda *shapes: True)
    folder = random_model("llama", **{**SHAPE, "intermediate_size": 172}, max_position_embeddings=512)
    executor = CudaExecutor(config_for(folder, "cpu"))
    model, plain = executor.model, sequential(layer_operators(executor.spec), ROWS)
    assert not model.sequential_key(ROWS, True).folded
    assert sequential_ways(model, ROWS) == [plain]
    with pytest.raises(InvalidScheduleError, match="no multiples of 8"):
        model.use_schedules([fold_norms(plain)])
    executor.close()


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


def run_exchanging(config: WorkerConfig, requests: list[NewRequest], sets, pause_s: float = 0.0) -> Exchanged:
    """All requests, while the engine gets one set of schedules after the other; without sets, just all requests.

    pause_s: after each iteration, where they would be over before a set is ready.
    """
    executor = CudaExecutor(config)
    found, free = Exchanged({request.request_id: [] for request in requests}, [], 0, 0), free_memory(executor)
    left = set(found.tokens)

    def emit(batch) -> None:
        found.steps.append(batch.stats)
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            found.tokens[name].append(token)
        left.difference_update(end.request_id for end in batch.ends)
        time.sleep(pause_s)

    def exchange() -> None:
        for schedules in itertools.cycle(sets):
            if not left:
                break
            executor.prepare_schedules(found.num_exchanges, schedules)
            loop.use_schedules(found.num_exchanges).result(60)
            found.num_exchanges += 1
            found.bytes_taken = max(found.bytes_taken, free - free_memory(executor))

    scheduler = SchedulerConfig(enable_prefix_caching=False, max_waiting=len(requests))
    loop = EngineLoop(Scheduler(scheduler, executor.capacity), executor, emit, 60.0)
    loop.submit(requests)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        exchange()
        while left and thread.is_alive():
            time.sleep(0.01)
    finally:
        loop.stop()
        thread.join(60)
        executor.close()
    assert not left
    return found


@dataclass
class Exchanged:
    """What came of requests whose engine got other schedules meanwhile."""

    tokens: dict[str, list[int]]
    steps: list[StepStats]
    num_exchanges: int
    bytes_taken: int  # of the GPU's memory at most, beside what there was at the start


def free_memory(executor: CudaExecutor) -> int:
    """Of the GPU; always the same on a CPU."""
    return torch.cuda.mem_get_info()[0] if executor.is_cuda else 0


def measured_here(schedule: PipelineSchedule, device: str, shares, mean_context: float) -> list[PipelineSchedule]:
    """As if it had been measured to be faster, for batches with these shares of decodes."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    gpu = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    figures, pairs = Figures(100.0, 1040.0, 1000.0), 1e4
    measured = replace(schedule, gpu=gpu, mean_context=mean_context, prefill_pairs=pairs, measured=figures)
    return [replace(measured, name=f"at {share}", decode_share=share) for share in shares]


def requests_of(num: int, prompt_len: int, max_tokens: int, vocab_size: int) -> list[NewRequest]:
    draw = torch.Generator().manual_seed(2)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = torch.randint(0, vocab_size, (num, prompt_len), generator=draw).tolist()
    return [NewRequest(f"r{number}", tuple(prompt), sampling) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("device", DEVICES)
def test_schedules_are_exchanged_while_requests_run_and_their_tokens_stay(device, random_model):
    """All in the same kernels, for the shares of decodes that full batches have here."""
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    operators = layer_operators(ModelSpec.from_folder(folder))
    shapes = [decode_beside(operators, ROWS, cut, share) for cut, share in ((4, 0.5), (SLOTS, 0.25), (100, 0.5))]
    sets = [measured_here(same_kernels(shape), device, (0.0, 0.05, 0.1), 70.0) for shape in shapes]
    config = config_for(folder, device, sets[0])
    requests = requests_of(60, 64, 12, 101)
    expected = run_exchanging(config, requests, ())
    found = run_exchanging(config, requests, sets, 0.0 if device == "cpu" else 0.3)
    assert found.tokens == expected.tokens
    assert found.num_exchanges > 3
    assert sum(step.overlapped for step in found.steps) == sum(step.overlapped for step in expected.steps) > 20


# Of iterations of some ms; a CPU runs the same with less, and has no promise to keep.
LONG = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
LONG |= {"num_hidden_layers": 16, "vocab_size": 32000}
SHORT = {**SHAPE, "num_hidden_layers": 2, "vocab_size": 101}


SHARES = (0.0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize("device", DEVICES)
def test_no_iteration_waits_for_an_exchange(device, tmp_path):
    """The first exchange compiles kernels and makes SM partitions, later ones only capture. Says what it saw."""
    is_gpu = device == "cuda"
    rows, slots, prompt_len, max_tokens, count = (2048, 512, 256, 60, 8000) if is_gpu else (ROWS, SLOTS, 128, 4, 60)
    shape = LONG if is_gpu else SHORT
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512, **shape}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}))
    operators = layer_operators(ModelSpec.from_folder(tmp_path))
    shapes = [decode_beside(operators, rows, slots, share) for share in (0.5, 0.375, 0.25)]
    sets = [measured_here(each, device, SHARES, 1.1 * prompt_len) for each in shapes]
    base = config_for(tmp_path, device)
    limits = {"max_batch_tokens": rows, "max_slots": slots, "num_pages": None if is_gpu else 400, "max_model_len": 512}
    engine = replace(base, load_format="dummy", max_schedules=8, kv_cache_bytes=(8 << 30) if is_gpu else None, **limits)
    found = run_exchanging(engine, requests_of(count, prompt_len, max_tokens, shape["vocab_size"]), sets)
    full = [step for step in found.steps if step.num_tokens == rows]
    seconds = [step.run_s + step.idle_s for step in full[2:]]
    median, longest = statistics.median(seconds), max(seconds)
    num_overlapped, num_late = sum(step.overlapped for step in full), sum(step.late for step in full)
    print(f"{found.num_exchanges} exchanges, {len(full)} full iterations, {num_overlapped} overlapped, {num_late} late")
    print(f"median {median * 1e3:.2f} ms, longest {longest * 1e3:.2f}, mean {statistics.fmean(seconds) * 1e3:.2f}")
    worst = sorted(full[2:], key=lambda step: -step.run_s - step.idle_s)[:4]
    first = next((at for at, step in enumerate(full) if step.overlapped), None)
    print(f"the first overlapped one is number {first}; the slowest:")
    for step in worst:
        times = f"{step.run_s * 1e3:.1f} ms, {step.idle_s * 1e3:.1f} idle before"
        print(f"  number {full.index(step)}: {times}{', overlapped' * step.overlapped}{', late' * step.late}")
    print(f"{found.bytes_taken >> 20} MiB taken beside the start's")
    assert found.num_exchanges > 1
    assert num_overlapped > 20
    assert found.bytes_taken <= 8 * _GRAPH_BYTES + _EXCHANGE_BYTES
    if is_gpu:
        assert longest < 3 * median


@pytest.mark.parametrize("device", DEVICES)
def test_an_exchange_that_needs_more_than_was_reserved_is_refused(device, random_model):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    shape = schedules(folder)["overlapped at 12"]
    executor = CudaExecutor(config_for(folder, device, measured_here(shape, device, (0.0,), 70.0)))
    others = [decode_beside(layer_operators(executor.spec), ROWS, cut, 0.5) for cut in (4, 100)]
    two = [replace(measured_here(other, device, (0.0,), 70.0)[0], name=str(at)) for at, other in enumerate(others)]
    with pytest.raises(SchedulesRefusedError, match="at the start memory was reserved for 2"):
        executor.prepare_schedules(1, two)
    executor.prepare_schedules(2, two[:1])
    executor.close()


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


def test_schedules_that_were_measured_elsewhere_are_named(random_model, caplog):
    folder = random_model("llama", **SHAPE, max_position_embeddings=512)
    plan = {
        "decode_share": 0.08,
        "mean_context": 100.0,
        "prefill_pairs": 1e4,
        "measured": Figures(100.0, 1040.0, 1000.0),
    }
    schedule = replace(schedules(folder)["overlapped at 12"], **plan)
    CudaExecutor(config_for(folder, "cpu", [replace(schedule, gpu="cpu")])).close()
    assert not caplog.records
    CudaExecutor(config_for(folder, "cpu", [replace(schedule, name="mine", gpu="another GPU")])).close()
    assert "mine was measured on another GPU, not on cpu" in caplog.text


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
