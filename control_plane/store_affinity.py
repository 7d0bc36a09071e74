"""On which CPUs a store belongs: those of the NUMA node that the machine's GPUs are on, where that is one.

A process keeps to the CPUs of the thread that starts it, and the memory that it takes comes from their node. Knows
nothing of CUDA, nor of stores; which GPU an instance will get is not known when its store starts, so GPUs on several
nodes bind nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from worker.numa import SYSFS, cpus_of, node_of

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # what the class of a PCI device begins with

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Affinity:
    """Where a process is to run."""

    cpus: frozenset[int]  # none: anywhere
    reason: str  # in words


def beside_gpus(sysfs: Path = SYSFS) -> Affinity:
    """The CPUs beside the GPUs, of those that this thread may use."""
    nodes = {node for pci_id in _gpus(sysfs) if (node := node_of(pci_id, sysfs)) is not None}
    if not nodes:
        return Affinity(frozenset(), "on any CPU, as no NUMA node of a GPU is known")
    if len(nodes) > 1:
        named = ", ".join(map(str, sorted(nodes)))
        return Affinity(frozenset(), f"on any CPU, as there are GPUs on several NUMA nodes ({named})")
    node = nodes.pop()
    cpus = cpus_of(node, sysfs) & os.sched_getaffinity(0)
    if not cpus:
        return Affinity(cpus, f"on any CPU, as none of the GPU's NUMA node {node} may be used")
    return Affinity(cpus, f"on the {len(cpus)} CPUs of the GPU's NUMA node {node}, memory from there")


def started_on(cpus: frozenset[int], start: Callable[[], Result]) -> Result:
    """Call `start` in a thread on these CPUs: processes that it starts stay on them. None of them: here, as it is."""
    if not cpus:
        return start()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread
            results.append(start())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="start")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _gpus(sysfs: Path) -> list[str]:
    """PCI addresses of NVIDIA's display devices, which GPUs without a display are too."""
    found = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        with suppress(OSError):
            is_nvidia = (device / "vendor").read_text().strip() == _NVIDIA
            if is_nvidia and (device / "class").read_text().startswith(_DISPLAY):
                found.append(device.name)
    return found
