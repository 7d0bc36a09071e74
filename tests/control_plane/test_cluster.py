"""How an instance on Ray notices that one of its processes has gone or is silent, with scripted actors."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from fake_instance import capacity
from ray.exceptions import RayActorError, RayTaskError

from control_plane import cluster, pulse
from control_plane.cluster import RayInstance
from control_plane.instance import InstanceLost
from worker.schedule_sets import SchedulesRefusedError


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


async def test_a_dead_worker_is_noticed_at_once(parts, monkeypatch):
    monkeypatch.setattr(cluster, "POLL_S", 60)  # not when the scheduler answers next,
    monkeypatch.setattr(cluster, "SILENCE_S", 60)  # nor when it has not for long
    waiting = asyncio.create_task(parts.instance.next_outputs())
    await asyncio.sleep(0.05)
    parts.died.set()
    with pytest.raises(InstanceLost, match="ended unexpectedly"):
        await asyncio.wait_for(waiting, 5)


def exchanging(calls: list, name: str, refusal: BaseException | None = None) -> Actor:
    """A worker that takes longer for schedules than a silent one has; calls are noted."""

    async def lifeline():
        await asyncio.Event().wait()

    async def progress():
        return "loaded"

    async def prepare_schedules(number, schedules):
        await asyncio.sleep(0.5)
        calls.append((name, "prepared", number))
        if refusal is not None:
            raise refusal

    async def drop_schedules(number):
        calls.append((name, "dropped", number))

    return Actor(
        lifeline=lifeline, progress=progress, prepare_schedules=prepare_schedules, drop_schedules=drop_schedules
    )


async def test_schedules_are_made_ready_on_all_ranks_however_long_that_takes(parts):
    calls = []

    async def use_schedules(number):
        await asyncio.sleep(0.5)
        calls.append(("scheduler", "uses", number))

    scheduler = Actor(use_schedules=use_schedules)
    instance = RayInstance("i", capacity(), None, scheduler, [exchanging(calls, "0"), exchanging(calls, "1")])
    await instance.prepare_schedules(3, [])
    assert sorted(calls) == [("0", "prepared", 3), ("1", "prepared", 3)]
    await instance.use_schedules(3)
    assert calls[2:] == [("scheduler", "uses", 3)]


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        (RayTaskError("prepare", "...", SchedulesRefusedError("x: lanes overlap")), SchedulesRefusedError, "x: lanes"),
        (RayActorError(), InstanceLost, "ended unexpectedly"),
    ],
)
async def test_what_a_rank_says_of_schedules_is_told_when_no_rank_is_at_them_any_more(parts, failure, raised, message):
    calls = []
    refusing = exchanging(calls, "0", failure)
    instance = RayInstance("i", capacity(), None, Actor(), [refusing, exchanging(calls, "1")])
    with pytest.raises(raised, match=message):
        await instance.prepare_schedules(3, [])
    assert sorted(calls) == [("0", "prepared", 3), ("1", "prepared", 3)]
    await instance.drop_schedules(3)
    assert sorted(calls[2:]) == [("0", "dropped", 3), ("1", "dropped", 3)]


def test_silence_is_noticed_within_five_seconds():
    assert cluster.POLL_S + cluster.SILENCE_S < 5
