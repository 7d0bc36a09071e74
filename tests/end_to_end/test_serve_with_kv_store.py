"""`nanoflow serve` beside `nanoflow kvstore`, two ranks: a restarted server finds what the one before computed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from control_plane.demo import start_server
from control_plane.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
PROMPT = [7 * i % 101 for i in range(100)]  # 6 full pages of 16, and 4 tokens
CACHED = 96  # tokens of these pages
MAX_RESTARTS = 5


@contextmanager
def store_on(socket: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "control_plane.main", "kvstore", "--cpu-bytes", str(32 << 20)]
    command += ["--slab-bytes", str(1 << 20), "--socket", str(socket)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready
        assert "ready" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait(20)


@dataclass(frozen=True)
class Server:
    """One that is running."""

    channel: grpc.Channel
    metrics_url: str

    def generate(self) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt's came from a cache."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
        )
        responses = list(generation_pb2_grpc.GenerationStub(self.channel).Generate(request, timeout=60))
        tokens = [token for each in responses if each.HasField("delta") for token in each.delta.token_ids]
        return tokens, responses[-1].final.cached_tokens

    def flush(self) -> None:
        """Let it forget its own cache."""
        admin_pb2_grpc.AdminStub(self.channel).FlushCache(admin_pb2.FlushCacheRequest(), timeout=10)

    def count(self, *names: str) -> float:
        """What these counters of the store's use have come to, together."""
        starts = tuple(f"nanoflow_kv_store_{name}_total" for name in names)
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(starts))


@contextmanager
def served(model: Path, socket: Path) -> Iterator[Server]:
    flags = ["--port", "0", "--metrics-port", "0", "--num-threads", "1", "--tensor-parallel-size", "2"]
    flags += ["--kv-cache-memory-bytes", str(8 << 20), "--kv-store", f"unix:{socket}", "--kv-store-policy", "wait"]
    process, address, metrics_url = start_server(model, *flags)
    try:
        with grpc.insecure_channel(address) as channel:
            yield Server(channel, metrics_url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def comes_from_the_store(server: Server, expected: list[int]) -> bool:
    """At the latest when a busy machine has let the store answer in time."""
    server.flush()
    tokens, cached = server.generate()
    assert tokens == expected
    return cached == CACHED


def test_a_restarted_server_loads_from_the_store_and_does_without_it(model, tmp_path):
    socket = tmp_path / "run" / "kv.sock"
    with store_on(socket) as store:
        with served(model, socket) as server:
            expected, cached = server.generate()
            assert cached == 0
            assert server.generate() == (expected, CACHED)
            assert until(lambda: comes_from_the_store(server, expected))
        has_loaded = False
        for _ in range(MAX_RESTARTS):
            with served(model, socket) as server:
                tokens, cached = server.generate()
                assert tokens == expected
                has_loaded = cached == CACHED  # of the other server
                if has_loaded:
                    os.kill(store.pid, signal.SIGKILL)
                    server.flush()
                    began = time.monotonic()
                    assert server.generate() == (expected, 0)
                    assert time.monotonic() - began < 20
                    break
                # A busy machine may let a call end late; nothing else excuses it.
                assert until(lambda: server.count("faults", "rank_faults")), f"{cached} tokens, and no call failed"
        assert has_loaded
