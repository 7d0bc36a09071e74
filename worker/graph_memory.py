"""Capturing graphs within the memory that was set aside for them, so that they take nothing that is to be spared.

Knows nothing of torch or of what the graphs launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from worker.device_memory import GIB, DeviceMemory
from worker.executor import CapacityError

Key = TypeVar("Key")


def capture_within(
    memory: DeviceMemory, keys: Sequence[Key], capture: Callable[[Key], None], free_bytes: Callable[[], int]
) -> int:
    """Capture all, the largest first; the bytes that this took. free_bytes: of the device, by its own account.

    memory: as listed, with the KV cache. Raises CapacityError as soon as the graphs have more than was reserved for
    them and is left beside the KV cache.
    """
    before, taken = free_bytes(), 0
    for number, key in enumerate(keys, start=1):
        capture(key)
        taken = before - free_bytes()
        if taken > memory.for_graphs:
            missing = taken * len(keys) // number - memory.for_graphs
            raise CapacityError(
                f"{number} of {len(keys)} CUDA graphs took {taken / GIB:.2f} GiB, and {memory.for_graphs / GIB:.2f} "
                "were set aside for all: unless something else takes memory of this GPU at the same time, leave "
                f"{missing / GIB:.2f} GiB of the KV cache to them by --kv-cache-memory-bytes "
                f"{max(0, memory.kv_cache - missing)} or fewer pages in --num-gpu-blocks-override: {memory}"
            )
    return taken
