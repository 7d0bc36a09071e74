"""A bounded number of files that stay open for reading, the least recently used closed first.

A descriptor is closed when its last reader is done, never under one. It stands for the file that was opened, whatever
its path names by now: `forget_changed` closes those whose path names another file or none, so that a deleted file's
bytes are soon the disk's again. Knows nothing of what is read. Safe for threads.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class OpenFile:
    """One descriptor. What is not to be found any more is closed with its last reader."""

    __slots__ = ("descriptor", "identity", "is_known", "num_readers")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.identity = identity_of(os.fstat(descriptor))
        self.num_readers = 0
        self.is_known = False  # found by its path


class OpenFiles:
    """Files by path."""

    def __init__(self, max_open: int) -> None:
        """max_open: those being read come on top."""
        assert max_open > 0
        self._max_open = max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()  # the most recently used last

    def __len__(self) -> int:
        return len(self._files)

    def take(self, path: Path) -> OpenFile:
        """The path's file, to be given back when it was read. Raises OSError."""
        with self._lock:
            known = self._files.get(path)
            if known is not None:
                self._files.move_to_end(path)
                known.num_readers += 1
                return known
        opened = _open(path)
        opened.num_readers = 1
        with self._lock:
            if path not in self._files:  # else another thread was faster; this one is read once
                self._files[path] = opened
                opened.is_known = True
                if len(self._files) > self._max_open:
                    self._drop(next(iter(self._files)))
        return opened

    def give_back(self, file: OpenFile) -> None:
        """The reader is done."""
        with self._lock:
            file.num_readers -= 1
            self._close_unless_used(file)

    def forget(self, path: Path) -> None:
        """The next reader opens the path anew."""
        with self._lock:
            if path in self._files:
                self._drop(path)

    def forget_changed(self) -> None:
        """The same for all paths that name another file than they did, or none."""
        with self._lock:
            known = {path: file.identity for path, file in self._files.items()}
        for path, identity in known.items():
            now = None
            with suppress(OSError):
                now = identity_of(path.lstat())
            if now != identity:
                self.forget(path)

    def forget_other(self, path: Path, identity: tuple[int, int]) -> None:
        """The same for the path, if its open file is not this one."""
        with self._lock:
            known = self._files.get(path)
            if known is not None and known.identity != identity:
                self._drop(path)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            for path in list(self._files):
                self._drop(path)

    def _drop(self, path: Path) -> None:
        file = self._files.pop(path)
        file.is_known = False
        self._close_unless_used(file)

    def _close_unless_used(self, file: OpenFile) -> None:
        if not file.is_known and not file.num_readers:
            os.close(file.descriptor)


def identity_of(found: os.stat_result) -> tuple[int, int]:
    """What tells a file from all others that are there: device and inode."""
    return found.st_dev, found.st_ino


def _open(path: Path) -> OpenFile:
    """Past the page cache where the file system can do that."""
    try:
        descriptor = os.open(path, _FLAGS | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, _FLAGS)
    return OpenFile(descriptor)
