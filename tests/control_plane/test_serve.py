"""How `nanoflow serve` puts its parts together and ends, with a scripted instance in the place of Ray's."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext

import grpc
import pytest
from fake_instance import FakeInstance, output_of
from harness import until

from autosearch.operators import layer_operators
from autosearch.pipeline import nanobatch_only
from autosearch.specs import ModelSpec
from control_plane import serve
from control_plane.cluster import InstanceConfig
from control_plane.config import EngineConfig, ServerConfig
from control_plane.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from control_plane.validation import Limits

PROMPT = [20, 21, 22]


class Serving:
    """A server under way in this process."""

    def __init__(self, monkeypatch, capsys, folder, *, broken_start=0, schedules=None):
        self.instances: list[FakeInstance] = []
        self.configs: list[InstanceConfig] = []  # that they were started with
        self.exit_bounds: list[float] = []
        self._capsys = capsys
        self._shown = ""
        self._broken_start = broken_start  # the start with this number, from 1, raises

        async def start_instance(name, config, progress, prepare=None):
            if len(self.instances) + 1 == self._broken_start:
                raise RuntimeError("the cluster is on fire")
            self.configs.append(config)
            self.instances.append(FakeInstance(name, step_s=0.01))
            return self.instances[-1]

        monkeypatch.setattr(serve, "connected", lambda num_cpus: nullcontext())
        monkeypatch.setattr(serve, "start_instance", start_instance)
        monkeypatch.setattr(serve, "exit_within", self.exit_bounds.append)
        server = ServerConfig(port=0, metrics_port=0, shutdown_timeout=10)
        self.task = asyncio.create_task(serve.run(EngineConfig(model=folder, schedules=schedules), server, Limits()))

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


async def test_the_instance_after_a_lost_one_has_the_schedules_that_served_last(
    monkeypatch, capsys, stories_folder, tmp_path
):
    """Although the folder of the start has none any more; and room for as many as the first instance."""
    operators = layer_operators(ModelSpec.from_folder(stories_folder))
    for name, count in (("first", 2), ("second", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(nanobatch_only(operators, 64, count).to_json())
    serving = Serving(monkeypatch, capsys, stories_folder, schedules=tmp_path / "first")
    async with grpc.aio.insecure_channel(await serving.address()) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for folder in ("", str(tmp_path / "second")):
            await admin.ReloadSchedules(admin_pb2.ReloadSchedulesRequest(folder=folder))
    for name in ("first", "second"):
        (tmp_path / name / f"{name}.json").unlink()
    serving.instances[0].lose()
    await until(lambda: len(serving.configs) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving.task == 0
    assert serving.instances[0].used == [1, 2]
    names = [[schedule.name for schedule in config.worker.schedules] for config in serving.configs]
    assert names == [["first"], ["second"]]
    assert [config.worker.schedule_room for config in serving.configs] == [2, 2]


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
