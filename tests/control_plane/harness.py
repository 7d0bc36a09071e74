"""Servers with a scripted engine, in this process, for tests of the front end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from fake_instance import FakeInstance

from control_plane.frontend import Frontend, FrontendConfig
from control_plane.grpc_admin import ServerInfo
from control_plane.grpc_server import GrpcConfig, GrpcServer
from control_plane.intake import Intake
from control_plane.metrics import Metrics
from control_plane.model_info import ModelInfo
from control_plane.pb import admin_pb2_grpc, generation_pb2_grpc
from control_plane.validation import Limits

MODEL = ModelInfo(name="fake", architecture="llama", vocab_size=256, eos_token_ids=(2,))


@dataclass
class Service:
    """A running server with everything that it is made of."""

    frontend: Frontend
    metrics: Metrics
    instance: FakeInstance | None
    server: GrpcServer
    address: str
    channel: grpc.aio.Channel
    generation: generation_pb2_grpc.GenerationStub
    admin: admin_pb2_grpc.AdminStub

    def value(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the labels that are not given."""
        return metric_value(self.metrics, name, **labels)


def metric_value(metrics: Metrics, name: str, **labels: str) -> float:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    assert samples, f"{name} is not there"
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def until(condition, timeout_s=5.0):
    """Wait until the condition holds; a test that waits in vain fails."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_frontend(
    instance=True, *, limits=None, config=None, model=MODEL, tokenizer=None, renderer=None, **fake
):
    """A front end with a FakeInstance (or the given one, or None), without transport."""
    intake = Intake(model, limits or Limits(), tokenizer, renderer)
    metrics = Metrics(model.name, max_model_len=512, batch_tokens=64)
    frontend = Frontend(intake, metrics, config or FrontendConfig())
    if instance is True:
        instance = FakeInstance(**fake)
    if instance is not None:
        frontend.attach(instance)
    try:
        yield frontend, metrics, instance
    finally:
        await frontend.close()
        if instance is not None:
            await instance.close()


@asynccontextmanager
async def running_service(instance=True, *, grpc_config=None, channel_options=(), **kwargs):
    """A server on a free port of the loopback interface, and a client's channel to it."""
    async with running_frontend(instance, **kwargs) as (frontend, metrics, instance_):
        server = GrpcServer(frontend, ServerInfo("1.2.3"), grpc_config or GrpcConfig(port=0))
        address = f"127.0.0.1:{await server.start()}"
        try:
            async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
                generation = generation_pb2_grpc.GenerationStub(channel)
                admin = admin_pb2_grpc.AdminStub(channel)
                yield Service(frontend, metrics, instance_, server, address, channel, generation, admin)
        finally:
            await server.stop(0)
