"""Binds threads to the CPUs beside a GPU, so that their copies and pinned memory stay on its side of the machine.

Linux tells in sysfs which NUMA node a PCI device belongs to. Where it does not, nothing is bound. Knows nothing of
CUDA.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys")


def node_of(pci_id: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device such as 0000:3B:00.0; None where there is no telling."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """The CPUs of a node; none where there is no telling."""
    try:
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.split("-") for part in listed.split(",") if part]
        return frozenset(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))
    except (OSError, ValueError):
        return frozenset()


def bind_thread(pci_id: str, sysfs: Path = SYSFS) -> bool:
    """Let the calling thread run only on CPUs beside the device, of those it may use; whether it was bound.

    Memory that it touches first from now on is taken from their node.
    """
    node = node_of(pci_id, sysfs)
    if node is None:
        log.debug("no NUMA node is known of %s: threads run anywhere", pci_id)
        return False
    cpus = cpus_of(node, sysfs) & os.sched_getaffinity(0)
    if not cpus:
        log.debug("none of the CPUs of NUMA node %d may be used: threads run anywhere", node)
        return False
    os.sched_setaffinity(0, cpus)  # 0 is the calling thread
    return True
