"""The few things that the SSD tier does with files. Tests put failing ones in its place. Knows nothing of records."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.open_files import OpenFiles, identity_of

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
MAX_OPEN = 256  # files; processes may have 1,024 as a rule


class Span(NamedTuple):
    """Bytes of a file, and where they are to go."""

    path: Path
    offset: int
    into: Sequence[memoryview]  # one after the other


class Files:
    """Whole reads and writes at an offset. Everything raises OSError. `close` when done.

    Files that were read stay open. One that somebody else deletes or replaces is read on until `forget_changed`, or
    until its path is written to.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._open = OpenFiles(max_open)

    def read(self, path: Path, offset: int, *into: memoryview) -> int:
        """Fill these, one after the other, from the file; bytes read, fewer than asked for only at the file's end.

        Past the page cache where that can be done: what is read is kept by the caller, and a copy of it in the cache
        would cost time and push out what others need.
        """
        file = self._open.take(path)
        try:
            return _read(file.descriptor, offset, into)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            self._open.give_back(file)
        return self._read_unaligned(path, offset, into)

    def read_all(self, spans: Sequence[Span]) -> list[OSError | None]:
        """`read` each of them; what was wrong with those that could not be read."""
        return [self._error_of(span) for span in spans]

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """Write all of it, making the file (for its owner only) if it is not there."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _OPEN, 0o600)
        try:
            self._open.forget_other(path, identity_of(os.fstat(descriptor)))
            done = 0
            while done < len(data):
                done += os.pwritev(descriptor, [data[done:]], offset + done)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file that may be gone already."""
        path.unlink(missing_ok=True)
        self._open.forget(path)

    def truncate(self, path: Path, num_bytes: int) -> None:
        """Cut a file off."""
        os.truncate(path, num_bytes)

    def forget_changed(self) -> None:
        """Let go of files that others have deleted or replaced; the disk has their bytes until then."""
        self._open.forget_changed()

    def close(self) -> None:
        """Let go of all."""
        self._open.close()

    def _error_of(self, span: Span) -> OSError | None:
        try:
            self.read(span.path, span.offset, *span.into)
        except OSError as error:
            return error
        return None

    def _read_unaligned(self, path: Path, offset: int, into: Sequence[memoryview]) -> int:
        """Through the page cache: offset, length or memory are not what direct reads want."""
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
        try:
            return _read(descriptor, offset, into)
        finally:
            os.close(descriptor)


def _read(descriptor: int, offset: int, into: Sequence[memoryview]) -> int:
    wanted = sum(map(len, into))
    done = os.preadv(descriptor, into, offset)
    while 0 < done < wanted:
        count = os.preadv(descriptor, _after(into, done), offset + done)
        if count == 0:
            break
        done += count
    return done


def _after(into: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left to be filled."""
    left = []
    for each in into:
        if done < len(each):
            left.append(each[done:])
        done = max(done - len(each), 0)
    return left
