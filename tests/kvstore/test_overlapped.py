"""Several reads at once give the bytes that they should, or say that they do not, and are over when they return."""

from __future__ import annotations

import errno
import mmap
import os
import random

import pytest
from store_calls import can_overlap

from kvstore import overlapped
from kvstore.overlapped import Overlapped

BLOCK = 4096
NUM_BLOCKS = 64

if not can_overlap():
    pytest.skip("reads cannot overlap here", allow_module_level=True)


@pytest.fixture(params=[0, os.O_DIRECT], ids=["cached", "direct"])
def file(request, tmp_path):
    """A descriptor, and what is in the file."""
    content = os.urandom(NUM_BLOCKS * BLOCK)
    (tmp_path / "file").write_bytes(content)
    try:
        descriptor = os.open(tmp_path / "file", os.O_RDONLY | request.param)
    except OSError:
        pytest.skip("no direct reads here")
    yield descriptor, content
    os.close(descriptor)


@pytest.fixture
def memory():
    """One view of as many blocks."""
    with mmap.mmap(-1, NUM_BLOCKS * BLOCK) as mapped, memoryview(mapped) as view:
        yield view


@pytest.fixture
def reads():
    made = Overlapped(16)
    yield made
    made.close()


def blocks(memory, first, *lengths):
    """Parts of the memory, from a block on, of so many blocks each."""
    found = []
    for length in lengths:
        found.append(memory[first * BLOCK : (first + length) * BLOCK])
        first += length
    return found


def test_each_read_fills_its_memory_in_order(file, memory, reads):
    descriptor, content = file
    chance = random.Random(0)
    for _ in range(20):
        places = chance.sample(range(0, NUM_BLOCKS, 4), chance.randrange(1, 17))
        wanted = [
            (descriptor, place * BLOCK, blocks(memory, 4 * number, *chance.choice([(4,), (1, 3), (2, 1, 1)])))
            for number, place in enumerate(places)
        ]
        assert reads.read(wanted) == [4 * BLOCK] * len(places)
        for _, offset, into in wanted:
            assert b"".join(into) == content[offset : offset + 4 * BLOCK]


def test_the_files_end_is_told_by_the_number(file, memory, reads):
    descriptor, content = file
    wanted = [
        (descriptor, (NUM_BLOCKS - 1) * BLOCK, blocks(memory, 0, 1, 1)),
        (descriptor, NUM_BLOCKS * BLOCK, blocks(memory, 2, 1)),
    ]
    assert reads.read(wanted) == [BLOCK, 0]
    assert bytes(memory[:BLOCK]) == content[-BLOCK:]
    assert not any(memory[BLOCK:])


def test_what_is_refused_is_told_and_keeps_nobody_else_from_the_next_call(file, memory, reads):
    descriptor, content = file
    wanted = [(descriptor if number != 2 else -1, number * BLOCK, blocks(memory, number, 1)) for number in range(4)]
    done = reads.read(wanted)
    assert done[:2] == [BLOCK, BLOCK]
    assert done[2] < 0
    assert reads.read([(-1, 0, blocks(memory, 0, 1))]) == [-errno.EBADF]
    assert reads.read([wanted[0], wanted[3]]) == [BLOCK, BLOCK]
    assert memory[3 * BLOCK : 4 * BLOCK] == content[3 * BLOCK : 4 * BLOCK]


def test_memory_that_is_not_aligned_is_filled_or_refused(file, memory, reads):
    descriptor, content = file
    into = memory[8 : 8 + BLOCK]
    (done,) = reads.read([(descriptor, 0, [into])])
    assert done == -errno.EINVAL or (done == BLOCK and into == content[:BLOCK])


def test_an_interrupted_wait_goes_on(file, memory, reads, monkeypatch):
    descriptor, content = file
    asked = fail_waits(monkeypatch, reads, [InterruptedError(), InterruptedError()])
    assert reads.read([(descriptor, 0, blocks(memory, 0, 1)), (descriptor, BLOCK, blocks(memory, 1, 1))]) == [BLOCK] * 2
    assert not asked
    assert memory[: 2 * BLOCK] == content[: 2 * BLOCK]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
def test_a_wait_that_fails_ends_all_reads(file, memory, monkeypatch, error):
    reads = Overlapped(2)
    fail_waits(monkeypatch, reads, [error("made up")])
    with pytest.raises(error, match="made up"):
        reads.read([(file[0], 0, blocks(memory, 0, 1))])
    memory[:] = bytes(len(memory))
    assert reads.read([(file[0], 0, blocks(memory, 0, 1))]) == [-errno.EINVAL], "the context is gone"
    assert not any(memory)


def test_memory_that_cannot_be_written_to_is_an_error_and_leaves_nothing_behind(file):
    reads = Overlapped(2)
    with pytest.raises(TypeError, match="not writable"):
        reads.read([(file[0], 0, [memoryview(bytes(BLOCK))])])
    with pytest.raises(OSError, match="Invalid argument"):
        reads.close()


def test_where_there_is_no_such_thing(monkeypatch):
    with pytest.raises(OSError, match="Invalid argument"):
        Overlapped(0)
    monkeypatch.setattr(overlapped.platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="not implemented"):
        Overlapped(1)


def fail_waits(monkeypatch, reads, errors):
    """The next waits raise these; the list is emptied by it."""
    real = overlapped._call

    def call(number, *arguments):
        if number == reads._calls.get_events and errors:
            raise errors.pop(0)
        return real(number, *arguments)

    monkeypatch.setattr(overlapped, "_call", call)
    return errors
