"""How the bench keeps a GPU busy and reads its power, on a device that only pretends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worker import schedule_bench
from worker.cuda_model import GraphKey
from worker.schedule_bench import ScheduleBench


class FakeGpu:
    """Runs what is queued one after the other; draws 700 W, which its counter tells every 0.1 s."""

    def __init__(self, iteration_s: float) -> None:
        self.now, self.busy_until, self.idle_s, self.iteration_s = 0.0, 0.0, 0.0, iteration_s

    def run(self, key: GraphKey) -> None:
        self.idle_s += max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.now, self.busy_until) + self.iteration_s

    def joules(self) -> float:
        return 70.0 * int(self.now / 0.1)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def event(self, enable_timing: bool) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.busy_until)

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("iteration_s", [0.07, 0.0011])
def test_the_device_never_waits_for_the_host_and_power_is_between_the_counters_steps(monkeypatch, iteration_s):
    gpu = FakeGpu(iteration_s)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(schedule_bench, "time", SimpleNamespace(perf_counter=lambda: gpu.now, sleep=gpu.sleep))
    bench = ScheduleBench.__new__(ScheduleBench)  # no model: only the loop
    bench._model, bench._joules = gpu, gpu.joules
    reading = bench._repeat_queued(GraphKey(1, True), 1.5)
    assert reading.ms == pytest.approx(1e3 * iteration_s, rel=0.01)
    assert gpu.idle_s < 0.005
    assert 1.5 <= gpu.now < 1.5 + 5 * max(iteration_s, 0.03)
    # The counter's steps are coarse, a difference of two arbitrary moments would be up to 7 % off.
    assert reading.joules / reading.ms * 1e3 == pytest.approx(700, rel=0.005)
