"""The in-process twin: outputs come over from the engine's thread, and an end is told however it comes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from fake_instance import capacity

from control_plane.instance import InstanceLost, LocalInstance
from scheduler.plan import LoadReport, OutputBatch

LOAD = LoadReport(0, 0, 0, 0, 0, 1, 1)


def batch(number):
    numbers = np.array([number], np.int32)
    return OutputBatch((f"r{number}",), numbers, numbers, (), None, LOAD)


class ScriptedEngine:
    """Does in run() what its script says: emits what it is handed, until told to stop or to break."""

    def __init__(self, emit):
        self.emit = emit
        self.calls = []
        self.go_on = threading.Event()
        self.error = None

    def submit(self, requests):
        self.calls.append(("submit", list(requests)))
        for number in requests:
            self.emit(batch(number))

    def cancel(self, cancels):
        self.calls.append(("cancel", list(cancels)))

    def flush_cache(self):
        return 3

    def run(self):
        assert self.go_on.wait(10)
        if self.error is not None:
            self.emit(batch(99))
            raise self.error

    def stop(self):
        self.go_on.set()


async def numbers_of(instance, count):
    got = []
    async with asyncio.timeout(5):
        while len(got) < count:
            got += [int(each.token_ids[0]) for each in await instance.next_outputs()]
    return got


async def test_outputs_come_in_order_from_another_thread():
    released = []
    engines = []

    def make(emit):
        engines.append(ScriptedEngine(emit))
        return engines[0]

    instance = LocalInstance("local", capacity(), make, lambda: released.append(True))
    waiting = asyncio.create_task(numbers_of(instance, 300))
    await asyncio.sleep(0)
    await asyncio.to_thread(engines[0].submit, range(300))
    assert await waiting == list(range(300))
    await instance.cancel(["c"])
    assert engines[0].calls[-1] == ("cancel", ["c"])
    assert await instance.flush_cache() == 3
    assert not released
    await instance.close()
    await instance.close()
    assert released == [True]
    for call in (instance.submit([]), instance.cancel([]), instance.next_outputs(), instance.flush_cache()):
        with pytest.raises(InstanceLost, match="closed"):
            await call


async def test_a_broken_engine_gives_its_last_outputs_and_then_is_lost():
    engines = []
    instance = LocalInstance("local", capacity(), lambda emit: engines.append(ScriptedEngine(emit)) or engines[0])
    engines[0].error = RuntimeError("secret")
    waiting = asyncio.create_task(numbers_of(instance, 1))
    await asyncio.sleep(0.01)
    engines[0].go_on.set()
    assert await waiting == [99]
    with pytest.raises(InstanceLost, match="RuntimeError") as caught:
        async with asyncio.timeout(5):
            await instance.next_outputs()
    assert "secret" not in str(caught.value)
    with pytest.raises(InstanceLost):
        await instance.submit([])
    await instance.close()
