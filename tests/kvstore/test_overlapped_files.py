"""Spans that are read at once are what they are one by one, errors too, and whether reads can overlap or not."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading

import pytest
from store_calls import can_overlap

from kvstore.files import Files, Span
from kvstore.overlapped import Overlapped
from kvstore.overlapped_files import _MAX_READS, OverlappedFiles

BLOCK = 4096
NUM_FILES = 4
NUM_BLOCKS = 40  # of a file


def none_made(max_reads):
    raise OSError(errno.EAGAIN, "none left")


class Refusing(Overlapped):
    """Does not do every other read, and ends others early."""

    def read(self, wanted):
        short = [(descriptor, offset, [into[0][:BLOCK]]) for descriptor, offset, into in wanted]
        return [-errno.EAGAIN if number % 2 else done for number, done in enumerate(super().read(short))]


class Failing(Overlapped):
    """Fails as a whole."""

    def read(self, wanted):
        self.close()
        raise OSError(errno.EFAULT, "made up")


@pytest.fixture(params=[None, none_made, Refusing, Failing], ids=["overlapped", "none made", "refusing", "failing"])
def files(request):
    made = OverlappedFiles() if request.param is None else OverlappedFiles(make=request.param)
    yield made
    made.close()


@pytest.fixture
def paths(tmp_path):
    made = [tmp_path / f"file-{number}" for number in range(NUM_FILES)]
    for path in made:
        path.write_bytes(os.urandom(NUM_BLOCKS * BLOCK))
    return made


@pytest.fixture
def memory():
    return memoryview(mmap.mmap(-1, 200 * BLOCK))  # aligned, as an arena is


@pytest.mark.parametrize("num_spans", [0, 1, 2, _MAX_READS, 2 * _MAX_READS + 1])
def test_every_span_has_its_bytes(files, paths, memory, num_spans):
    chance = random.Random(num_spans)
    spans = []
    for number in range(num_spans):
        start = 2 * number * BLOCK
        into = [memory[start : start + BLOCK], memory[start + BLOCK : start + 2 * BLOCK]]
        spans.append(Span(chance.choice(paths), chance.randrange(NUM_BLOCKS - 1) * BLOCK, into))
    assert files.read_all(spans) == [None] * num_spans
    for path, offset, into in spans:
        assert b"".join(into) == path.read_bytes()[offset : offset + 2 * BLOCK]
    assert not any(memory[2 * num_spans * BLOCK :])


def test_bad_ones_among_them_are_as_they_are_alone(files, paths, memory):
    os.truncate(paths[1], 5 * BLOCK + 100)
    missing = paths[0].with_name("missing")
    places = [(paths[0], 0), (paths[1], 4 * BLOCK), (paths[1], 8 * BLOCK), (missing, 0), (paths[2], 100), (paths[3], 0)]
    spans = [
        Span(path, offset, [memory[2 * number * BLOCK :][: 2 * BLOCK]]) for number, (path, offset) in enumerate(places)
    ]
    for _ in range(2):
        errors = files.read_all(spans)
        assert [getattr(error, "errno", None) for error in errors] == [None, None, None, errno.ENOENT, None, None]
        for path, offset, (into,) in spans:
            expected = b"" if path == missing else path.read_bytes()[offset : offset + 2 * BLOCK]
            assert into == expected.ljust(2 * BLOCK, b"\0")
    assert files.read_all([span for span in spans if span.path != missing]) == [None] * 5


def test_what_was_asked_for_is_read_by_itself_only_where_that_is_needed(paths, memory, monkeypatch):
    if not can_overlap():
        pytest.skip("reads cannot overlap here")
    alone = []
    monkeypatch.setattr(Files, "read", lambda self, path, offset, *into: alone.append(offset))
    spans = [Span(paths[0], number * BLOCK, [memory[number * BLOCK :][:BLOCK]]) for number in range(4)]
    files = OverlappedFiles()
    assert files.read_all(spans) == [None] * 4
    assert not alone
    files.close()


def test_where_reads_cannot_overlap_that_is_tried_once(paths, memory):
    tried = []

    def make(max_reads):
        tried.append(max_reads)
        raise OSError(errno.ENOSYS, "no such thing")

    files = OverlappedFiles(make=make)
    spans = [Span(path, 0, [memory[:BLOCK]]) for path in paths]
    for _ in range(3):
        assert files.read_all(spans) == [None] * NUM_FILES
    assert tried == [_MAX_READS]
    files.close()


def test_where_others_have_all_that_there_are_it_is_tried_again(paths, memory, monkeypatch, caplog):
    if not can_overlap():
        pytest.skip("reads cannot overlap here")
    left = [errno.EAGAIN, errno.EAGAIN]

    def make(max_reads):
        if left:
            number = left.pop()
            raise OSError(number, os.strerror(number))
        return Overlapped(max_reads)

    alone = []
    real = Files.read
    monkeypatch.setattr(Files, "read", lambda self, path, *rest: alone.append(path) or real(self, path, *rest))
    files = OverlappedFiles(make=make)
    spans = [Span(path, 0, [memory[number * BLOCK :][:BLOCK]]) for number, path in enumerate(paths)]
    with caplog.at_level("INFO"):
        for _ in range(4):
            assert files.read_all(spans) == [None] * NUM_FILES
    assert alone == paths * 2
    assert len(caplog.records) == 1
    files.close()


def test_threads_read_beside_each_other_and_all_is_closed(paths, memory):
    made = []

    class Counted(Overlapped):
        def __init__(self, max_reads):
            super().__init__(max_reads)
            made.append(self)

        def close(self):
            super().close()
            made.remove(self)

    if not can_overlap():
        pytest.skip("reads cannot overlap here")
    files = OverlappedFiles(2, Counted)
    contents = [path.read_bytes() for path in paths]
    wrong = []

    def work(thread):
        chance = random.Random(thread)
        for _ in range(50):
            places = [(chance.randrange(NUM_FILES), chance.randrange(NUM_BLOCKS) * BLOCK) for _ in range(8)]
            into = [memory[(8 * thread + number) * BLOCK :][:BLOCK] for number in range(8)]
            spans = [Span(paths[file], offset, [each]) for (file, offset), each in zip(places, into)]
            if files.read_all(spans) != [None] * 8:
                wrong.append(places)
            wrong.extend(
                place for place, each in zip(places, into) if each != contents[place[0]][place[1] : place[1] + BLOCK]
            )

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert 1 <= len(made) <= 4
    assert len(files._open) <= 2
    files.close()
    assert not made
