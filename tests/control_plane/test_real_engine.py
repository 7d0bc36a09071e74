"""gRPC to tokens and back with nothing faked: a trained model, its executor, the scheduler's loop, real clients."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import torch
from harness import metric_value, running_service, until

from autosearch.specs import ModelSpec
from control_plane.instance import LocalInstance
from control_plane.model_info import ModelInfo
from control_plane.pb import admin_pb2, generation_pb2
from control_plane.tokenizer import Tokenizer
from control_plane.validation import Limits
from scheduler.loop import EngineLoop
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.executor import LocalExecutor, Worker

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


class CheckedScheduler(Scheduler):
    """Its invariants are checked after every iteration."""

    def finish(self, *args, **kwargs):
        batch = super().finish(*args, **kwargs)
        self.check_integrity()
        return batch


@asynccontextmanager
async def serving(folder, limits=None, **sizes):
    """A server of the model on this process's CPU."""
    sizes = {"max_batch_tokens": 64, "max_slots": 8, "num_pages": 200, **sizes}
    worker = Worker(WorkerConfig(model_dir=folder, num_threads=1, **sizes))
    worker.load()
    executor = LocalExecutor(worker)
    scheduler = CheckedScheduler(SchedulerConfig(), executor.capacity)

    def make_engine(emit):
        return EngineLoop(scheduler, executor, emit, step_timeout_s=30)

    instance = LocalInstance("local", executor.capacity, make_engine, executor.close)
    model = ModelInfo.from_folder(folder, ModelSpec.from_folder(folder))
    tokenizer = Tokenizer.from_folder(folder)
    async with running_service(instance, model=model, tokenizer=tokenizer, limits=limits) as service:
        yield service
        await until(lambda: scheduler.is_idle and scheduler.load().live_pages == 0)
        scheduler.check_integrity()


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


async def live_a_little(service, number, rng):
    """One client with one request, which it ends in one way or another. Its output is checked where it has one."""
    generation, request_id = service.generation, f"r{number}"
    request = question(f"Number {number % 20} was", rng.choice([1, 2, 10, 30]))
    request.request_id = request_id
    way = rng.choice(["read", "drop", "call deadline", "time limit", "cancel", "submit", "submit and forget", "resume"])
    if way == "drop":
        call = generation.Generate(request)
        await asyncio.sleep(rng.choice([0, 0.01, 0.3]))
        call.cancel()
    elif way in ("read", "call deadline", "time limit"):
        if way == "time limit":
            request.timeout_s = rng.uniform(1e-6, 0.5)
        with suppress(grpc.aio.AioRpcError):
            async for response in generation.Generate(request, timeout=rng.random() if way == "call deadline" else 60):
                final = response.final
            assert way == "time limit" or final.completion_tokens == request.stopping.max_tokens
    else:
        await generation.Submit(generation_pb2.SubmitRequest(request=request))
        if way == "cancel":
            await asyncio.sleep(rng.random() / 5)
            await generation.Cancel(generation_pb2.CancelRequest(request_id=request_id))
        num_read, final = 0, None
        while way in ("submit", "resume") and final is None:
            resume = generation_pb2.StreamRequest(request_id=request_id, resume_from_token=num_read)
            call = generation.Stream(resume)
            try:
                async for response in call:
                    num_read += len(response.delta.token_ids)
                    if response.HasField("final"):
                        final = response.final
                    elif way == "resume":
                        break
            except grpc.aio.AioRpcError as error:  # the reader before has not been seen to go yet
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return  # nobody read it for too long, on a machine that is busy
            call.cancel()
        assert final is None or num_read == request.stopping.max_tokens


@pytest.mark.parametrize("sizes", [{}, {"num_pages": 14, "max_model_len": 200}], ids=["ample", "short of pages"])
async def test_two_hundred_clients_that_end_as_they_like_leave_nothing_behind(stories_folder, sizes):
    rng = random.Random(7)
    async with serving(stories_folder, limits=Limits(detached_ttl_s=0.5), **sizes) as service:
        await asyncio.gather(*(live_a_little(service, number, rng) for number in range(200)))
        await until(lambda: not list(service.frontend._requests))
        accepted = service.value("nanoflow_requests_accepted_total")
        assert 100 < accepted == service.value("nanoflow_requests_total")
        assert service.value("nanoflow_request_generation_tokens_sum") == service.value(
            "nanoflow_generation_tokens_total"
        )
        assert service.value("nanoflow_request_prompt_tokens_sum") == service.value("nanoflow_prompt_tokens_total")
        assert service.value("nanoflow_metric_errors_total") == 0


async def test_two_thousand_short_requests_leave_no_objects_behind(stories_folder):
    rng = random.Random(8)
    async with serving(stories_folder, limits=Limits(detached_ttl_s=0.05)) as service:
        num_objects = []
        for start in range(0, 2000, 50):
            requests = [question("The dog", rng.choice([1, 2, 3])) for _ in range(50)]
            calls = [service.generation.Generate(request) for request in requests]
            for call in calls[::4]:
                await asyncio.sleep(0)
                call.cancel()
            await asyncio.gather(*(drained(call) for call in calls))
            if start in (500, 1950):
                await until(lambda: not list(service.frontend._requests))
                await asyncio.sleep(0.1)
                gc.collect()
                num_objects.append(len(gc.get_objects()))
        assert num_objects[1] - num_objects[0] < 1000  # of 1,450 requests


async def drained(call):
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
