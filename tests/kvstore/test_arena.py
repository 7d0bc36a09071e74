"""Shared memory that comes and goes with its maker."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.arena import Arena, Mapping, remove_abandoned
from kvstore.keys import StoreError

SHARED_MEMORY = Path("/dev/shm")

MAKER = """
import sys, time
from pathlib import Path
from kvstore.arena import Arena
arena = Arena(1 << 16, Path("/dev/shm"))
arena.view[:5] = b"hello"
print(arena.path, flush=True)
time.sleep(60)
"""


def test_makers_and_clients_see_the_same_bytes():
    arena = Arena(1 << 16, SHARED_MEMORY)
    client = Mapping.open(str(arena.path), 1 << 16)
    arena.view[100:105] = b"hello"
    assert client.view[100:105] == b"hello"
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    arena.close()
    assert not arena.path.exists()
    assert client.view[100:105] == b"hello", "a mapping outlives the file"
    client.close()


def test_what_a_killed_maker_left_is_removed_and_a_living_ones_is_not():
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as maker:
        path = Path(maker.stdout.readline().strip())
        assert path not in remove_abandoned(SHARED_MEMORY)
        client = Mapping.open(str(path), 1 << 16)
        maker.send_signal(signal.SIGKILL)
        maker.wait(10)
    assert path.exists()
    assert path in remove_abandoned(SHARED_MEMORY)
    assert not path.exists()
    assert client.view[:5] == b"hello"


def test_more_memory_than_there_is_is_a_users_error_and_leaves_nothing():
    before = sorted(SHARED_MEMORY.iterdir())
    with pytest.raises(StoreError, match="ask for fewer cpu-bytes"):
        Arena(1 << 50, SHARED_MEMORY)
    assert sorted(SHARED_MEMORY.iterdir()) == before


def test_a_folder_that_is_not_there_is_a_users_error(tmp_path):
    with pytest.raises(StoreError, match="no arena can be made"):
        Arena(1 << 16, tmp_path / "missing")


def test_files_of_other_sizes_or_owners_are_not_mapped(tmp_path):
    path = tmp_path / "nanoflow-kv-file"
    path.write_bytes(bytes(8192))
    with pytest.raises(OSError, match="size 8192"):
        Mapping.open(str(path), 4096)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(OSError, match="owner 12345"):
            Mapping.open(str(path), 8192)
