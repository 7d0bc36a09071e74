"""The supervisor with fakes: one instance at a time, replaced when lost, closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from control_plane import supervisor
from control_plane.supervisor import Supervisor


class FakeInstance:
    def __init__(self) -> None:
        self.name = "instance"
        self.lost = asyncio.Event()
        self.num_closed = 0
        self.close_error: Exception | None = None
        self.hangs = False

    async def close(self) -> None:
        self.num_closed += 1
        if self.close_error is not None:
            raise self.close_error
        if self.hangs:
            await asyncio.Event().wait()


class FakeHost:
    needs_instance = True

    def attach(self, instance: FakeInstance) -> Awaitable[object]:
        return instance.lost.wait()


class Starter:
    """Starts instances; the attempts in `failing` (from 0) raise."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.num_attempts = 0
        self.instances: list[FakeInstance] = []

    async def __call__(self) -> FakeInstance:
        attempt = self.num_attempts
        self.num_attempts += 1
        if attempt in self.failing:
            raise RuntimeError(f"attempt {attempt}")
        self.instances.append(FakeInstance())
        return self.instances[-1]


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it waits for knows of no event
            await asyncio.sleep(0.001)


async def test_a_first_start_that_fails_ends_it():
    with pytest.raises(RuntimeError, match="attempt 0"):
        await Supervisor(Starter(0), FakeHost()).run()


async def test_a_lost_instance_is_closed_and_replaced_however_often_the_start_fails(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    start, told = Starter(1, 2), []
    keeper = Supervisor(start, FakeHost())
    task = asyncio.create_task(keeper.run(lambda: told.append(1)))
    await until(lambda: len(start.instances) == 1)
    start.instances[0].lost.set()
    await until(lambda: len(start.instances) == 2)
    assert start.num_attempts == 4
    assert start.instances[0].num_closed >= 1
    assert start.instances[1].num_closed == 0
    await until(lambda: len(told) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert start.instances[1].num_closed == 0  # its requests may still finish
    await keeper.close()
    await keeper.close()
    assert start.instances[1].num_closed == 1


async def test_while_draining_a_lost_instance_is_not_replaced_and_the_supervisor_stays_until_it_is_cancelled():
    start, host = Starter(), FakeHost()
    task = asyncio.create_task(Supervisor(start, host).run())
    await until(lambda: start.instances)
    host.needs_instance = False
    start.instances[0].lost.set()
    await until(lambda: start.instances[0].num_closed)
    await asyncio.sleep(0.05)
    assert not task.done()
    assert start.num_attempts == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_failing_starts_are_given_up_when_nobody_waits_for_them_any_more(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    start, host = Starter(*range(1, 1000)), FakeHost()
    task = asyncio.create_task(Supervisor(start, host).run())
    await until(lambda: start.instances)
    start.instances[0].lost.set()
    await until(lambda: start.num_attempts >= 3)
    host.needs_instance = False
    await asyncio.sleep(0.05)
    num_attempts = start.num_attempts
    await asyncio.sleep(0.3)
    assert start.num_attempts == num_attempts
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_an_instance_that_cannot_be_taken_down_neither_ends_nor_holds_the_supervisor(monkeypatch, fault):
    monkeypatch.setattr(supervisor, "CLOSE_TIMEOUT_S", 0.05)
    start = Starter()
    keeper = Supervisor(start, FakeHost())
    task = asyncio.create_task(keeper.run())
    for number in range(2):
        await until(lambda: len(start.instances) == number + 1)  # noqa: B023 - awaited here
        instance = start.instances[number]
        instance.close_error, instance.hangs = (RuntimeError("stuck") if fault == "raises" else None), fault == "hangs"
        if number == 0:
            instance.lost.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await keeper.close()
    assert [instance.num_closed for instance in start.instances] == [1, 1]
