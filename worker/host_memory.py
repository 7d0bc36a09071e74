"""How much memory this machine, or the container that this process is in, has left. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """What the kernel has, or what the control group (a container's limit) leaves, whichever is less."""
    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no control groups of version 2, or no limit ("max")
        return available
    return min(available, max(0, limit - used))
