"""A KV store process of a server's own: it is ready when started, and never outlives its parent."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from control_plane.store_host import LogLine, StoreHost, own_socket, remove_abandoned
from kvstore.client import ClientConfig, KVClient
from kvstore.keys import StoreError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--cpu-bytes", str(1 << 20)]


@contextmanager
def host_in(folder: Path, *flags: str) -> Iterator[StoreHost]:
    host = StoreHost(folder / "own" / "kv.sock", flags or SMALL, 60.0)
    try:
        yield host
    finally:
        host.stop()


def put_and_get(folder: Path) -> bool:
    client = KVClient(ClientConfig(f"unix:{folder / 'own' / 'kv.sock'}", call_timeout_s=5.0))
    try:
        return client.put(b"key", b"payload") and client.get(b"key") == b"payload"
    finally:
        client.close()


def fake_sysfs(folder: Path, gpus: dict[str, int], cpus: dict[int, str]) -> Path:
    """GPUs with their NUMA nodes, and those nodes' CPUs."""
    for pci_id, node in gpus.items():
        device = folder / "bus/pci/devices" / pci_id
        device.mkdir(parents=True)
        for name, value in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node)):
            (device / name).write_text(f"{value}\n")
    for node, listed in cpus.items():
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{listed}\n")
    return folder


def until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_it_serves_when_started_and_is_gone_when_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOFLOW_STORE_PORT", "7000")  # for another store: with a socket that would be an error
    with host_in(tmp_path) as host:
        pid = host.start()
        assert host.ended() is None
        assert put_and_get(tmp_path)
        host.stop()
        assert until_gone(pid)
    assert not (tmp_path / "own").exists()


def test_after_a_kill_it_says_so_and_can_be_started_again(tmp_path):
    with host_in(tmp_path) as host:
        os.kill(host.start(), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while host.ended() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert host.ended() == "signal 9"  # and not what it happened to say last
        host.start()
        assert host.ended() is None
        assert put_and_get(tmp_path)


def test_a_killed_stores_memory_is_given_back_when_it_is_noticed(tmp_path):
    size = (1 << 20) + 12 * 4096  # by which the arena of this test is known
    with host_in(tmp_path, "--cpu-bytes", str(size)) as host:
        os.kill(host.start(), signal.SIGKILL)

        def arenas() -> list[Path]:
            return [path for path in Path("/dev/shm").glob("nanoflow-kv-*") if path.stat().st_size == size]

        assert arenas()
        host.stop()
        assert not arenas()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--cpu-bytes", "1000"], "at least 65536"),
        ([*SMALL, "--ssd-dir", "/proc/nowhere"], "cannot be used"),
        (["--cpu-bytes", "9000000000000000"], "fewer cpu-bytes"),
    ],
)
def test_why_it_does_not_start_is_told(tmp_path, flags, reason):
    with host_in(tmp_path, *flags) as host, pytest.raises(StoreError, match=reason):
        host.start()


def test_it_runs_beside_the_gpu_where_that_is_known(tmp_path):
    mine = os.sched_getaffinity(0)
    cpu = max(mine)
    sysfs = fake_sysfs(tmp_path / "sys", {"0000:3b:00.0": 0}, {0: str(cpu)})
    for beside_gpu, cpus, where in ((True, {cpu}, "NUMA node 0"), (False, mine, "any CPU")):
        host = StoreHost(tmp_path / "own" / "kv.sock", SMALL, 60.0, beside_gpu, sysfs)
        try:
            process = psutil.Process(host.start())
            assert set(process.cpu_affinity()) == cpus
            assert where in host.where()
            assert put_and_get(tmp_path)
        finally:
            host.stop()
    assert os.sched_getaffinity(0) == mine


def test_it_ends_with_a_parent_that_is_killed(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from control_plane.store_host import StoreHost\n"
        f"host = StoreHost(Path({str(tmp_path / 'own' / 'kv.sock')!r}), {SMALL!r}, 60.0)\n"
        "print(host.start(), flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert put_and_get(tmp_path)
        parent.kill()
        assert until_gone(pid)
        assert not (tmp_path / "own").exists()
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def test_what_it_logs_can_be_asked_for_once(tmp_path):
    with host_in(tmp_path, *SMALL, "--store-metrics-port", "0") as host:
        host.start()
        lines, deadline = host.said(), time.monotonic() + 10
        while not any("metrics on" in line.words for line in lines) and time.monotonic() < deadline:
            time.sleep(0.01)  # it is ready a little before its words are here
            lines += host.said()
        (told,) = [line for line in lines if "metrics on" in line.words]
        assert told.level == logging.INFO
        assert not any("metrics on" in line.words for line in host.said())


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        ("2026-11-30 13:00:00,123 W kvstore.ssd: the disk is full", logging.WARNING, "kvstore.ssd: the disk is full"),
        ("2026-11-30 13:00:00,123 C kvstore.ssd: over", logging.CRITICAL, "kvstore.ssd: over"),
        ("nanoflow: cpu-bytes is too small", logging.INFO, "cpu-bytes is too small"),
        ("Traceback (most recent call last):", logging.INFO, "Traceback (most recent call last):"),
    ],
)
def test_log_lines_keep_their_level(line, level, words):
    assert LogLine.of(line) == LogLine(level, words)


def test_folders_of_stores_that_are_gone_are_removed(tmp_path):
    names = ["gone", "empty", "held", "other", "young"]
    folders = {name: tmp_path / f"{own_socket().parent.name}{name}" for name in names}
    foreign = tmp_path / "nanoflow-kept"
    for folder in (*folders.values(), foreign):
        folder.mkdir()
        if folder != folders["empty"]:
            (folder / "kvstore.sock.lock").touch()
    (folders["other"] / "notes.txt").touch()
    for name, folder in (*folders.items(), ("foreign", foreign)):
        if name != "young":
            os.utime(folder, (1, 1))
    with (folders["held"] / "kvstore.sock.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert set(remove_abandoned(tmp_path)) == {folders["gone"], folders["empty"]}
    assert foreign.exists()
    assert remove_abandoned(tmp_path) == [folders["held"]]
    assert sorted(path.name[-5:] for path in tmp_path.iterdir()) == sorted(["-kept", "other", "young"])
