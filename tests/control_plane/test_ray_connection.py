"""Joining Ray: dead and silent clusters, and a Ray of our own that is on loopback only and never outlives us."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from control_plane import ray_connection, ray_environment
from control_plane.errors import StartError
from control_plane.local_ray import LocalRay
from control_plane.ray_connection import connected


async def test_an_address_where_nothing_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(StartError, match=r"RAY_ADDRESS=127\.0\.0\.1:1 \(Connection refused\).*unset RAY_ADDRESS"):
        async with connected(1):
            pass
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "127.0.0.1:99999"])
async def test_an_address_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartError, match=f"RAY_ADDRESS={address}"):
        async with connected(1):
            pass


async def test_a_cluster_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(ray_connection.ray, "init", lambda **_: released.wait(30))
    monkeypatch.setattr(ray_connection, "CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(StartError, match=f"RAY_ADDRESS={address} names has not answered within 0.1 s"):
            async with connected(1):
                pass
    released.set()


async def test_what_ray_says_of_a_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")

    monkeypatch.setattr(ray_connection.ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(StartError, match=r"RAY_ADDRESS=auto names cannot be joined: Could not find any.*\.$"):
        async with connected(1):
            pass


def test_a_ray_of_our_own_gets_a_secret_and_stays_on_loopback() -> None:
    environ: dict[str, str] = {}
    ray_environment.prepare(environ)
    assert environ["RAY_AUTH_MODE"] == "token"
    assert len(environ["RAY_AUTH_TOKEN"]) == 64
    assert environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_a_named_cluster_keeps_its_own_settings() -> None:
    environ = {"RAY_ADDRESS": "head:6379"}
    ray_environment.prepare(environ)
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & environ.keys()


@pytest.fixture
async def local_ray(ray_environ: None) -> AsyncIterator[LocalRay]:
    ray = await LocalRay.start(num_cpus=1)
    yield ray
    await ray.stop()


@pytest.fixture
def ray_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    environ: dict[str, str] = {}
    ray_environment.prepare(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.ray
async def test_its_processes_listen_on_loopback_in_a_session_apart_and_end(local_ray: LocalRay) -> None:
    processes = local_ray.processes
    names = " ".join(process.name() for process in processes)
    assert "gcs_server" in names
    assert "raylet" in names
    assert {os.getsid(process.pid) for process in processes} != {os.getsid(0)}
    listeners = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listeners) > 4
    assert set(listeners) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert local_ray.address.startswith("127.0.0.1:")
    await local_ray.stop()
    assert gone(processes, 1)
    assert not local_ray.folder.exists()
    await local_ray.stop()  # idempotent


@pytest.mark.ray
async def test_it_ends_when_its_owner_is_killed(local_ray: LocalRay) -> None:
    processes = local_ray.processes
    assert local_ray._guard.stdin is not None
    local_ray._guard.stdin.close()  # as the kernel does for a dead process
    assert await asyncio.to_thread(gone, processes, 5)


@pytest.mark.ray
@pytest.mark.parametrize("after_s", [0.0, 0.05, 1.2])
async def test_a_cancelled_start_leaves_nothing(
    ray_environ: None, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own are too long for sockets
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    starting = asyncio.create_task(LocalRay.start(num_cpus=1))
    await asyncio.sleep(after_s)
    starting.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - began < 3
    os.rmdir(folder)  # it is empty
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in left if str(folder) in " ".join(command or ())]


@pytest.mark.ray
async def test_a_start_that_fails_says_why(ray_environ: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_START_HOOK", "no_such_module.hook")
    with pytest.raises(StartError, match=r"Ray cannot be started here: .*no_such_module"):
        await LocalRay.start(num_cpus=1)
