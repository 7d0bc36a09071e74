"""The listing of a GPU's memory."""

from __future__ import annotations

from dataclasses import replace

from worker.device_memory import GIB, DeviceMemory


def test_what_is_listed_adds_up():
    memory = DeviceMemory(
        total=100 * GIB, spared=3 * GIB, others=GIB, weights=16 * GIB, buffers=2 * GIB, working=GIB, graphs=GIB
    )
    assert memory.room == 76 * GIB
    assert replace(memory, kv_cache=70 * GIB).room == 6 * GIB
    assert "weights 16.00" in str(memory)
    assert "left 76.00" in str(memory)


def test_graphs_may_take_what_was_reserved_and_is_left_but_nothing_that_is_spared():
    memory = DeviceMemory(
        total=100 * GIB, spared=3 * GIB, others=0, weights=16 * GIB, buffers=0, working=2 * GIB, graphs=GIB
    )
    assert replace(memory, kv_cache=memory.room).for_graphs == 2 * GIB
    assert replace(memory, kv_cache=memory.room - GIB).for_graphs == 3 * GIB
    assert replace(memory, kv_cache=memory.room + GIB).for_graphs == 2 * GIB
