"""`nanoflow schedules reload` on a server of two ranks: its streams go on, and what one rank refuses none takes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, PipelineSchedule, nanobatch_only
from autosearch.specs import ModelSpec
from control_plane.demo import start_server
from control_plane.pb import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
PROMPT = [7 * i % 101 for i in range(40)]
ROWS = 4  # of the batch that a single stream's decodes are in


@dataclass(frozen=True)
class Server:
    """One that is running."""

    address: str
    channel: grpc.Channel
    metrics_url: str

    def generate(self, num_tokens: int = 60) -> list[int]:
        """Greedy tokens."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        responses = generation_pb2_grpc.GenerationStub(self.channel).Generate(request, timeout=60)
        return [token for each in responses if each.HasField("delta") for token in each.delta.token_ids]

    def count(self, name: str) -> float:
        """What a counter has come to."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"nanoflow_{name}_total"))

    def reload(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """As an operator does it."""
        command = [sys.executable, "-m", "control_plane.main", "schedules", "reload", str(folder), "--json"]
        command += ["--server", self.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@contextmanager
def served(model: Path) -> Iterator[Server]:
    flags = ["--port", "0", "--metrics-port", "0", "--num-threads", "1", "--tensor-parallel-size", "2"]
    flags += ["--kv-cache-memory-bytes", str(8 << 20), "--max-num-batched-tokens", "32", "--max-schedules", "4"]
    process, address, metrics_url = start_server(model, *flags)
    try:
        with grpc.insecure_channel(address) as channel:
            yield Server(address, channel, metrics_url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def written(folder: Path, schedule: PipelineSchedule) -> Path:
    folder.mkdir()
    (folder / "measured.json").write_text(schedule.to_json())
    return folder


def test_streams_go_on_while_schedules_are_exchanged(model: Path, tmp_path: Path) -> None:
    operators = layer_operators(ModelSpec.from_folder(model), 2)
    schedule = replace(
        nanobatch_only(operators, ROWS, 2),
        model=model.resolve().name,
        gpu="cpu",
        num_gpus=2,
        decode_share=1 / ROWS,
        mean_context=70.0,
        prefill_pairs=0.0,
        measured=Figures(100.0, 1040.0, 1000.0),
    )
    folders = [
        written(tmp_path / str(count), replace(schedule, operations=nanobatch_only(operators, ROWS, count).operations))
        for count in (2, 3)
    ]
    elsewhere = written(tmp_path / "elsewhere", replace(schedule, gpu="NVIDIA H200"))
    with served(model) as server:
        expected = server.generate()
        assert server.count("iterations_overlapped") == 0
        streams: list[list[int]] = []
        thread = threading.Thread(target=lambda: streams.extend(server.generate() for _ in range(30)))
        thread.start()
        for folder in (*folders, folders[0]):
            done = server.reload(folder)
            assert done.returncode == 0, done.stderr
            assert [each["name"] for each in json.loads(done.stdout)["schedules"]] == ["measured"]
        refused = server.reload(elsewhere)
        assert refused.returncode == 2
        assert "measured on NVIDIA H200, and this engine runs on cpu" in refused.stderr
        thread.join(120)
        assert streams == [expected] * 30
        before = server.count("iterations_overlapped")
        assert server.generate() == expected
        assert server.count("iterations_overlapped") > before
        assert server.count("schedule_swaps") == 3
