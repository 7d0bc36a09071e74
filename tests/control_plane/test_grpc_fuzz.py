"""Any message that the descriptors allow: a client's fault is told as the client's fault, and the engine lives."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_instance import output_of
from google.protobuf.descriptor import FieldDescriptor
from harness import running_service
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.pb import generation_pb2
from control_plane.validation import Limits

NUMBERS = {
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 20, 255, 256, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_INT32: [0, 1, -1, -2, 5, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_INT64: [0, 1, -1, 3, 512, 2**31, 2**63 - 1, -(2**63)],
    FieldDescriptor.TYPE_FLOAT: [0.0, 1.0, 0.5, -1.0, 1e-9, 1e-45, 1e30, float("nan"), float("inf"), float("-inf")],
    FieldDescriptor.TYPE_DOUBLE: [0.0, 0.01, 1.0, -1.0, 1e-12, 1e300, float("nan"), float("inf")],
    FieldDescriptor.TYPE_BOOL: [False, True],
}
TEXTS = [
    "",
    "a",
    "hi there",
    "../../etc/passwd",
    "\0",
    "日本語 🎉",
    "%s{}{{",
    "[" * 300,
    "x" * 600,
    "a\r\nb: c",
    "<s></s>",
]


def scalars(field):
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(TEXTS) | st.text(max_size=8)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values] + [99, -1])
    return st.sampled_from(NUMBERS[field.type])


@st.composite
def messages(draw, kind):
    """A message of the given class, of fields that may be there or not, with ordinary and extreme values."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(generation_pb2, field.message_type.name)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(messages(inner), max_size=4)))
            else:
                getattr(message, field.name).CopyFrom(draw(messages(inner)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=70)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


CLIENTS_FAULT = {"INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "OUT_OF_RANGE"}
NEIGHBOUR = generation_pb2.GenerateRequest(
    token_ids=generation_pb2.TokenIds(ids=[20, 21]), stopping=generation_pb2.StoppingParams(max_tokens=3)
)


async def code_of(call):
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def try_out(service, generate, stream, cancel):
    submit = generation_pb2.SubmitRequest(request=generate)
    await service.generation.Cancel(cancel)
    codes = {await code_of(service.generation.Generate(generate)), await code_of(service.generation.Stream(stream))}
    try:
        submitted = await service.generation.Submit(submit)
    except grpc.aio.AioRpcError as error:
        codes.add(error.code().name)
    else:
        again = generation_pb2.StreamRequest(request_id=submitted.request_id)
        codes.add(await code_of(service.generation.Stream(again)))
        await service.generation.Cancel(generation_pb2.CancelRequest(request_id=submitted.request_id))
    assert codes <= {"OK", *CLIENTS_FAULT}, codes
    token_ids = []
    async for response in service.generation.Generate(NEIGHBOUR):
        token_ids += response.delta.token_ids
    assert token_ids == output_of([20, 21], 3)


@pytest.fixture(scope="module")
def fuzzed(byte_tokenizer):
    """A server that outlives all examples, and the loop that it runs on."""
    with asyncio.Runner() as runner:
        limits = Limits(max_prompt_bytes=500, max_timeout_s=1e6)
        manager = running_service(tokenizer=byte_tokenizer, limits=limits, step_s=0, max_model_len=64)
        yield runner, runner.run(manager.__aenter__())
        runner.run(manager.__aexit__(None, None, None))


@given(
    generate=messages(generation_pb2.GenerateRequest),
    stream=messages(generation_pb2.StreamRequest),
    cancel=messages(generation_pb2.CancelRequest),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_message_is_answered_and_harms_nobody(fuzzed, generate, stream, cancel):
    runner, service = fuzzed
    runner.run(try_out(service, generate, stream, cancel))


def test_after_all_that_nothing_is_left(fuzzed):
    _, service = fuzzed
    assert service.instance.num_held == 0
    assert service.frontend.num_live == 0
    assert service.value("nanoflow_metric_errors_total") == 0
