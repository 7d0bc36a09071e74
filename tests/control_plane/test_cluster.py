"""How an instance on Ray notices that one of its processes has gone or is silent, with scripted actors."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from fake_instance import capacity
from ray.exceptions import RayActorError

from control_plane import cluster, pulse
from control_plane.cluster import RayInstance
from control_plane.instance import InstanceLost


class Actor:
    """Methods are called as on an actor handle. While `stopped` is set, calls are not answered."""

    def __init__(self, **methods) -> None:
        self.stopped = asyncio.Event()
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=lambda *args, _method=method: self._call(_method, *args)))

    async def _call(self, method, *args):
        answer = await method(*args)
        if self.stopped.is_set():
            await asyncio.Event().wait()
        return answer


def worker(died: asyncio.Event) -> Actor:
    async def lifeline():
        await died.wait()
        raise RayActorError

    async def progress():
        return "loaded"

    return Actor(lifeline=lifeline, progress=progress)


@pytest.fixture
async def parts(monkeypatch):
    monkeypatch.setattr(cluster, "POLL_S", 0.02)
    monkeypatch.setattr(cluster, "SILENCE_S", 0.2)
    monkeypatch.setattr(pulse, "SLICE_S", 0.02)
    taken_down = []
    monkeypatch.setattr(cluster, "_take_down", lambda group, actors: taken_down.extend(actors))

    async def next_outputs(max_wait_s):
        await asyncio.sleep(max_wait_s)
        return []

    died = asyncio.Event()
    scheduler, workers = Actor(next_outputs=next_outputs), [worker(died), worker(died)]
    instance = RayInstance("i", capacity(), None, scheduler, workers)
    yield SimpleNamespace(instance=instance, scheduler=scheduler, workers=workers, died=died)
    await instance.close()
    assert taken_down == [scheduler, *workers]


async def test_an_instance_whose_processes_answer_stays_however_long_nothing_comes_out(parts):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(parts.instance.next_outputs(), 0.8)


@pytest.mark.parametrize(("victim", "who"), [("scheduler", "scheduler"), ("worker", "worker")])
async def test_a_stopped_process_is_noticed_in_time(parts, victim, who):
    waiting = asyncio.create_task(parts.instance.next_outputs())
    await asyncio.sleep(0.05)
    (parts.scheduler if victim == "scheduler" else parts.workers[1]).stopped.set()
    stopped_at = time.monotonic()
    with pytest.raises(InstanceLost, match=f"{who} has not answered"):
        await asyncio.wait_for(waiting, 5)
    assert 0.1 < time.monotonic() - stopped_at < 1


async def test_a_dead_worker_is_noticed_at_once(parts):
    waiting = asyncio.create_task(parts.instance.next_outputs())
    await asyncio.sleep(0.05)
    parts.died.set()
    died_at = time.monotonic()
    with pytest.raises(InstanceLost, match="ended unexpectedly"):
        await asyncio.wait_for(waiting, 5)
    assert time.monotonic() - died_at < 0.15


def test_silence_is_noticed_within_five_seconds():
    assert cluster.POLL_S + cluster.SILENCE_S < 5
