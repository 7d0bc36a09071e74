"""Worker and scheduler together: whatever else runs, a request's tokens are those it gets alone."""

import threading

import numpy as np
import pytest

from scheduler.loop import EngineLoop
from scheduler.request import FinishReason, NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.executor import LocalExecutor, Worker


def serve(folder, requests, **changes):
    """All requests at once through an engine; (tokens, ends, preemptions, prompt tokens found cached)."""
    defaults = {"max_batch_tokens": 24, "max_slots": 8, "page_size": 4, "num_pages": 200, "num_threads": 1}
    worker = Worker(WorkerConfig(folder, **{**defaults, **changes}))
    worker.load()
    executor = LocalExecutor(worker)
    scheduler = Scheduler(SchedulerConfig(), worker.capacity)
    tokens, ends, stats, done = {request.request_id: [] for request in requests}, {}, [], threading.Event()

    def emit(batch):
        scheduler.check_integrity()
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            tokens[name].append(token)
        ends.update({end.request_id: end for end in batch.ends})
        stats.append(batch.stats)
        if len(ends) == len(requests):
            done.set()

    loop = EngineLoop(scheduler, executor, emit, step_timeout_s=30)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    loop.submit(requests)
    finished = done.wait(60)
    loop.stop()
    thread.join(30)
    executor.close()
    assert finished
    preemptions = sum(step.num_preemptions for step in stats if step is not None)
    return tokens, ends, preemptions, sum(end.num_cached_tokens for end in ends.values())


def requests_of(num, seed=0, max_tokens=20):
    """Greedy and sampled requests; some share the start of their prompt."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(0, 101, 18).tolist()
    made = []
    for number in range(num):
        own = draw.integers(0, 101, int(draw.integers(1, 30))).tolist()
        prompt = shared + own if number % 2 else own
        sampling = SamplingParams(max_tokens, temperature=0.9 * (number % 3 == 0), top_k=30, top_p=0.95, seed=number)
        made.append(NewRequest(f"r{number}", tuple(prompt), sampling))
    return made


@pytest.fixture(scope="module")
def alone(random_model):
    """Each request's tokens when nothing else runs."""
    folder = random_model("llama")
    return {request.request_id: serve(folder, [request])[0][request.request_id] for request in requests_of(12)}


@pytest.mark.parametrize("batch_tokens", [3, 8, 24, 200])
@pytest.mark.parametrize("nano_batches", [1, 4])
def test_company_changes_nothing(batch_tokens, nano_batches, random_model, alone):
    tokens, ends, _, cached = serve(
        random_model("llama"), requests_of(12), max_batch_tokens=batch_tokens, nano_batches=nano_batches
    )
    assert tokens == alone
    assert {end.finish_reason for end in ends.values()} == {FinishReason.LENGTH}
    assert cached > 0, "the shared start of the prompts should be found"


def test_preemption_changes_nothing(random_model, alone):
    tokens, _, preemptions, _ = serve(random_model("llama"), requests_of(12), num_pages=20)
    assert preemptions > 0, "20 pages hold about one and a half of these requests"
    assert tokens == alone


def test_stop_tokens_end_a_request_and_are_its_last(random_model, alone):
    requests = requests_of(12)
    stops = {request.request_id: alone[request.request_id][7] for request in requests}
    stopping = [
        NewRequest(
            r.request_id,
            r.prompt_token_ids,
            SamplingParams(
                20,
                r.sampling.temperature,
                r.sampling.top_k,
                r.sampling.top_p,
                r.sampling.seed,
                stop_token_ids=(stops[r.request_id],),
            ),
        )
        for r in requests
    ]
    tokens, ends, _, _ = serve(random_model("llama"), stopping)
    for name, expected in alone.items():
        first = expected.index(stops[name])
        assert tokens[name] == expected[: first + 1]
        assert ends[name].finish_reason is FinishReason.STOP
