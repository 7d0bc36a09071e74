"""Power from a counter that moves in coarse steps."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.power_meter import NvmlCard, next_step, watts_between


class CoarseCard:
    """Its counter tells, at each multiple of `step_s`, all energy up to then."""

    def __init__(self, watts: float, step_s: float, now: float) -> None:
        self.now, self._watts, self._step_s = now, watts, step_s

    def joules(self) -> float:
        return self._watts * math.floor(self.now / self._step_s) * self._step_s

    def sm_mhz(self) -> float:
        return 1400.0

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float = 1e-3) -> None:
        self.now += seconds


@given(st.floats(50, 700), st.floats(0.02, 0.2), st.floats(0, 10), st.floats(0.4, 2))
def test_a_reading_between_steps_is_off_by_no_more_than_a_look_takes(watts, step_s, start, seconds):
    card = CoarseCard(watts, step_s, start)
    begin = next_step(card, card.pass_time, card.clock)
    card.pass_time(seconds)
    end = next_step(card, card.pass_time, card.clock)
    assert watts_between(begin, end) == pytest.approx(watts, rel=3e-3 / seconds)


def test_a_counter_that_stands_still_gives_no_power():
    card = CoarseCard(0.0, 0.1, 0.0)
    assert next_step(card, card.pass_time, card.clock) is None
    assert card.now < 1.0
    assert watts_between(None, (1.0, 2.0)) is None
    assert watts_between((1.0, 2.0), None) is None


def test_the_card_is_the_one_that_cuda_runs_on_whichever_nvml_calls_the_first(monkeypatch):
    watts = {"GPU-first": 70e3, "GPU-ours": 690e3}
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetPowerUsage=watts.__getitem__)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: sorted(watts)[index]
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # CUDA_VISIBLE_DEVICES hides the first one
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ours"))
    assert NvmlCard().watts() == 690.0
