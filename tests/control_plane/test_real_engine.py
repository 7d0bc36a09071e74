"""gRPC to tokens and back with nothing faked: a trained model, its executor, the scheduler's loop, real clients."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from harness import metric_value, running_service, until

from autosearch.specs import ModelSpec
from control_plane.instance import LocalInstance
from control_plane.model_info import ModelInfo
from control_plane.pb import admin_pb2, generation_pb2
from control_plane.tokenizer import Tokenizer
from scheduler.loop import EngineLoop
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.executor import LocalExecutor, Worker

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@asynccontextmanager
async def serving(folder, **sizes):
    """A server of the model on this process's CPU."""
    sizes = {"max_batch_tokens": 64, "max_slots": 8, "num_pages": 200, **sizes}
    worker = Worker(WorkerConfig(model_dir=folder, num_threads=1, **sizes))
    worker.load()
    executor = LocalExecutor(worker)

    def make_engine(emit):
        return EngineLoop(Scheduler(SchedulerConfig(), executor.capacity), executor, emit, step_timeout_s=30)

    instance = LocalInstance("local", executor.capacity, make_engine, executor.close)
    model = ModelInfo.from_folder(folder, ModelSpec.from_folder(folder))
    async with running_service(instance, model=model, tokenizer=Tokenizer.from_folder(folder)) as service:
        yield service


def question(text=PROMPT, max_tokens=40, temperature=0.0, **sampling):
    return generation_pb2.GenerateRequest(
        text=text,
        sampling=generation_pb2.SamplingParams(temperature=temperature, **sampling),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def answer(service, request):
    token_ids, text, final = [], "", None
    async for response in service.generation.Generate(request, timeout=60):
        if response.HasField("delta"):
            token_ids += response.delta.token_ids
            text += response.delta.text
        else:
            final = response.final
    return token_ids, text, final


async def test_a_trained_model_tells_a_story_the_same_alone_and_in_company(stories_folder):
    tokenizer = Tokenizer.from_folder(stories_folder)
    async with serving(stories_folder) as service:
        token_ids, text, final = await answer(service, question())
        assert text.startswith(" girl named")
        prompt_ids = tokenizer.encode(PROMPT)
        assert text == tokenizer.decode([*prompt_ids, *token_ids])[len(tokenizer.decode(prompt_ids)) :]
        assert (final.completion_tokens, final.prompt_tokens) == (40, len(prompt_ids))

        sampled = question(temperature=0.9, seed=5, top_k=50, top_p=0.95)
        alone = (await answer(service, sampled))[0]
        company = [question(), sampled, question("The dog"), question(temperature=1.0), question(), sampled]
        together = await asyncio.gather(*(answer(service, request) for request in company))
        assert together[0][0] == together[4][0] == token_ids
        assert together[1][0] == together[5][0] == alone
        again = question(PROMPT + " girl named Lily who loved to play outside in the park")
        finals = [(await answer(service, again))[2] for _ in range(2)]
        assert finals[0].cached_tokens < finals[1].cached_tokens < finals[1].prompt_tokens
        assert service.value("nanoflow_metric_errors_total") == 0


async def test_cancelled_and_dropped_requests_free_their_pages(stories_folder):
    async with serving(stories_folder, max_slots=3) as service:
        calls = [service.generation.Generate(question(f"Number {i}", max_tokens=400)) for i in range(6)]
        for gauge in ("running", "waiting"):
            await until(lambda: service.value(f"nanoflow_num_requests_{gauge}") == 3)  # noqa: B023 - awaited here
        iterations = service.value("nanoflow_iterations_total")
        for call in calls:
            call.cancel()
        await until(lambda: service.frontend.num_live == 0)
        await until(lambda: service.value("nanoflow_kv_pages_live") == 0)
        assert service.value("nanoflow_iterations_total") - iterations < 30
        assert service.value("nanoflow_requests_total", outcome="cancelled") == 6
        assert (await answer(service, question()))[2].completion_tokens == 40
        await until(lambda: service.value("nanoflow_kv_pages_cached") > 0)
        assert (await service.admin.FlushCache(admin_pb2.FlushCacheRequest())).flushed_pages > 0


async def test_drain_lets_real_streams_finish(stories_folder):
    async with serving(stories_folder) as service:
        answers = [asyncio.create_task(answer(service, question(f"Number {i}", max_tokens=60))) for i in range(20)]
        await until(lambda: metric_value(service.metrics, "nanoflow_requests_accepted_total") == 20)
        assert await service.frontend.drain(60) is True
        assert [final.completion_tokens for _, _, final in await asyncio.gather(*answers)] == [60] * 20


async def test_preempted_output_reaches_the_client_whole(stories_folder):
    """Room for one and a half requests, eight of them: all get all their tokens, each once."""
    async with serving(stories_folder) as service:
        texts = [f"Number {i} was" for i in range(8)]
        expected = [(await answer(service, question(text, 64)))[0] for text in texts]
    async with serving(stories_folder, num_pages=8, max_model_len=96) as service:
        answers = await asyncio.gather(*(answer(service, question(text, 64)) for text in texts))
    assert [token_ids for token_ids, _, _ in answers] == expected
