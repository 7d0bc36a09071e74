"""Where the SSD tier's records lie, kept in LMDB so that a restart finds them. Never trusted: records name their keys.

An index that cannot be opened, or in whose loading the last process died, is thrown away; with it go the records,
which are computed again. One that shows to be harmed when it is written, or is full, is begun anew and needs all rows
again. Every failure is False or an empty answer. Knows nothing of segments but their numbers.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

log = logging.getLogger(__name__)

FILE = "index.mdb"
_LOCK_FILE = FILE + "-lock"
_LOADING = "index.loading"  # there while an index is loaded
_ROW = struct.Struct("<IIQQQ")  # segment, slot, slot bytes, payload bytes, sequence
_MIN_BYTES = 256 * 1024
_HARMED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError, lmdb.PanicError)  # and stays so
_META_PAGE_BYTES = 4096
_META = struct.Struct("<16x24xI92xQQ")  # of LMDB's two first pages: bytes of a page, last page, transaction


@dataclass(frozen=True, slots=True)
class Row:
    """One record."""

    key: bytes
    segment: int  # number of its file
    slot: int  # within the file
    slot_bytes: int
    payload_bytes: int
    sequence: int  # higher is used more recently


def index_bytes_for(budget_bytes: int) -> int:
    """What the index may grow to, as part of the tier's budget."""
    return (_MIN_BYTES + min(budget_bytes // 64, 4 << 30)) // 4096 * 4096


class SsdIndex:
    """Rows by key, on disk. Used by one thread at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """max_bytes bounds the file. Does not raise: without a usable file there is an index that keeps nothing."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._environment: lmdb.Environment | None = None
        self.is_new = False  # begun anew, and without rows since

    def load(self) -> list[Row]:
        """Open, and read everything. Empty, and starting anew, if that cannot be done."""
        marker = self._folder / _LOADING
        try:
            if marker.exists() or self._is_cut_off():
                log.warning("the index in %s is not to be trusted; starting without what it had", self._folder)
                self._discard()
            marker.touch(mode=0o600)
        except OSError as error:
            log.warning("the index in %s cannot be prepared: %s", self._folder, error.strerror)
            return []
        rows = self._open_and_read()
        if rows is None:
            self._discard()
            rows = self._open_and_read()
        with suppress(OSError):
            marker.unlink()
        return rows or []

    def write(self, put: Iterable[Row], removed: Iterable[bytes]) -> bool:
        """Change rows, all or none, durably; whether that worked."""
        if self._environment is None:
            return False
        try:
            with self._environment.begin(write=True) as transaction:
                for key in removed:
                    transaction.delete(key)
                for row in put:
                    packed = _ROW.pack(row.segment, row.slot, row.slot_bytes, row.payload_bytes, row.sequence)
                    transaction.put(row.key, packed)
        except (lmdb.Error, OSError) as error:
            log.warning("the index in %s cannot be written: %s", self._folder, error)
            # What is full of old versions of its pages, or says so wrongly, has room again when begun anew.
            if isinstance(error, _HARMED) or (isinstance(error, lmdb.MapFullError) and not self.is_new):
                self._begin_anew()
            return False
        self.is_new = False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _open_and_read(self) -> list[Row] | None:
        try:
            self._environment = lmdb.open(
                str(self._folder / FILE),
                map_size=self._max_bytes,
                subdir=False,
                mode=0o600,
                metasync=False,  # a crash of the machine may cost the last change, never the file
                max_dbs=0,
            )
            return list(self._rows(self._environment))
        except (lmdb.Error, OSError, struct.error) as error:
            log.warning("the index in %s cannot be read: %s", self._folder, error)
            self.close()
            return None

    def _rows(self, environment: lmdb.Environment) -> Iterator[Row]:
        with environment.begin() as transaction:
            for key, packed in transaction.cursor():
                yield Row(bytes(key), *_ROW.unpack(packed))

    def _is_cut_off(self) -> bool:
        """Whether the file is shorter than its own pages: reading those through a mapping would end the process."""
        path = self._folder / FILE
        if not path.exists():
            return False
        found = path.stat().st_size
        if found > self._max_bytes:
            return True
        with path.open("rb") as file:
            head = file.read(2 * _META_PAGE_BYTES)
        if len(head) < 2 * _META_PAGE_BYTES:
            return True
        metas = [_META.unpack_from(head, start) for start in (0, _META_PAGE_BYTES)]
        page_bytes, last_page, _ = max(metas, key=lambda meta: meta[2])
        return bool((last_page + 1) * page_bytes > found)

    def _begin_anew(self) -> None:
        self.close()
        self._discard()
        self.is_new = self._open_and_read() is not None

    def _discard(self) -> None:
        for name in (FILE, _LOCK_FILE):
            with suppress(OSError):
                os.unlink(self._folder / name)
