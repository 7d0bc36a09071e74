"""Real gRPC clients against a real server with a scripted engine."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import grpc
import pytest
from fake_instance import FakeInstance, output_of
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from harness import MODEL, running_service, until

from control_plane.errors import InvalidRequestError
from control_plane.frontend import FrontendConfig
from control_plane.generation import OnDisconnect
from control_plane.grpc_api import to_request
from control_plane.grpc_server import ADMIN, GENERATION, GrpcConfig
from control_plane.intake import Intake
from control_plane.pb import admin_pb2, generation_pb2, generation_pb2_grpc
from control_plane.validation import Limits

PROMPT = [20, 21, 22]
Code = grpc.StatusCode


def question(prompt=PROMPT, max_tokens=5, **fields):
    stopping = generation_pb2.StoppingParams(max_tokens=max_tokens)
    token_ids = generation_pb2.TokenIds(ids=prompt)
    return generation_pb2.GenerateRequest(token_ids=token_ids, stopping=stopping, **fields)


async def read(call):
    """Token ids, the final message (None when there was none) and the status of a stream."""
    token_ids, final = [], None
    try:
        async for response in call:
            assert final is None, "nothing may follow the final message"
            if response.HasField("delta"):
                token_ids += response.delta.token_ids
                assert response.delta.completion_tokens >= len(token_ids)
            else:
                final = response.final
    except grpc.aio.AioRpcError as error:
        return token_ids, final, error.code()
    return token_ids, final, await call.code()


async def first(call):
    """The next message of a stream that goes on to be read."""
    return await anext(aiter(call))


# Window for a client that does not read: as little as gRPC allows, and not enlarged by its own probes.
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 100), ("grpc.http2.bdp_probe", 0))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_generate_streams_tokens_text_and_one_final(byte_tokenizer):
    async with running_service(tokenizer=byte_tokenizer, vocab_size=128) as service:
        service.instance.num_cached, service.instance.from_store = 6, (1, 2)
        call = service.generation.Generate(question(max_tokens=40, request_id="mine"))
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        responses = [response async for response in call]
    deltas, final = [response.delta for response in responses[:-1]], responses[-1].final
    assert {response.request_id for response in responses} == {"mine"}
    token_ids = [token for delta in deltas for token in delta.token_ids]
    assert token_ids == output_of(PROMPT, 40, 128)
    assert "".join(delta.text for delta in deltas) == byte_tokenizer.decode(token_ids)
    assert deltas[-1].completion_tokens == final.completion_tokens == 40
    assert final.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert not final.HasField("matched_stop_token")
    assert final.prompt_tokens == 3
    assert (final.cached_tokens, final.cpu_cached_tokens, final.ssd_cached_tokens) == (6, 1, 2)
    assert 0 < final.ttft_s <= final.total_s


async def test_submit_stream_resume_and_cancel(byte_tokenizer):
    async with running_service(step_s=0.003, tokenizer=byte_tokenizer) as service:
        submitted = await service.generation.Submit(
            generation_pb2.SubmitRequest(request=generation_pb2.GenerateRequest(text="hello"))
        )
        assert submitted.prompt_tokens == 5
        call = service.generation.Stream(generation_pb2.StreamRequest(request_id=submitted.request_id))
        start = (await first(call)).delta
        second = service.generation.Stream(generation_pb2.StreamRequest(request_id=submitted.request_id))
        assert (await status_of(second)).code() is Code.ALREADY_EXISTS
        call.cancel()
        resume = generation_pb2.StreamRequest(
            request_id=submitted.request_id, resume_from_token=start.completion_tokens
        )
        await asyncio.sleep(0.05)
        again = service.generation.Stream(resume)
        more = (await first(again)).delta
        cancelled = await service.generation.Cancel(generation_pb2.CancelRequest(request_id=submitted.request_id))
        assert cancelled.outcome == generation_pb2.CancelResponse.OUTCOME_CANCELLED
        rest, final, code = await read(again)
        token_ids = [*start.token_ids, *more.token_ids, *rest]
        assert token_ids == output_of(list(b"hello"), len(token_ids))
        assert final.completion_tokens == len(token_ids)
        assert (final.finish_reason, code) == (generation_pb2.FINISH_REASON_CANCELLED, Code.CANCELLED)
        await until(lambda: service.instance.num_held == 0)


STATES = [(how, state) for how in ("cancel", "close", "deadline") for state in ("queued", "prefill", "decode")]


@pytest.mark.parametrize(("how", "state"), [*STATES, ("kill", "decode")])
async def test_a_client_that_goes_away_frees_the_engine(how, state):
    async with running_service(max_slots=1, chunk=1, step_s=0.01) as service:
        if state == "queued":
            blocker = service.generation.Generate(question(max_tokens=400))
            await first(blocker)
        before = service.instance.num_held
        channel = grpc.aio.insecure_channel(service.address)
        stub = generation_pb2_grpc.GenerationStub(channel)
        prompt = PROMPT * (40 if state == "prefill" else 1)
        process = None
        if how == "kill":
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", KILLED_CLIENT, service.address, stdout=asyncio.subprocess.PIPE
            )
            assert await process.stdout.readline() == b"streaming\n"
        else:
            call = stub.Generate(question(prompt, max_tokens=300), timeout=1.5 if how == "deadline" else None)
            await call.initial_metadata()
        await until(lambda: service.instance.num_held == before + 1)
        if state == "decode" and how != "kill":
            await first(call)
        if how == "cancel":
            call.cancel()
        elif how == "close":
            await channel.close()
        elif how == "kill":
            process.send_signal(signal.SIGKILL)
            await process.wait()
        else:
            assert (await status_of(call)).code() is Code.DEADLINE_EXCEEDED
        steps = service.instance.num_steps
        await until(lambda: service.instance.num_held == before)
        assert how == "kill" or service.instance.num_steps - steps <= 10
        if state != "queued":
            assert service.frontend.num_live == 0
            outcomes = [
                service.value("nanoflow_requests_total", outcome=outcome) for outcome in ("cancelled", "expired")
            ]
            assert sum(outcomes) == 1
        await channel.close()


KILLED_CLIENT = """
import sys, grpc
from control_plane.pb import generation_pb2, generation_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[20, 21, 22]))
    for response in generation_pb2_grpc.GenerationStub(channel).Generate(request):
        print("streaming", flush=True)
"""


async def test_a_time_limit_gives_a_final_message_and_deadline_exceeded():
    async with running_service(step_s=0.01) as service:
        token_ids, final, code = await read(service.generation.Generate(question(max_tokens=300, timeout_s=0.2)))
        assert code is Code.DEADLINE_EXCEEDED
        assert final.finish_reason == generation_pb2.FINISH_REASON_EXPIRED
        assert token_ids == output_of(PROMPT, final.completion_tokens)
        await until(lambda: service.instance.num_held == 0)


async def test_a_reader_that_reads_nothing_is_dropped_and_others_keep_their_pace():
    sizes = {"max_model_len": 100_000, "num_pages": 100_000}
    limits = Limits(max_buffered_tokens=100)
    async with running_service(limits=limits, channel_options=SMALL_WINDOW, **sizes) as service:
        slow = service.generation.Generate(question(max_tokens=90_000))
        await slow.initial_metadata()
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            others = [stub.Generate(question(max_tokens=200)) for _ in range(3)]
            for token_ids, _, code in await asyncio.gather(*map(read, others)):
                assert (token_ids, code) == (output_of(PROMPT, 200), Code.OK)
        await until(lambda: service.instance.num_held == 0, timeout_s=30)
        _, final, code = await read(slow)
    assert code is Code.RESOURCE_EXHAUSTED
    assert final.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    assert final.completion_tokens < 90_000


async def test_a_reader_that_takes_no_message_for_too_long_counts_as_gone():
    config = GrpcConfig(port=0, write_timeout_s=0.3)
    sizes = {"max_model_len": 100_000, "num_pages": 100_000}
    async with running_service(grpc_config=config, channel_options=SMALL_WINDOW, **sizes) as service:
        call = service.generation.Generate(question(max_tokens=90_000))
        await call.initial_metadata()
        await until(lambda: service.instance.num_held == 1)
        await until(lambda: service.instance.num_held == 0, timeout_s=30)
        assert service.value("nanoflow_requests_total", outcome="cancelled") == 1


async def test_overload_is_refused_at_once_with_a_retry_hint_twice():
    config = FrontendConfig(retry_after_s=1.5)
    async with running_service(auto=False, limits=Limits(max_num_queued_reqs=1), config=config) as service:
        first = service.generation.Generate(question())
        await first.initial_metadata()
        error = await status_of(service.generation.Generate(question()))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after-ms"] == "1500"
        status = rpc_status.from_call(error)
        retry = RetryInfo()
        assert status.details[0].Unpack(retry)
        assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


async def test_a_live_duplicate_id_is_refused_and_the_first_is_unharmed():
    async with running_service(step_s=0.005) as service:
        call = service.generation.Generate(question(max_tokens=30, request_id="it"))
        await call.initial_metadata()
        again = await status_of(service.generation.Generate(question(request_id="it")))
        assert again.code() is Code.ALREADY_EXISTS
        assert (await read(call))[0] == output_of(PROMPT, 30)
        assert (await read(service.generation.Generate(question(request_id="it"))))[2] is Code.OK


async def test_messages_over_the_limit_are_refused_and_the_server_lives():
    async with running_service(limits=Limits(max_message_bytes=10_000)) as service:
        error = await status_of(service.generation.Generate(generation_pb2.GenerateRequest(text="x" * 20_000)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert (await read(service.generation.Generate(question())))[2] is Code.OK


@pytest.mark.parametrize("what", ["ids", "stop ids", "messages"])
async def test_a_huge_message_is_refused_without_keeping_others_waiting(what):
    request = question()
    if what == "ids":
        request.token_ids.ids.extend([1] * 4_000_000)
    elif what == "stop ids":
        request.stopping.stop_token_ids.extend([1] * 4_000_000)
    else:
        request.chat.messages.extend([generation_pb2.ChatMessage()] * 500_000)
    started = time.thread_time()  # others' turns on the processor do not count
    wanted = to_request(request, OnDisconnect.CANCEL, Limits(), None)
    assert time.thread_time() - started < 0.05
    with pytest.raises(InvalidRequestError, match="too many" if what == "ids" else "has more than"):
        await Intake(MODEL, Limits()).token_ids(wanted, 512)


async def test_oversize_metadata_is_refused_and_the_server_lives():
    async with running_service() as service:
        call = service.generation.Generate(question(), metadata=(("x-junk", "j" * 100_000),))
        assert (await status_of(call)).code() in (Code.RESOURCE_EXHAUSTED, Code.INTERNAL, Code.UNAVAILABLE)
        assert (await read(service.generation.Generate(question())))[2] is Code.OK


async def test_more_calls_than_allowed_are_refused_early():
    async with running_service(limits=Limits(max_concurrent_rpcs=2), auto=False) as service:
        calls = [service.generation.Generate(question()) for _ in range(2)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        assert (await status_of(service.generation.Generate(question()))).code() is Code.RESOURCE_EXHAUSTED


async def test_more_connections_than_allowed_are_closed_and_those_that_go_make_room():
    def connect():
        return grpc.aio.insecure_channel(service.address, options=(("grpc.use_local_subchannel_pool", 1),))

    async with running_service(limits=Limits(max_connections=2)) as service:
        channels = [connect() for _ in range(3)]
        ends = [await read(generation_pb2_grpc.GenerationStub(each).Generate(question())) for each in channels]
        assert [code for _, _, code in ends] == [Code.OK, Code.OK, Code.UNAVAILABLE]
        await channels.pop().close()  # which tries to connect again and again, and would take the room
        await channels.pop().close()
        async with connect() as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            assert (await read(stub.Generate(question(), wait_for_ready=True, timeout=20)))[2] is Code.OK
        await channels.pop().close()


async def test_frequent_pings_of_a_client_are_put_up_with():
    options = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with running_service(channel_options=options) as service:
        assert (await read(service.generation.Generate(question())))[2] is Code.OK


async def test_bytes_that_are_no_message_are_the_callers_fault():
    streams, calls = ["Generate", "Stream"], [f"{GENERATION}/Submit", f"{GENERATION}/Cancel", f"{ADMIN}/Drain"]
    no_message, no_utf8_in_text = b"\xff\xff\xff", b"\x12\x02\xc3\x28"
    async with running_service() as service:
        for method, message in [*((each, no_message) for each in streams), ("Generate", no_utf8_in_text)]:
            call = service.channel.unary_stream(f"/{GENERATION}/{method}")(message)
            assert (await status_of(call)).code() is Code.INVALID_ARGUMENT
        for method in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.channel.unary_unary(f"/{method}")(no_message)
            assert caught.value.code() is Code.INVALID_ARGUMENT
        assert not service.frontend.draining


async def test_faults_of_our_own_are_internal_and_tell_nothing():
    async with running_service() as service:

        async def broken(*_):
            raise RuntimeError("secret path /etc/passwd")

        service.frontend.generate = broken
        error = await status_of(service.generation.Generate(question()))
    assert error.code() is Code.INTERNAL
    assert "secret" not in error.details()


async def test_what_a_caller_sends_to_find_its_call_again_stands_in_the_log(caplog):
    caplog.set_level("DEBUG", "control_plane.grpc_api")
    trace = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    async with running_service() as service:
        metadata = (trace, ("x-request-id", "mine" + "x" * 1000), ("x-junk", "junk"))
        call = service.generation.Generate(question(request_id="it"), metadata=metadata)
        assert dict(await call.initial_metadata())["x-request-id"] == "it"
        await read(call)
        submitted = generation_pb2.SubmitRequest(request=question(request_id="other"))
        await service.generation.Submit(submitted, metadata=(("x-correlation-id", "yours"),))
        await read(service.generation.Generate(question(request_id="plain")))
        lines = [record.getMessage() for record in caplog.records if "is accepted" in record.getMessage()]
        assert lines == [
            f"request it is accepted, x-request-id 'mine{'x' * 124}', traceparent '{trace[1]}'",
            "request other is accepted, x-correlation-id 'yours'",
            "request plain is accepted",
        ]

        async def broken(*_):
            raise RuntimeError

        service.frontend.generate = broken
        await status_of(service.generation.Generate(question(), metadata=(trace,)))
    assert any(f"Generate failed, traceparent '{trace[1]}'" in record.getMessage() for record in caplog.records)


async def test_a_lost_instance_ends_streams_with_unavailable_and_health_with_not_serving():
    async with running_service(step_s=0.005) as service:
        health = health_pb2_grpc.HealthStub(service.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = service.generation.Generate(question(max_tokens=300))
        await first(call)
        service.instance.lose()
        _, final, code = await asyncio.wait_for(read(call), 5)
        assert (final.finish_reason, code) == (generation_pb2.FINISH_REASON_FAILED, Code.UNAVAILABLE)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await status_of(service.generation.Generate(question()))
        assert error.code() is Code.UNAVAILABLE
        assert "retry-after-ms" in dict(error.trailing_metadata())
        service.frontend.attach(replacement := FakeInstance("fake-1"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await read(service.generation.Generate(question())))[2] is Code.OK
        watch.cancel()
        await replacement.close()


async def test_drain_with_twenty_live_streams():
    async with running_service(step_s=0.005, max_slots=20) as service:
        calls = [service.generation.Generate(question(max_tokens=60)) for _ in range(20)]
        await asyncio.gather(*(first(call) for call in calls))
        health = health_pb2_grpc.HealthStub(service.channel)
        drained = asyncio.create_task(service.frontend.drain(20))
        await asyncio.sleep(0.02)
        readiness = await health.Check(health_pb2.HealthCheckRequest(service=GENERATION))
        liveness = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert readiness.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert liveness.status == health_pb2.HealthCheckResponse.SERVING
        assert (await status_of(service.generation.Generate(question()))).code() is Code.UNAVAILABLE
        for token_ids, final, code in await asyncio.gather(*map(read, calls)):
            assert code is Code.OK
            assert final.completion_tokens == 60
            assert token_ids == output_of(PROMPT, 60)[60 - len(token_ids) :]
        assert await drained is True


async def test_admin_tells_facts_loads_and_limits(byte_tokenizer):
    async with running_service(tokenizer=byte_tokenizer, auto=False, max_slots=2) as service:
        model = await service.admin.GetModelInfo(admin_pb2.GetModelInfoRequest())
        assert (model.name, model.vocab_size, model.max_model_len) == ("fake", 256, 512)
        assert list(model.eos_token_ids) == [2]
        assert (model.has_tokenizer, model.has_chat_template) == (True, False)
        calls = [service.generation.Generate(question(PROMPT * 10)) for _ in range(3)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        await until(lambda: service.instance.num_held == 3)
        service.instance.step()
        await asyncio.gather(*(first(call) for call in calls[:2]))
        loads = await service.admin.GetLoads(admin_pb2.GetLoadsRequest())
        (load,) = loads.instances
        assert (load.running, load.waiting, load.waiting_tokens, loads.live_requests) == (2, 1, 30, 3)
        assert load.live_pages == 4  # 31 tokens each, 16 a page
        assert load.free_pages + load.live_pages + load.cached_pages == load.total_pages == 1000
        assert load.batch_fill == pytest.approx(60 / 64)
        assert load.generation_throughput > 0
        server = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert server.version == "1.2.3"
        assert server.instances[0].max_batch_tokens == 64
        assert server.limits["max_stop_token_ids"] == 64
        assert (await service.admin.FlushCache(admin_pb2.FlushCacheRequest())).flushed_pages == 5
        assert (await service.admin.Drain(admin_pb2.DrainRequest())).live_requests == 3
        assert (await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).draining
        assert (await status_of(service.generation.Generate(question()))).code() is Code.UNAVAILABLE


async def test_reflection_lists_the_services():
    async with running_service() as service:
        stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answers = [answer async for answer in call]
        names = {each.name for each in answers[0].list_services_response.service}
    assert {GENERATION, ADMIN, "grpc.health.v1.Health"} <= names


async def test_requests_that_cannot_even_be_translated_count_as_refused():
    async with running_service() as service:
        nothing = generation_pb2.GenerateRequest()
        for call in (
            service.generation.Generate(nothing),
            service.generation.Generate(question(on_disconnect=99)),
        ):
            assert (await status_of(call)).code() is Code.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError):
            await service.generation.Submit(generation_pb2.SubmitRequest(request=nothing))
        assert service.value("nanoflow_requests_rejected_total", reason="invalid_argument") == 3


async def test_counts_agree_after_requests_of_every_kind():
    limits = Limits(max_temperature=2)
    async with running_service(limits=limits, step_s=0.002) as service:
        wrong = [question(sampling=generation_pb2.SamplingParams(temperature=3)) for _ in range(5)]
        normal = [service.generation.Generate(question(max_tokens=7)) for _ in range(5)]
        expired = [service.generation.Generate(question(max_tokens=500, timeout_s=0.1)) for _ in range(5)]
        cancelled = [service.generation.Generate(question(max_tokens=500)) for _ in range(5)]
        await asyncio.gather(*(first(call) for call in cancelled))
        for call in cancelled:
            call.cancel()
        for call in map(service.generation.Generate, wrong):
            assert (await status_of(call)).code() is Code.INVALID_ARGUMENT
        await asyncio.gather(*map(read, [*normal, *expired]))
        await until(lambda: service.frontend.num_live == 0)

        outcomes = {
            outcome: service.value("nanoflow_requests_total", outcome=outcome)
            for outcome in ("completed", "cancelled", "expired", "failed")
        }
        assert outcomes == {"completed": 5, "cancelled": 5, "expired": 5, "failed": 0}
        assert service.value("nanoflow_requests_accepted_total") == 15
        assert service.value("nanoflow_requests_rejected_total") == 5
        assert service.value("nanoflow_requests_rejected_total", reason="invalid_argument") == 5
        assert service.value("nanoflow_request_success_total", finished_reason="length") == 5
        assert service.value("nanoflow_e2e_request_latency_seconds_count") == 5
        began = service.value("nanoflow_time_to_first_token_seconds_count")
        assert service.value("nanoflow_prompt_tokens_total") == 3 * began
        assert service.value("nanoflow_request_prompt_tokens_sum") == 3 * began
        generated = service.value("nanoflow_generation_tokens_total")
        assert service.value("nanoflow_request_generation_tokens_sum") == generated
        assert service.value("nanoflow_inter_token_latency_seconds_count") == generated - began
        await until(lambda: service.value("nanoflow_kv_pages_live") == 0)
        assert service.value("nanoflow_metric_errors_total") == 0
