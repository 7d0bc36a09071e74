"""Beside which CPUs the GPUs are, by a sysfs of files, and that what is started there stays there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.store_affinity import beside_gpus, started_on

MINE = os.sched_getaffinity(0)
ABSENT = max(MINE) + 1
GPU, HUB = ("0x10de", "0x030200"), ("0x10de", "0x068000")  # vendor and class


@pytest.fixture
def sysfs(tmp_path):
    """sysfs(devices, cpus) -> a folder that says so; a device is (what, its node)."""

    def make(devices: list[tuple[tuple[str, str], str]], cpus: dict[str, str]) -> Path:
        for number, ((vendor, kind), node) in enumerate(devices):
            device = tmp_path / f"bus/pci/devices/0000:{number:02x}:00.0"
            device.mkdir(parents=True)
            for name, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
                (device / name).write_text(value + "\n")
        for node, listed in cpus.items():
            folder = tmp_path / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(listed + "\n")
        return tmp_path

    return make


def test_gpus_of_one_node_have_its_cpus(sysfs):
    first = min(MINE)
    folder = sysfs([(GPU, "1"), (GPU, "1"), (HUB, "0"), (("0x8086", "0x030000"), "0")], {"1": f"{first},{ABSENT}"})
    found = beside_gpus(folder)
    assert found.cpus == {first}
    assert "1 CPUs of the GPU's NUMA node 1" in found.reason


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ([], "no NUMA node"),
        ([(HUB, "0")], "no NUMA node"),
        ([(GPU, "-1")], "no NUMA node"),
        ([(GPU, "0"), (GPU, "1")], r"several NUMA nodes \(0, 1\)"),
        ([(GPU, "2")], "none of the GPU's NUMA node 2"),
    ],
)
def test_where_no_one_node_is_known_nothing_is_bound(sysfs, devices, reason):
    found = beside_gpus(sysfs(devices, {"0": "0", "1": "1", "2": str(ABSENT)}))
    assert not found.cpus
    assert re.search(reason, found.reason)


def test_a_process_stays_where_it_was_started_and_its_starter_does_not():
    show = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    last = max(MINE)
    for cpus, expected in ((frozenset({last}), [last]), (frozenset(), sorted(MINE))):
        output = started_on(cpus, lambda: subprocess.run(show, capture_output=True, text=True, check=True)).stdout
        assert output.strip() == str(expected)
    assert os.sched_getaffinity(0) == MINE


def test_what_fails_there_fails_here():
    with pytest.raises(FileNotFoundError):
        started_on(frozenset({min(MINE)}), lambda: subprocess.run(["/nowhere"]))
