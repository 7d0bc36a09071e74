"""How `nanoflow serve` puts its parts together and ends, with a scripted instance in the place of Ray's."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext

import grpc
import pytest
from fake_instance import FakeInstance, output_of

from control_plane import serve
from control_plane.config import EngineConfig, ServerConfig
from control_plane.pb import generation_pb2, generation_pb2_grpc
from control_plane.validation import Limits

PROMPT = [20, 21, 22]


class Serving:
    """A server under way in this process."""

    def __init__(self, monkeypatch, capsys, folder, *, broken_start=0):
        self.instances: list[FakeInstance] = []
        self.exit_bounds: list[float] = []
        self._capsys = capsys
        self._shown = ""
        self._broken_start = broken_start  # the start with this number, from 1, raises

        async def start_instance(name, config, progress, prepare=None):
            if len(self.instances) + 1 == self._broken_start:
                raise RuntimeError("the cluster is on fire")
            self.instances.append(FakeInstance(name, step_s=0.01))
            return self.instances[-1]

        monkeypatch.setattr(serve, "connected", lambda num_cpus: nullcontext())
        monkeypatch.setattr(serve, "start_instance", start_instance)
        monkeypatch.setattr(serve, "exit_within", self.exit_bounds.append)
        options = EngineConfig(model=folder), ServerConfig(port=0, metrics_port=0, shutdown_timeout=10), Limits()
        self.task = asyncio.create_task(serve.run(*options))

    async def address(self) -> str:
        async with asyncio.timeout(10):
            while "ready: gRPC " not in self._shown:
                assert not self.task.done(), self.task.result()
                await asyncio.sleep(0.01)
                self._shown += self._capsys.readouterr().out
        return self._shown.split("ready: gRPC ")[1].split(",")[0]


def question(max_tokens):
    stopping = generation_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT), stopping=stopping)


async def read(call):
    return [token async for response in call for token in response.delta.token_ids]


@pytest.mark.parametrize("why", ["sigterm", "supervisor"])
async def test_live_streams_finish_before_the_end(monkeypatch, capsys, caplog, stories_folder, why):
    fault = asyncio.Event()

    class Mortal(serve.Supervisor):
        async def run(self, started):
            running = asyncio.create_task(super().run(started))
            dying = asyncio.create_task(fault.wait())
            try:
                await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
                raise RuntimeError("a fault of ours")
            finally:
                running.cancel()
                dying.cancel()

    monkeypatch.setattr(serve, "Supervisor", Mortal)
    serving = Serving(monkeypatch, capsys, stories_folder)
    async with grpc.aio.insecure_channel(await serving.address()) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(question(30))
        await call.initial_metadata()
        os.kill(os.getpid(), signal.SIGTERM) if why == "sigterm" else fault.set()
        assert await read(call) == output_of(PROMPT, 30)
    assert await asyncio.wait_for(serving.task, 10) == (0 if why == "sigterm" else 1)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert [("a fault of ours" in line, "\n" in line) for line in lines] == [(True, False)] * (why == "supervisor")
    assert serving.instances[0].closed
    assert serving.exit_bounds == [serve.EXIT_TIMEOUT_S]


async def test_a_first_start_that_fails_raises_what_it_raised(monkeypatch, capsys, stories_folder):
    serving = Serving(monkeypatch, capsys, stories_folder, broken_start=1)
    with pytest.raises(RuntimeError, match="on fire"):
        await asyncio.wait_for(serving.task, 10)


def test_the_scheduler_never_refuses_what_the_front_end_has_accepted(stories_folder):
    limits = Limits(max_num_queued_reqs=20_000)
    config = serve.instance_config(EngineConfig(model=stories_folder), limits)
    assert config.scheduler.max_waiting >= 2 * 20_000 + config.worker.max_slots
