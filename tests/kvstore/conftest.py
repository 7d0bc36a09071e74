"""What the store's tests share: services in this process, and real ones in their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for store_process and store_calls, which tests import

from store_process import StoreProcess


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting needs privileges: the same faults are injected in other tests")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def store_process(tmp_path):
    """Starts `nanoflow kvstore` with flags; whatever runs at the end is killed, and must have left no arena."""
    started: list[StoreProcess] = []

    def start(**flags) -> StoreProcess:
        process = StoreProcess(tmp_path, **flags)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()
