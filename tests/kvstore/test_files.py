"""Reads that go past the page cache where they can, and give the same bytes where they cannot."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvstore.files import Files

BLOCK = 4096


@pytest.fixture(params=["/dev/shm", None], ids=["tmpfs", "disk"])
def path(request, tmp_path):
    """A file of twenty blocks; direct reads are nothing that every tmpfs can do."""
    file = Path(request.param) / f"nanoflow-test-{os.getpid()}" if request.param else tmp_path / "file"
    file.write_bytes(os.urandom(20 * BLOCK))
    yield file
    file.unlink()


@pytest.mark.parametrize("begin", [0, 8, BLOCK], ids=["aligned", "unaligned memory", "the next page"])
@pytest.mark.parametrize("offset", [0, 3 * BLOCK, 100])
@pytest.mark.parametrize("length", [BLOCK, 5 * BLOCK, 777])
def test_bytes_are_the_files_whatever_is_aligned(path, begin, offset, length):
    with mmap.mmap(-1, 8 * BLOCK) as memory, memoryview(memory) as view:
        with view[begin : begin + length] as into:
            assert Files().read(path, offset, into) == length
            assert bytes(into) == path.read_bytes()[offset : offset + length]
        assert not any(view[begin + length :]), "more was written than asked for"


def test_what_was_just_written_is_read(path):
    new = os.urandom(2 * BLOCK)
    Files().write(path, 4 * BLOCK, memoryview(new))
    with mmap.mmap(-1, 4 * BLOCK) as memory, memoryview(memory) as view:
        assert Files().read(path, 3 * BLOCK, view) == 4 * BLOCK
        assert bytes(view[BLOCK : 3 * BLOCK]) == new


@pytest.mark.parametrize("kept", [0, 100, BLOCK, BLOCK + 100])
def test_a_file_that_was_cut_off_gives_what_it_has(path, kept):
    os.truncate(path, 2 * BLOCK + kept)
    with mmap.mmap(-1, 4 * BLOCK) as memory, memoryview(memory) as view:
        assert Files().read(path, 2 * BLOCK, view) == kept
        assert bytes(view[:kept]) == path.read_bytes()[2 * BLOCK :]


def test_a_link_and_a_missing_file_are_errors(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hostname")
    for name in ("link", "missing"):
        with pytest.raises(OSError, match=name):
            Files().read(tmp_path / name, 0, memoryview(bytearray(BLOCK)))
