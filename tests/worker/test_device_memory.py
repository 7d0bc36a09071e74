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
