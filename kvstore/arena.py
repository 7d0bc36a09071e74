"""The CPU tier's bytes: one file of POSIX shared memory, made by the service and mapped by its clients.

All pages are taken when it is made, so that a full memory file system shows then and not as SIGBUS in some client.
The maker holds a lock on the file from before it has a name; so what makers that were killed have left can be told
and is removed. Python's resource tracker is not involved: it would remove the file when the first client ends. Knows
nothing of records.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

from kvstore.keys import StoreError

PREFIX = "nanoflow-kv-"


class Mapping:
    """A client's view of an arena."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Mapping:
        """Map it. Raises OSError, also if the file is not of that size or not this user's own."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_size != num_bytes or found.st_uid != os.geteuid():
                raise OSError(f"{path} is not the arena that was named: size {found.st_size}, owner {found.st_uid}")
            return cls(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap, as soon as nobody has a view of a part any more."""
        with suppress(BufferError):
            self.view.release()
            self._map.close()


class Arena:
    """Shared memory of a fixed size, gone with `close` or, at the latest, when the next one is made."""

    def __init__(self, num_bytes: int, folder: Path) -> None:
        """Raises StoreError if there is not that much."""
        remove_abandoned(folder)
        self.num_bytes = num_bytes
        self.path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        try:
            self._descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"no arena can be made in {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self._mapping = Mapping(self._descriptor, num_bytes)
            # Only with a folder's descriptor (unused, as the path is absolute) does Python follow the link.
            os.link(f"/proc/self/fd/{self._descriptor}", self.path, src_dir_fd=self._descriptor)
        except OSError as error:
            self._remove()
            raise StoreError(
                f"{folder} cannot hold an arena of {num_bytes} bytes: {error.strerror}; "
                "ask for fewer cpu-bytes, or give it more (in a container: --shm-size)"
            ) from None
        self.view = self._mapping.view

    def slot(self, offset: int, slot_bytes: int) -> memoryview:
        """These bytes of it."""
        return self.view[offset : offset + slot_bytes]

    def close(self) -> None:
        """Remove it; clients that have it mapped keep their mapping."""
        self._mapping.close()
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove this user's arenas whose makers are gone; which ones."""
    removed = []
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.geteuid():
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed
