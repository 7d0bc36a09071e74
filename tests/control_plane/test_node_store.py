"""The KV store of a server's own: one, on the instance's node, started again when it ends."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from control_plane import node_store
from control_plane.config import EngineConfig, OwnStoreConfig
from control_plane.errors import StartError
from control_plane.node_store import NodeStore, store_flags
from control_plane.options import ConfigError
from control_plane.serve import store_of
from control_plane.store_host import LogLine


class FakeHost:
    def __init__(self, node: str, fails: bool) -> None:
        self.node, self.fails = node, fails
        self.state = "made"
        self.lines: list[LogLine] = []

    async def start(self) -> None:
        if self.fails:
            raise StartError("no memory")
        self.state = "runs"

    async def where(self) -> str:
        return "on any CPU"

    async def ended(self) -> str | None:
        return None if self.state == "runs" else self.state

    async def said(self) -> list[LogLine]:
        lines, self.lines = self.lines, []
        return lines

    async def stop(self) -> None:
        self.state = "stopped"


class Hosts:
    """Makes hosts; the starts in `failing` (from 0) raise."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.made: list[FakeHost] = []

    def __call__(self, node: str) -> FakeHost:
        self.made.append(FakeHost(node, len(self.made) in self.failing))
        return self.made[-1]

    @property
    def states(self) -> list[str]:
        return [host.state for host in self.made]


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """Seconds that were slept but for polling, which costs none."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds != node_store.POLL_S:
            slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(node_store, "POLL_S", 0.123)
    monkeypatch.setattr(node_store.asyncio, "sleep", note)
    return slept


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(node_store.POLL_S)


async def test_an_instance_that_is_rebuilt_on_the_same_node_keeps_the_store():
    hosts = Hosts()
    store = NodeStore(hosts, "unix:/s")
    await store.place("a")
    await store.place("a")
    assert hosts.states == ["runs"]
    await store.place("b")
    assert [(host.node, host.state) for host in hosts.made] == [("a", "stopped"), ("b", "runs")]
    await store.close()
    await store.close()
    assert hosts.states == ["stopped", "stopped"]


async def test_a_first_start_that_fails_says_so_and_leaves_nothing():
    hosts = Hosts(0)
    store = NodeStore(hosts, "unix:/s")
    with pytest.raises(StartError, match="no memory"):
        await store.place("a")
    assert hosts.states == ["stopped"]
    await store.place("a")
    assert hosts.states == ["stopped", "runs"]
    await store.close()


async def test_it_is_started_again_with_growing_pauses(pauses):
    hosts = Hosts(1, 2, 3)
    store = NodeStore(hosts, "unix:/s")
    await store.place("a")
    hosts.made[0].state = "killed"
    await turns(40)
    assert hosts.states == ["stopped"] * 4 + ["runs"]
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    await store.close()
    await turns()
    assert len(hosts.made) == 5


async def test_its_log_is_part_of_the_servers_log(caplog):
    caplog.set_level(logging.INFO)
    hosts = Hosts()
    store = NodeStore(hosts, "unix:/s")
    await store.place("a")
    hosts.made[0].lines = [LogLine(logging.INFO, "kvstore.x: begun"), LogLine(logging.ERROR, "kvstore.x: broken")]
    hosts.made[0].state = "killed"
    await turns()
    await store.close()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    begun = said.index(("INFO", "KV store: kvstore.x: begun"))
    assert said[begun + 1] == ("ERROR", "KV store: kvstore.x: broken")
    assert "has ended" in said[begun + 2][1]


async def test_pauses_end_at_the_longest_and_start_anew_after_a_steady_run(pauses, monkeypatch):
    hosts = Hosts()
    store = NodeStore(hosts, "unix:/s")
    await store.place("a")
    for _ in range(9):
        hosts.made[-1].state = "killed"
        await turns()
    assert pauses[-2:] == [30.0, 30.0]
    monkeypatch.setattr(node_store, "STEADY_S", -1.0)
    hosts.made[-1].state = "killed"
    await turns()
    assert pauses[-1] == 0.5
    await store.close()


def test_options_become_flags_of_the_command():
    assert store_flags(OwnStoreConfig(kv_store_cpu_bytes=5)) == ["--cpu-bytes", "5"]
    all_given = OwnStoreConfig(5, Path("/ssd"), 7, 0, 9000)
    ssd = ["--ssd-dir", "/ssd", "--ssd-bytes", "7", "--ssd-after-hits", "0"]
    assert store_flags(all_given)[2:] == [*ssd, "--store-metrics-port", "9000"]


def test_one_store_only(tmp_path):
    engine = EngineConfig(tmp_path)
    assert store_of(engine, OwnStoreConfig()) is None
    assert store_of(EngineConfig(tmp_path, kv_store="unix:/s"), OwnStoreConfig()) is None
    own = OwnStoreConfig(kv_store_cpu_bytes=1 << 20)
    store = store_of(engine, own)
    assert store is not None
    assert store.address.startswith("unix:/")
    with pytest.raises(ConfigError, match="both given"):
        store_of(EngineConfig(tmp_path, kv_store="unix:/s"), own)
    with pytest.raises(ConfigError, match="give kv-store-cpu-bytes too"):
        OwnStoreConfig(kv_store_ssd_dir=tmp_path)
