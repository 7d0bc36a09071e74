"""`nanoflow serve` with a KV store of its own: used, started again when killed, gone with the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

from control_plane.demo import start_server
from control_plane.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
PROMPT = [7 * i % 101 for i in range(100)]  # 6 full pages of 16, and 4 tokens
CPU_BYTES = (32 << 20) + 12345  # by which the store of this test is known


def stores() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "status"])
    return [
        each
        for each in found
        if str(CPU_BYTES) in (each.info["cmdline"] or []) and each.info["status"] != psutil.STATUS_ZOMBIE
        if "kvstore" in each.info["cmdline"]
    ]


def arenas() -> list[Path]:
    """Memory of such stores."""
    return [path for path in Path("/dev/shm").glob("nanoflow-kv-*") if path.stat().st_size == CPU_BYTES]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def generate(channel: grpc.Channel) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt's came from a cache."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
    )
    responses = list(generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60))
    tokens = [token for each in responses if each.HasField("delta") for token in each.delta.token_ids]
    return tokens, responses[-1].final.cached_tokens


def flush(channel: grpc.Channel) -> None:
    admin_pb2_grpc.AdminStub(channel).FlushCache(admin_pb2.FlushCacheRequest(), timeout=10)


def test_a_store_of_its_own_is_used_started_again_and_gone_at_the_end(model, tmp_path):
    flags = ["--port", "0", "--metrics-port", "0", "--num-threads", "1", "--kv-cache-memory-bytes", str(8 << 20)]
    flags += ["--kv-store-cpu-bytes", str(CPU_BYTES), "--kv-store-ssd-dir", str(tmp_path / "ssd")]
    flags += ["--kv-store-ssd-bytes", str(64 << 20), "--kv-store-policy", "wait"]
    process, address, _ = start_server(model, *flags)
    try:
        (store,) = stores()
        socket = Path(store.cmdline()[store.cmdline().index("--socket") + 1])
        with grpc.insecure_channel(address) as channel:
            expected, cached = generate(channel)
            assert cached == 0

            def comes_from_the_store() -> bool:
                """At the latest when a busy machine lets the store answer in time."""
                flush(channel)
                tokens, cached = generate(channel)
                assert tokens == expected
                return cached == 96

            assert until(comes_from_the_store)
            os.kill(store.pid, signal.SIGKILL)
            flush(channel)
            assert generate(channel)[0] == expected
            assert until(lambda: [each.pid for each in stores()] not in ([], [store.pid]))
            assert until(comes_from_the_store)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert until(lambda: not stores(), 5.0)
        assert not socket.parent.exists()
    finally:
        process.kill()
        process.wait(20)
    assert until(lambda: not stores())


def test_with_a_server_that_is_killed_its_store_goes_and_leaves_nothing(model):
    flags = ["--port", "0", "--metrics-port", "0", "--num-threads", "1", "--kv-cache-memory-bytes", str(8 << 20)]
    process, _, _ = start_server(model, *flags, "--kv-store-cpu-bytes", str(CPU_BYTES))
    try:
        (store,) = stores()
        socket = Path(store.cmdline()[store.cmdline().index("--socket") + 1])
        assert arenas()
    finally:
        process.kill()
        process.wait(20)
    assert until(lambda: not stores())
    assert not arenas()
    assert not socket.parent.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-store", "unix:/tmp/kv.sock", "--kv-store-cpu-bytes", "1000000"], "both given"),
        (["--kv-store-ssd-dir", "/tmp"], "give kv-store-cpu-bytes too"),
        (["--kv-store-metrics-port", "9999"], "give kv-store-cpu-bytes too"),
        (["--kv-store-cpu-bytes", "1000000", "--kv-store-ssd-bytes", "5000000"], "give kv-store-ssd-dir too"),
        (["--kv-store-cpu-bytes", "1000"], "at least 65536"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(model, flags, message):
    command = [sys.executable, "-m", "control_plane.main", "serve", str(model), "--port", "0", "--metrics-port", "0"]
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
