"""`nanoflow serve` as users run it: real processes, a real model, real gRPC, real faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from control_plane.demo import FLAGS, start_server
from control_plane.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.ray

PROMPT = "Once upon a time, there was a little girl named"
CONTINUATION = " Emma who loved to play in the sun."  # greedy, as transformers has it
MODEL = Path(os.environ.get("NANOFLOW_SMOLLM2", ".cache/models/SmolLM2-135M-Instruct"))


def family(pid: int) -> list[psutil.Process]:
    """A process, its descendants, and all in sessions that one of these leads: a local Ray detaches itself."""
    main = psutil.Process(pid)
    found = {each.pid: each for each in [main, *main.children(recursive=True)]}
    leaders = set(found)
    for each in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(each.pid) in leaders and each.status() != psutil.STATUS_ZOMBIE:
                found[each.pid] = each
    return list(found.values())


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    metrics_url: str
    channel: grpc.Channel

    @property
    def generation(self) -> generation_pb2_grpc.GenerationStub:
        return generation_pb2_grpc.GenerationStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.channel)

    def actors(self, name: str) -> list[psutil.Process]:
        """Ray's processes with this actor class in their title."""
        return [each for each in family(self.process.pid) if name in " ".join(each.cmdline())]

    def metric(self, name: str) -> float:
        """Sum over all labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def run_server(*flags: str) -> Iterator[Server]:
    process, address, metrics_url = start_server(MODEL, *FLAGS, *flags)
    try:
        with grpc.insecure_channel(address) as channel:
            yield Server(process, address, metrics_url, channel)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from run_server("--step-timeout", "4")


@pytest.fixture
def own_server() -> Iterator[Server]:
    """For tests that end it."""
    yield from run_server("--shutdown-timeout", "30")


def request(max_tokens: int, ignore_eos: bool = True, text: str = PROMPT) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        text=text,
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


@dataclass
class Stream:
    """Reads one Generate call in a thread."""

    server: Server
    max_tokens: int
    text: str = PROMPT
    token_ids: list[int] = field(default_factory=list)
    finals: list[generation_pb2.Final] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.first_token = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for response in self.server.generation.Generate(request(self.max_tokens, text=self.text), timeout=120):
                if response.HasField("delta"):
                    self.token_ids += response.delta.token_ids
                    assert response.delta.completion_tokens == len(self.token_ids)
                    self.first_token.set()
                else:
                    self.finals.append(response.final)
            self.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.code = error.code()
        finally:
            self.ended_at = time.monotonic()

    def join(self, timeout_s: float = 120) -> None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the stream hangs"


def generate(server: Server, max_tokens: int, retry_s: float = 0.0) -> str:
    """The whole text; tries again on UNAVAILABLE for retry_s seconds, as clients should."""
    deadline = time.monotonic() + retry_s
    while True:
        try:
            responses = list(server.generation.Generate(request(max_tokens), timeout=60))
            return "".join(response.delta.text for response in responses if response.HasField("delta"))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(0.25)


def test_a_greedy_answer_is_the_models_and_equals_the_in_process_one(server: Server) -> None:
    text = generate(server, 9)
    assert text.startswith(CONTINUATION)
    command = [sys.executable, "-m", "control_plane.main", "generate", str(MODEL), "--prompt", PROMPT]
    command += ["--max-tokens", "9", "--temperature", "0", "--ignore-eos", "--json"]
    local = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(local.stdout.splitlines()[-1])
    assert answer["text"] == text
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 9


def test_the_demos_server_is_small(own_server: Server) -> None:
    """Resident memory of all its processes, shared pages counted in each, each at its peak."""
    for stream in [Stream(own_server, 24) for _ in range(8)]:
        stream.join()
    peaks = {}
    for process in family(own_server.process.pid):
        status = Path(f"/proc/{process.pid}/status").read_text()
        peaks[process.pid] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert len(peaks) > 5
    assert sum(peaks.values()) < 2.5e9, peaks


def test_concurrent_streams_do_not_disturb_each_other(server: Server) -> None:
    alone = generate(server, 24)
    streams = [Stream(server, 24) for _ in range(8)]
    for stream in streams:
        stream.join()
        assert stream.code == grpc.StatusCode.OK
        assert len(stream.finals) == 1
        assert stream.token_ids == streams[0].token_ids
    assert generate(server, 24) == alone


@pytest.mark.parametrize("victim", ["WorkerService", "SchedulerService"])
def test_a_killed_engine_process_ends_streams_once_and_comes_back(server: Server, victim: str) -> None:
    alone = generate(server, 12, retry_s=30)
    # Longer than the running ones can hold the slots; the last one has streamed nothing when the fault comes.
    running = [Stream(server, 400) for _ in range(2)]
    for stream in running:
        assert stream.first_token.wait(30)
    (process,) = server.actors(victim)
    killed_at = time.monotonic()
    process.kill()
    late = Stream(server, 12)  # submitted while the instance is gone or dying: waits, or is refused
    for stream in running:
        stream.join(10)
        assert stream.code == grpc.StatusCode.UNAVAILABLE
        assert len(stream.finals) <= 1
        assert stream.ended_at - killed_at < 5
    late.join(60)
    assert late.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    assert late.code != grpc.StatusCode.OK or len(late.token_ids) == 12
    assert generate(server, 12, retry_s=60) == alone
    assert len(server.actors("WorkerService")) == 1


def test_a_worker_that_stops_answering_is_replaced(server: Server) -> None:
    alone = generate(server, 12, retry_s=30)
    stream = Stream(server, 400)
    assert stream.first_token.wait(30)
    (process,) = server.actors("WorkerService")
    process.suspend()
    stream.join(15)  # the server's step timeout is 4 s
    assert stream.code == grpc.StatusCode.UNAVAILABLE
    assert generate(server, 12, retry_s=60) == alone


def test_requests_are_accounted_for(server: Server) -> None:
    generate(server, 4, retry_s=60)
    accepted = server.metric("nanoflow_requests_accepted_total")
    assert accepted > 0
    deadline = time.monotonic() + 10
    while server.metric("nanoflow_requests_total") < accepted and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.metric("nanoflow_requests_total") == accepted
    loads = server.admin.GetLoads(admin_pb2.GetLoadsRequest(), timeout=10)
    assert [load.live_pages for load in loads.instances] == [0]


def test_sigterm_lets_live_streams_finish_and_refuses_new_ones(own_server: Server) -> None:
    streams = [Stream(own_server, 40, text=f"{number} {PROMPT}") for number in range(6)]
    for stream in streams:
        assert stream.first_token.wait(60)
    unread = own_server.generation.Submit(generation_pb2.SubmitRequest(request=request(500)), timeout=10)
    own_server.generation.Cancel(generation_pb2.CancelRequest(request_id=unread.request_id), timeout=10)
    os.killpg(own_server.process.pid, signal.SIGTERM)  # as `timeout` and service managers do
    signalled_at = time.monotonic()
    time.sleep(0.3)
    with pytest.raises(grpc.RpcError) as refused:
        generate(own_server, 4)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    for stream in streams:
        stream.join(60)
        assert stream.code == grpc.StatusCode.OK
        assert len(stream.token_ids) == 40
    assert own_server.process.wait(30) == 0
    assert time.monotonic() - signalled_at < 25  # the cancelled request, which nobody reads, is not waited for


def test_a_broken_model_folder_ends_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    command = [sys.executable, "-m", "control_plane.main", "serve", str(tmp_path), "--port", "0", "--metrics-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "safetensors" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_missing_tensor_is_named_by_the_server(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((MODEL / name).read_text())
    tensors = load_file(MODEL / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, "-m", "control_plane.main", "serve", str(tmp_path), "--port", "0", "--metrics-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "model.layers.3.mlp.up_proj.weight" in ended.stderr.splitlines()[-1]


SERVE = [sys.executable, "-m", "control_plane.main", "serve", str(MODEL), "--port", "0", "--metrics-port", "0"]


def descendants(mark: str) -> list[psutil.Process]:
    """All processes with this in their environment."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and each.environ().get("START_TEST") == mark:
                found.append(each)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [2.5, 5.0, 8.0])
def test_a_signal_to_all_during_the_start_ends_it_and_leaves_nothing(after_s: float, number: int) -> None:
    mark = f"{number} {after_s}"
    environ = {**os.environ, "START_TEST": mark}
    pipe = subprocess.PIPE
    # A session leader, as services are.
    process = subprocess.Popen(SERVE, env=environ, start_new_session=True, stdout=pipe, stderr=pipe, text=True)
    time.sleep(after_s)
    os.killpg(process.pid, number)
    signalled_at = time.monotonic()
    try:
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert time.monotonic() - signalled_at < 10
    assert process.returncode in (0, 128 + number, -signal.SIGTERM)  # the last one while Python is importing
    assert "Traceback" not in stderr
    time.sleep(1)
    assert descendants(mark) == []


def test_a_killed_server_takes_its_ray_along() -> None:
    environ = {**os.environ, "START_TEST": "killed"}
    process = subprocess.Popen(SERVE, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while descendants("killed") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descendants("killed") == []


def test_a_dead_ray_address_ends_the_start_with_one_line() -> None:
    environ = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    ended = subprocess.run(SERVE, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "RAY_ADDRESS=127.0.0.1:1" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_nothing_listens_off_loopback(server: Server) -> None:
    generate(server, 1, retry_s=60)
    addresses = {
        connection.laddr.ip
        for process in family(server.process.pid)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert addresses
