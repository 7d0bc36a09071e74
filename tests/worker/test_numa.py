"""Binding threads beside a device, by a sysfs of files."""

from __future__ import annotations

import os
import threading

import pytest

from worker.numa import bind_thread, cpus_of, node_of

GPU = "0000:3B:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """sysfs(node, cpulist) -> a folder that says so of GPU."""

    def make(node: str | None, cpulist: str = ""):
        device = tmp_path / "bus/pci/devices" / GPU.lower()
        device.mkdir(parents=True)
        if node is not None:
            (device / "numa_node").write_text(node + "\n")
            folder = tmp_path / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cpulist + "\n")
        return tmp_path

    return make


def in_thread(function):
    """What it returns, and the CPUs that its thread may use afterwards."""
    found = []
    thread = threading.Thread(target=lambda: found.extend((function(), os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return found


def test_a_node_has_its_cpus(sysfs):
    folder = sysfs("1", "0-3,8,10-11")
    assert node_of(GPU, folder) == 1
    assert cpus_of(1, folder) == {0, 1, 2, 3, 8, 10, 11}


def test_a_thread_is_bound_to_cpus_that_it_may_use_and_others_are_not(sysfs):
    mine = os.sched_getaffinity(0)
    first = min(mine)
    folder = sysfs("0", f"{first},{max(mine) + 1}-{max(mine) + 9}")
    assert in_thread(lambda: bind_thread(GPU, folder)) == [True, {first}]
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize(("node", "cpulist"), [(None, ""), ("-1", "0"), ("nonsense", "0"), ("0", ""), ("0", "a-b")])
def test_without_knowing_nothing_is_bound(sysfs, node, cpulist):
    mine = os.sched_getaffinity(0)
    folder = sysfs(node, cpulist)
    assert in_thread(lambda: bind_thread(GPU, folder)) == [False, mine]


def test_cpus_that_may_not_be_used_are_left_alone(sysfs):
    mine = os.sched_getaffinity(0)
    folder = sysfs("0", f"{max(mine) + 1}-{max(mine) + 9}")
    assert in_thread(lambda: bind_thread(GPU, folder)) == [False, mine]
