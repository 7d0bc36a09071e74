"""Other schedules for a running server: asked for by gRPC and by the command, on a real engine and on scripted ones."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from fake_instance import FakeInstance, capacity
from harness import running_frontend, running_service, until
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, PipelineSchedule, nanobatch_only
from autosearch.specs import ModelSpec
from control_plane.errors import InvalidRequestError, UnavailableError
from control_plane.grpc_server import GrpcConfig
from control_plane.instance import InstanceLost, LocalInstance
from control_plane.main import app
from control_plane.model_info import ModelInfo
from control_plane.options import ConfigError
from control_plane.pb import admin_pb2, generation_pb2
from control_plane.schedules_command import ask
from scheduler.loop import EngineLoop
from scheduler.ports import ExecutorError
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.executor import LocalExecutor, Worker

SIZES = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shape = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=4, vocab_size=101, max_position_embeddings=256)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def schedules_of(model: Path, num_nano_batches: int = 2) -> dict[str, PipelineSchedule]:
    """For batches of decodes alone, of each size; that of 8 rows was slower."""
    operators = layer_operators(ModelSpec.from_folder(model))
    return {
        f"of-{rows}": replace(
            nanobatch_only(operators, rows, num_nano_batches),
            model="tiny",
            gpu="cpu",
            decode_share=1.0,
            mean_context=30.0,
            prefill_pairs=0.0,
            measured=Figures(100.0, 980.0 if rows == 8 else 1040.0, 1000.0),
        )
        for rows in SIZES
    }


def written(folder: Path, schedules: dict[str, PipelineSchedule]) -> Path:
    folder.mkdir()
    for name, schedule in schedules.items():
        (folder / f"{name}.json").write_text(schedule.to_json())
    (folder / "plans.json").write_text("{}")
    return folder


@asynccontextmanager
async def serving(model: Path, grpc_config: GrpcConfig | None = None):
    worker = Worker(
        WorkerConfig(model, max_batch_tokens=32, max_slots=4, num_pages=64, num_threads=1, max_schedules=12)
    )
    worker.load()
    executor = LocalExecutor(worker)
    scheduler = Scheduler(SchedulerConfig(), executor.capacity)

    def make_engine(emit):
        return EngineLoop(scheduler, executor, emit, step_timeout_s=30)

    instance = LocalInstance("local", executor.capacity, make_engine, executor.close, executor)
    info = ModelInfo.from_folder(model, ModelSpec.from_folder(model))
    async with running_service(instance, model=info, grpc_config=grpc_config) as service:
        yield service


async def answer(service, number: int) -> list[int]:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[number + 1, 7, 20 + number]),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingParams(max_tokens=60, ignore_eos=True),
    )
    token_ids: list[int] = []
    async for response in service.generation.Generate(request, timeout=60):
        token_ids += response.delta.token_ids
    return token_ids


async def answers(service) -> list[list[int]]:
    """Of four requests, which fill the smallest batch."""
    return await asyncio.gather(*(answer(service, number) for number in range(4)))


async def reload(service, folder: Path | str):
    return await service.admin.ReloadSchedules(admin_pb2.ReloadSchedulesRequest(folder=str(folder)), timeout=30)


async def refused(service, folder: Path | str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reload(service, folder)
    return caught.value.code(), caught.value.details()


async def test_requests_under_way_get_the_same_tokens_and_the_answer_says_what_serves(model, tmp_path):
    folders = [written(tmp_path / str(count), schedules_of(model, count)) for count in (2, 3)]
    async with serving(model) as service:
        expected = await answers(service)
        assert service.value("nanoflow_iterations_overlapped_total") == 0
        answering = asyncio.create_task(answers(service))
        num_reloads = 0
        while not answering.done():
            told = await reload(service, folders[num_reloads % 2])
            num_reloads += 1
        assert answering.result() == expected
        assert num_reloads > 2
        assert service.value("nanoflow_schedule_swaps_total") == num_reloads
        assert service.value("nanoflow_iterations_overlapped_total") > 5
        assert [(each.name, each.batch_tokens, each.is_chosen) for each in told.schedules] == [
            ("of-16", 16, True),
            ("of-32", 32, True),
            ("of-4", 4, True),
            ("of-8", 8, False),
        ]
        assert [round(each.gain, 3) for each in told.schedules] == [1.04, 1.04, 1.04, 0.98]
        assert (told.schedules[0].decode_share, told.schedules[0].mean_context) == (1.0, 30.0)
        again = await reload(service, "")
        assert again == told


def _of_five_rows(schedule: PipelineSchedule, model: Path) -> PipelineSchedule:
    five = nanobatch_only(layer_operators(ModelSpec.from_folder(model)), 5, 2)
    return replace(schedule, batch_tokens=5, operations=five.operations)


WRONG = {
    "model": (lambda one, model: replace(one, model="other"), "bad: it was made for model other, and tiny is served"),
    "rows": (_of_five_rows, "bad: it is for batches of 5 rows, and those of this engine have 4, 8, 16, 32"),
    "GPU": (lambda one, model: replace(one, gpu="NVIDIA H200"), "bad: it was measured on NVIDIA H200"),
    "predicted": (lambda one, model: replace(one, measured=None), "bad: nothing says how fast it was"),
    "order": (lambda one, model: replace(one, operations=one.operations[::-1]), "bad: "),
}


async def test_what_is_wrong_is_said_and_nothing_changes(model, tmp_path):
    good = schedules_of(model)
    folders = {
        name: written(tmp_path / name, {**good, "bad": change(good["of-4"], model)})
        for name, (change, _) in WRONG.items()
    }
    messages = {name: message for name, (_, message) in WRONG.items()}
    folders["missing"], messages["missing"] = tmp_path / "missing", "missing is no folder"
    folders["empty"], messages["empty"] = written(tmp_path / "empty", {}), "no schedule lies in"
    folders["broken"], messages["broken"] = written(tmp_path / "broken", good), "of-9.json"
    (folders["broken"] / "of-9.json").write_text('{"name": 3')
    async with serving(model) as service:
        _, message = await refused(service, "")
        assert "started without --schedules: name a folder" in message
        for served in (None, written(tmp_path / "served", schedules_of(model, 3))):
            if served is not None:
                await reload(service, served)
            before = service.frontend.schedules.serving
            expected = await answers(service)
            num_overlapped = service.value("nanoflow_iterations_overlapped_total")
            for name, folder in folders.items():
                code, message = await refused(service, folder)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert messages[name] in message, name
            assert service.frontend.schedules.serving == before
            assert await answers(service) == expected
            gained = service.value("nanoflow_iterations_overlapped_total") - num_overlapped
            assert (gained > 5) == (served is not None)
        assert service.value("nanoflow_schedule_swaps_total") == 1


async def test_reloads_at_the_same_time_follow_each_other(model, tmp_path):
    folders = [written(tmp_path / str(count), schedules_of(model, count)) for count in (2, 3)]
    async with serving(model) as service:
        answering = asyncio.create_task(answers(service))
        told = await asyncio.gather(*(reload(service, folders[number % 2]) for number in range(8)))
        assert all(each == told[0] for each in told)  # names and figures are the same
        await answering
        assert service.value("nanoflow_schedule_swaps_total") == 8
        assert service.value("nanoflow_metric_errors_total") == 0


class TestOverInstances:
    """Scripted ones, without a model."""

    SCHEDULES = (PipelineSchedule("one", 64, ()),)

    @pytest.fixture
    async def front(self):
        async with running_frontend(FakeInstance("a")) as (frontend, _, first):
            second = FakeInstance("b")
            frontend.attach(second)
            yield frontend, first, second
            await second.close()

    async def test_all_use_them_once_all_are_ready(self, front):
        frontend, first, second = front
        second.ready_to_prepare.clear()
        replacing = asyncio.create_task(frontend.schedules.replace(self.SCHEDULES))
        await until(lambda: first.prepared)
        assert (first.used, frontend.schedules.serving) == ([], None)
        second.ready_to_prepare.set()
        await replacing
        assert first.used == second.used == [1]
        assert first.prepared == second.prepared == {1: self.SCHEDULES}
        assert frontend.schedules.serving == self.SCHEDULES

    async def test_where_one_refuses_none_takes_them(self, front):
        frontend, first, second = front
        second.refuses = "x: lanes overlap"
        with pytest.raises(InvalidRequestError, match="x: lanes overlap"):
            await frontend.schedules.replace(self.SCHEDULES)
        assert first.prepared == second.prepared == {}
        assert first.used == second.used == []
        assert frontend.schedules.serving is None

    async def test_an_instance_that_is_lost_meanwhile_is_said_and_the_others_keep_nothing(self, front):
        frontend, first, second = front
        second.ready_to_prepare.clear()
        replacing = asyncio.create_task(frontend.schedules.replace(self.SCHEDULES))
        await until(lambda: first.prepared)
        second.lose()
        second.ready_to_prepare.set()
        with pytest.raises(UnavailableError, match="an engine was lost meanwhile"):
            await replacing
        assert (first.prepared, first.used, frontend.schedules.serving) == ({}, [], None)
        await until(lambda: len(list(frontend.instances)) == 1)
        await frontend.schedules.replace(self.SCHEDULES)
        assert frontend.schedules.serving == self.SCHEDULES

    async def test_a_caller_that_goes_away_leaves_nothing_half_done(self, front):
        frontend, first, second = front
        second.ready_to_prepare.clear()
        replacing = asyncio.create_task(frontend.schedules.replace(self.SCHEDULES))
        await until(lambda: first.prepared)
        replacing.cancel()
        second.ready_to_prepare.set()
        await until(lambda: second.used == [1])
        await until(lambda: frontend.schedules.serving == self.SCHEDULES)
        await frontend.schedules.replace(self.SCHEDULES)
        assert first.used == second.used == [1, 2]

    async def test_without_an_instance_there_is_nothing_to_exchange(self):
        async with running_frontend(None) as (frontend, _, _):
            with pytest.raises(UnavailableError, match="no engine is up"):
                await frontend.schedules.replace(self.SCHEDULES)


class EndedEngine:
    """One whose thread has ended between the look at it and the question."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def run(self):
        self._stopped.wait(10)

    def stop(self):
        self._stopped.set()

    def use_schedules(self, number):
        future: Future[None] = Future()
        future.set_exception(ExecutorError("the engine has ended"))
        return future


async def test_an_engine_that_ends_while_it_is_asked_is_lost():
    instance = LocalInstance("local", capacity(), lambda emit: EndedEngine())
    with pytest.raises(InstanceLost, match="the engine has ended"):
        await instance.use_schedules(1)
    await instance.close()
    with pytest.raises(InstanceLost):
        await instance.prepare_schedules(2, [])


class TestCommand:
    """`nanoflow schedules reload`, with the keys that Admin wants."""

    async def test_what_serves_now_is_printed(self, model, tmp_path, monkeypatch):
        folder = written(tmp_path / "good", schedules_of(model))
        monkeypatch.setenv("NANOFLOW_ADMIN_API_KEY", "secret")
        async with serving(model, GrpcConfig(port=0, admin_keys=("secret",))) as service:
            command = ["schedules", "reload", "--server", service.address]
            shown = await asyncio.to_thread(CliRunner().invoke, app, [*command, str(folder)])
            assert shown.exit_code == 0
            lines = shown.output.splitlines()
            assert len(lines) == 5
            assert lines[1].split() == ["of-16", "16", "1.00", "30", "1.040"]
            assert lines[4].endswith("0.980  the sequential one is served")
            found = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--json"])
            schedules = json.loads(found.output)["schedules"]
            assert [each["name"] for each in schedules] == ["of-16", "of-32", "of-4", "of-8"]
            assert schedules[3]["is_chosen"] is False

    async def test_what_the_server_says_is_one_line(self, model, tmp_path, monkeypatch):
        monkeypatch.delenv("NANOFLOW_ADMIN_API_KEY", raising=False)
        monkeypatch.delenv("NANOFLOW_API_KEY", raising=False)
        async with serving(model, GrpcConfig(port=0, admin_keys=("secret",))) as service:
            with pytest.raises(ConfigError, match="says UNAUTHENTICATED: send a valid key"):
                await asyncio.to_thread(ask, service.address, tmp_path)
            monkeypatch.setenv("NANOFLOW_ADMIN_API_KEY", "secret")
            with pytest.raises(ConfigError, match="says INVALID_ARGUMENT: folder: no schedule lies in"):
                await asyncio.to_thread(ask, service.address, tmp_path)

    def test_a_server_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match="localhost:1 says UNAVAILABLE"):
            ask("localhost:1", tmp_path)
