"""Schedules are exchanged while requests run: their tokens are those they get without, on each executor."""

from __future__ import annotations

import itertools
import queue
import threading
from dataclasses import replace

import numpy as np
import pytest

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, PipelineSchedule, nanobatch_only
from autosearch.specs import ModelSpec
from scheduler.loop import EngineLoop
from scheduler.ports import ExecutorError
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.executor import LocalExecutor, Worker
from worker.schedule_sets import SchedulesRefusedError

ROWS, BUCKETS = 32, (4, 8, 16, 32)
NUM_TOKENS = 20  # of each request


def measured(schedule: PipelineSchedule, share: float, gain: float = 1.05) -> PipelineSchedule:
    figures = Figures(100.0, 1000.0 * gain, 1000.0)
    return replace(
        schedule, gpu="cpu", decode_share=share, mean_context=25.0, prefill_pairs=1e4, measured=figures, model=""
    )


def sets_for(folder, num_ranks: int = 1) -> list[list[PipelineSchedule]]:
    """Sets that cut the batch differently under the same names, for all shares of decodes."""
    operators = layer_operators(ModelSpec.from_folder(folder), num_ranks)
    shapes = [[nanobatch_only(operators, rows, count) for rows in BUCKETS] for count in (2, 3, 5)]
    if num_ranks == 1:
        shapes.append([decode_beside(operators, rows, max(1, rows // 3), 0.5) for rows in BUCKETS])
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    return [
        [replace(measured(each, share), name=f"{each.batch_tokens} at {share}") for each in shape for share in shares]
        for shape in shapes
    ]


def config_of(folder, **changes) -> WorkerConfig:
    sizes = {"max_batch_tokens": ROWS, "max_slots": 8, "page_size": 4, "num_pages": 200, "max_schedules": 80}
    return WorkerConfig(folder, **{**sizes, "num_threads": 1, **changes})


def local(config: WorkerConfig) -> LocalExecutor:
    worker = Worker(config)
    worker.load()
    return LocalExecutor(worker)


def gpu_code(config: WorkerConfig) -> CudaExecutor:
    return CudaExecutor(replace(config, dtype="float32"))


EXECUTORS = pytest.mark.parametrize("open_executor", [local, gpu_code])


def requests() -> list[NewRequest]:
    """Greedy and sampled ones; some share the start of their prompt."""
    draw = np.random.default_rng(0)
    shared, asked = draw.integers(0, 101, 18).tolist(), []
    for number in range(12):
        own = draw.integers(0, 101, int(draw.integers(1, 30))).tolist()
        sampling = SamplingParams(NUM_TOKENS, temperature=0.9 * (number % 3 == 0), top_k=30, top_p=0.95, seed=number)
        asked.append(NewRequest(f"r{number}", tuple(shared + own if number % 2 else own), sampling))
    return asked


class Serving:
    """An engine in a thread of its own."""

    def __init__(self, executor) -> None:
        self.executor = executor
        self.tokens: dict[str, list[int]] = {}
        self.steps = []
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.loop = EngineLoop(Scheduler(SchedulerConfig(), executor.capacity), executor, self._emit, 60.0)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def _emit(self, batch) -> None:
        if batch.stats is not None:
            self.steps.append(batch.stats)
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            self.tokens.setdefault(name, []).append(token)
        for end in batch.ends:
            self._ends.put(end.request_id)

    def submit(self, asked: list[NewRequest]) -> None:
        self.loop.submit(asked)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            self._ends.get(timeout=60)

    def exchange(self, number: int, schedules) -> None:
        self.executor.prepare_schedules(number, schedules)
        self.loop.use_schedules(number).result(30)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(30)
        self.executor.close()


@pytest.fixture
def serve():
    opened = []

    def start(executor) -> Serving:
        opened.append(Serving(executor))
        return opened[-1]

    yield start
    for serving in opened:
        serving.close()


def run_all(serving: Serving) -> dict[str, list[int]]:
    asked = requests()
    serving.submit(asked)
    serving.wait_for(len(asked))
    return serving.tokens


@pytest.mark.parametrize("num_pages", [200, 20], ids=["ample", "preemptions"])
@EXECUTORS
def test_tokens_of_requests_in_flight_stay_the_same(open_executor, num_pages, random_model, serve):
    folder = random_model("llama")
    expected = run_all(serve(open_executor(config_of(folder, num_pages=num_pages))))
    serving = serve(open_executor(config_of(folder, num_pages=num_pages)))
    asked = requests()
    serving.submit(asked)
    sets, number = itertools.cycle(sets_for(folder)), 0
    while sum(map(len, serving.tokens.values())) < NUM_TOKENS * len(asked):
        number += 1
        serving.exchange(number, next(sets))
    serving.wait_for(len(asked))
    assert serving.tokens == expected
    assert number > 3
    assert sum(step.overlapped for step in serving.steps) > 5
    assert (sum(step.num_preemptions for step in serving.steps) > 0) == (num_pages == 20)


@EXECUTORS
def test_an_idle_engine_takes_other_schedules_too(open_executor, random_model, serve):
    folder = random_model("llama")
    expected = run_all(serve(open_executor(config_of(folder))))
    serving = serve(open_executor(config_of(folder)))
    for number, schedules in enumerate(sets_for(folder)):
        serving.exchange(number, schedules)
    assert serving.steps == []
    assert run_all(serving) == expected
    assert any(step.overlapped for step in serving.steps)


@EXECUTORS
def test_a_set_that_is_refused_changes_nothing(open_executor, random_model, serve):
    folder = random_model("llama")
    first, second, *_ = sets_for(folder)
    slow = [replace(each, measured=Figures(100.0, 900.0, 1000.0)) for each in first]
    serving = serve(open_executor(config_of(folder, schedules=tuple(slow))))
    elsewhere = replace(second[-1], name="elsewhere", gpu="NVIDIA H200")
    invalid = replace(second[-1], name="invalid", operations=second[-1].operations[1:])
    for wrong, message in ((elsewhere, "elsewhere: .* NVIDIA H200"), (invalid, "invalid: attn_norm")):
        with pytest.raises(SchedulesRefusedError, match=message):
            serving.executor.prepare_schedules(1, [*second, wrong])
    run_all(serving)
    assert not any(step.overlapped for step in serving.steps)
    assert any(not step.unmeasured for step in serving.steps)


@EXECUTORS
def test_schedules_that_were_slower_are_not_run_after_an_exchange_either(open_executor, random_model, serve):
    folder = random_model("llama")
    fast, *_ = sets_for(folder)
    serving = serve(open_executor(config_of(folder, schedules=tuple(fast))))
    run_all(serving)
    num_overlapped = sum(step.overlapped for step in serving.steps)
    assert num_overlapped > 5
    serving.exchange(1, [replace(each, measured=Figures(100.0, 990.0, 1000.0)) for each in fast])
    serving.tokens.clear()
    run_all(serving)
    assert sum(step.overlapped for step in serving.steps) == num_overlapped


@EXECUTORS
def test_an_engine_that_has_ended_says_so(open_executor, random_model):
    serving = Serving(open_executor(config_of(random_model("llama"))))
    schedules, *_ = sets_for(random_model("llama"))
    serving.executor.prepare_schedules(1, schedules)
    serving.close()
    with pytest.raises(ExecutorError, match="has ended"):
        serving.loop.use_schedules(1).result(10)
    with pytest.raises(SchedulesRefusedError, match="being closed"):
        serving.executor.prepare_schedules(2, schedules)
