"""The few things that the SSD tier does with files. Tests put failing ones in its place. Knows nothing of records."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Files:
    """Whole reads and writes at an offset. Everything raises OSError."""

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """Fill `into` from the file; bytes read, fewer than asked for only at the file's end.

        Past the page cache where that can be done: what is read is kept by the caller, and a copy of it in the cache
        would cost time and push out what others need.
        """
        try:
            return self._read(path, offset, into, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._read(path, offset, into, 0)  # the file system has no such thing, or something is not aligned

    def _read(self, path: Path, offset: int, into: memoryview, flags: int) -> int:
        descriptor = os.open(path, os.O_RDONLY | _OPEN | flags)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(descriptor)

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        """Write all of it, making the file (for its owner only) if it is not there."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _OPEN, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.pwritev(descriptor, [data[done:]], offset + done)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file that may be gone already."""
        path.unlink(missing_ok=True)

    def truncate(self, path: Path, num_bytes: int) -> None:
        """Cut a file off."""
        os.truncate(path, num_bytes)
