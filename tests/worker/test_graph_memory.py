"""Graphs on a device that has as much memory as the test says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.config import WorkerConfig
from worker.cuda_loading import _Loader
from worker.device_memory import GIB, DeviceMemory
from worker.executor import CapacityError
from worker.graph_memory import capture_within

LISTED = DeviceMemory(
    total=100 * GIB, spared=3 * GIB, others=GIB, weights=16 * GIB, buffers=0, working=GIB // 4, graphs=GIB
)


class Device:
    """Its memory, and graphs that take of it."""

    def __init__(self, sizes: list[int]) -> None:
        self.free, self.sizes, self.captured = 10 * GIB, sizes, 0

    def capture(self, number: int) -> None:
        self.free -= self.sizes[number]
        self.captured += 1


@given(st.lists(st.integers(0, GIB // 4), min_size=1, max_size=20), st.integers(0, GIB // 2))
def test_graphs_get_what_was_set_aside_and_the_start_ends_where_that_is_not_enough(sizes, left):
    device, memory = Device(sizes), replace(LISTED, kv_cache=LISTED.room - left)
    fits = sum(sizes) <= LISTED.graphs + LISTED.working // 2 + left
    numbers = range(len(sizes))
    if fits:
        assert capture_within(memory, numbers, device.capture, lambda: device.free) == sum(sizes)
        assert device.captured == len(sizes)
        return
    with pytest.raises(CapacityError, match="CUDA graphs took"):
        capture_within(memory, numbers, device.capture, lambda: device.free)
    # Nothing is captured any more behind the one that was too much.
    assert sum(sizes[: device.captured - 1]) <= memory.for_graphs < sum(sizes[: device.captured])


def test_the_kv_cache_that_the_message_asks_for_leaves_enough():
    sizes, memory = [GIB // 4] * 8, replace(LISTED, kv_cache=LISTED.room)
    device = Device(sizes)
    with pytest.raises(CapacityError, match=r"5 of 8 CUDA graphs took 1.25 GiB, and 1.12 were set aside") as caught:
        capture_within(memory, range(8), device.capture, lambda: device.free)
    asked = int(re.search(r"--kv-cache-memory-bytes (\d+)", str(caught.value))[1])
    device = Device(sizes)
    assert capture_within(replace(memory, kv_cache=asked), range(8), device.capture, lambda: device.free) == 2 * GIB


def test_what_other_processes_give_back_meanwhile_does_no_harm():
    device = Device([-GIB, GIB // 8])
    assert capture_within(replace(LISTED, kv_cache=LISTED.room), range(2), device.capture, lambda: device.free) < 0


def test_a_start_captures_within_the_memory_that_was_listed(random_model, monkeypatch):
    config = WorkerConfig(random_model("llama"), dtype="float32", max_slots=8, num_pages=32)
    loader = _Loader(config, lambda what, share: None, [4, 8])
    loader.load()
    device = Device([GIB] * 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, LISTED.total))
    monkeypatch.setattr(loader._model, "capture", lambda key, pool: device.capture(0))
    loader._memory = replace(LISTED, kv_cache=LISTED.room - 4 * GIB)
    loader._capture()
    assert device.captured == 4
    loader._memory = replace(LISTED, kv_cache=LISTED.room)
    with pytest.raises(CapacityError, match="2 of 4 CUDA graphs"):
        loader._capture()
