"""The few things that the SSD tier does with files. Tests put failing ones in its place. Knows nothing of records."""

from __future__ import annotations

import os
from pathlib import Path

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Files:
    """Whole reads and writes at an offset. Everything raises OSError."""

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """Fill `into` from the file; bytes read, fewer than asked for only at the file's end."""
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
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
