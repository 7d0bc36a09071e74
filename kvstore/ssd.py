"""The SSD tier: records in segment files of one folder, an LRU with a byte budget. Faults become misses and counters.

A segment is a slab of slots of one size; a slot holds a record as `record` defines it. The budget covers segments
and index, those found at the start included. A record is published after it was written, and verified whenever it
is read: torn, flipped, swapped or stale bytes are dropped there, whatever the index said. One process at a time has
a folder. Knows nothing of the CPU tier.

`write` and `save_index` belong to one thread; everything else may be called by any, and only the reads do I/O.
Segment files that were read stay open; what others do to their names shows at the next `save_index` at the latest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.counters import Counters
from kvstore.files import Files, Span
from kvstore.keys import StoreError
from kvstore.overlapped_files import OverlappedFiles
from kvstore.record import is_whole, slot_bytes_for
from kvstore.residents import Residents
from kvstore.ssd_index import Row, SsdIndex, index_bytes_for
from kvstore.ssd_reads import Read, side_by_side

log = logging.getLogger(__name__)

COUNTERS = (
    "ssd_writes",  # records
    "ssd_written_bytes",
    "ssd_write_errors",
    "ssd_writes_suspended",  # not tried, as one had just failed
    "ssd_writes_refused",  # no room, or the record was not whole
    "ssd_reads",
    "ssd_read_bytes",
    "ssd_read_errors",
    "ssd_corrupt",  # read, but not whole or not the record that the index named
    "ssd_evictions",
    "ssd_index_errors",
    "ssd_restored",  # records found at the start
    "ssd_discarded",  # rows of the index whose records could not be there
)
_SUSPENSION_S = 5.0  # after a failed write: a full or read-only disk stays so for a while
_MAX_BEHIND = 16384  # rows that could not be written and are tried again, each half second
_SMALL_FILES_BYTES = 16 * 1024  # locks
_MAX_SEQUENCE = 1 << 62  # what a row may say: more are to follow, and still fit in
_LOCK, _SEGMENT = "lock", re.compile(r"segment-\d{6,}\.kv")  # names of our files


class SsdTier:
    """Records on disk."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        counters: Counters,
        segment_bytes: int,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StoreError if the folder cannot be used or is another's."""
        self.folder = folder
        self._counters = counters
        self._files = files or OverlappedFiles()
        self._clock = clock
        self._lock = threading.Lock()
        index_bytes = index_bytes_for(budget_bytes)
        capacity = budget_bytes - index_bytes
        self._residents = Residents(capacity, min(segment_bytes, capacity), self._evicted, self._emptied)
        self._changed: dict[bytes, None] = {}  # keys whose rows are to be written or removed, in this order
        self._num_saving = 0  # keys that a `save_index` under way has taken from these
        self._stale: set[int] = set()  # segments whose files are to be removed before anything more is written
        self._suspended_until = 0.0
        self._paths: dict[int, Path] = {}  # of segments; made once, as that takes as long as opening one
        self._sequence = 0
        self._lock_descriptor = _own(folder)
        self._index = SsdIndex(folder, index_bytes - _SMALL_FILES_BYTES)
        self._restore()

    @property
    def num_records(self) -> int:
        """Records that can be found."""
        return self._residents.num_records

    @property
    def used_bytes(self) -> int:
        """Of slots that hold records."""
        return self._residents.slabs.used_bytes

    @property
    def num_unsaved(self) -> int:
        """Keys whose rows in the index are behind."""
        with self._lock:
            return len(self._changed) + self._num_saving

    def payload_bytes(self, key: bytes) -> int | None:
        """Size of the key's payload; None if it is not here."""
        with self._lock:
            handle = self._residents.find(key)
            return None if handle is None else self._residents.payload_bytes(handle)

    def own(self, key: bytes) -> bytes:
        """The same key, as the object that is kept here if it is: other tiers need not keep one more."""
        with self._lock:
            handle = self._residents.find(key)
            return key if handle is None else self._residents.lru.key_of(handle)

    def touch(self, key: bytes) -> bool:
        """The key was used, if it is here, which is told: found in a faster tier, say."""
        with self._lock:
            handle = self._residents.find(key)
            if handle is not None:
                self._residents.lru.touch(handle)
            return handle is not None

    def drop(self, key: bytes) -> None:
        """Forget the key, if it is here."""
        with self._lock:
            handle = self._residents.find(key)
            if handle is not None:
                self._changed[key] = None
                self._residents.drop(handle)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            keys = self._residents.lru.keys_oldest_first()
        for key in keys:
            self.drop(key)

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill a slot's bytes with the key's record, verified; False if there is none, and a bad one is dropped."""
        return self.read_all([(key, into)])[0]

    def read_all(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """The same for some keys; records that lie side by side are one read, and reads overlap."""
        whole = [False] * len(wanted)
        with self._lock:
            handles = [self._residents.find(key) for key, _ in wanted]
            reads = [
                Read(number, *wanted[number], handle, self._residents.offset(handle))
                for number, handle in enumerate(handles)
                if handle is not None
            ]
            for read in reads:
                self._residents.pin(read.handle)
        try:
            self._read_runs(side_by_side(reads, self._residents.slabs.slab_bytes), whole)
        finally:
            with self._lock:
                for read in reads:
                    if not whole[read.number]:
                        self._changed[read.key] = None
                        self._residents.drop(read.handle)
                    self._residents.unpin(read.handle)
        return whole

    def _read_runs(self, runs: Sequence[Sequence[Read]], whole: list[bool]) -> None:
        spans = [Span(*self._place(run[0].offset), [read.into for read in run]) for run in runs]
        come: list[Read] = []
        alone: list[list[Read]] = []  # of runs one of which may be bad
        for run, span, error in zip(runs, spans, self._files.read_all(spans)):
            if error is None:
                come.extend(run)
            elif len(run) > 1:
                alone.extend([read] for read in run)
            else:
                self._counters.add("ssd_read_errors")
                log.warning("%s cannot be read: %s", span.path, error.strerror)
        for read in come:
            whole[read.number] = is_whole(read.into, read.key, self._residents.payload_bytes(read.handle))
        num_whole = sum(whole[read.number] for read in come)
        self._counters.add("ssd_reads", num_whole)
        self._counters.add("ssd_corrupt", len(come) - num_whole)
        self._counters.add("ssd_read_bytes", sum(len(read.into) for read in come))
        if alone:
            self._read_runs(alone, whole)

    def write(self, key: bytes, slot: memoryview, payload_bytes: int) -> bool:
        """Keep a copy of the record in a slot; whether it is here now."""
        if self._clock() < self._suspended_until:
            self._counters.add("ssd_writes_suspended")
            return False
        whole = is_whole(slot, key, payload_bytes)
        with self._lock:
            if self._residents.find(key) is not None:
                return True
            offset = self._residents.reserve(payload_bytes) if whole else None
        if offset is None:
            self._counters.add("ssd_writes_refused")
            return False
        path, start = self._place(offset)
        try:
            self._remove_stale()
            self._files.write(path, start, slot)
        except OSError as error:
            self._write_failed(offset, error)
            return False
        with self._lock:
            self._residents.publish(key, offset, payload_bytes)
            self._changed[key] = None
        self._counters.add("ssd_writes")
        self._counters.add("ssd_written_bytes", len(slot))
        return True

    def save_index(self) -> None:
        """Bring the index up to date, and let go of files without records; what is not there is lost with the process.

        Files that cannot be removed now are tried again, here and by `write`.
        """
        with self._lock:
            changed, self._changed = self._changed, {}
            self._num_saving = len(changed)
            rows = [row for key in changed if (row := self._row(key)) is not None]
        gone = changed.keys() - {row.key for row in rows}
        was_new = self._index.is_new
        if changed and not self._index.write(rows, gone):
            self._counters.add("ssd_index_errors")
            with self._lock:
                if self._index.is_new and not was_new:
                    self._changed.update(dict.fromkeys(self._residents.lru.keys_oldest_first()))
                elif len(changed) <= _MAX_BEHIND:
                    self._changed = {**changed, **self._changed}
        self._num_saving = 0
        with suppress(OSError):
            self._remove_stale()
        self._files.forget_changed()

    def close(self) -> None:
        """Save the index, in the order of use, and let the folder go. Nothing else may be going on."""
        self.save_index()
        with self._lock:
            self._changed.update(dict.fromkeys(self._residents.lru.keys_oldest_first()))
        self.save_index()
        if self.num_unsaved:  # it was full of old versions, and has been begun anew
            self.save_index()
        self._index.close()
        self._files.close()
        os.close(self._lock_descriptor)

    def check_integrity(self) -> None:
        """Raise AssertionError if order and places do not agree."""
        with self._lock:
            self._residents.check_integrity()

    def _remove_stale(self) -> None:
        """Raises OSError; what is left then stays to be removed."""
        with self._lock:
            stale, self._stale = self._stale, set()
        try:
            for segment in sorted(stale):
                self._files.remove(self._path(segment))
                stale.discard(segment)
        finally:
            with self._lock:
                self._stale |= stale

    def _write_failed(self, offset: int, error: OSError) -> None:
        self._counters.add("ssd_write_errors")
        log.warning("nothing is written to %s for %g s: %s", self.folder, _SUSPENSION_S, error.strerror)
        self._suspended_until = self._clock() + _SUSPENSION_S
        with self._lock:
            self._residents.cancel(offset)

    def _row(self, key: bytes) -> Row | None:
        handle = self._residents.find(key)
        if handle is None:
            return None
        offset = self._residents.offset(handle)
        segment, slot = self._residents.slabs.place_of(offset)
        self._sequence += 1
        slot_bytes = self._residents.slabs.slot_bytes_at(offset)
        return Row(key, segment, slot, slot_bytes, self._residents.payload_bytes(handle), self._sequence)

    def _evicted(self, key: bytes) -> None:
        self._changed[key] = None
        self._counters.add("ssd_evictions")

    def _emptied(self, segment: int) -> None:
        self._stale.add(segment)

    def _path(self, segment: int) -> Path:
        path = self._paths.get(segment)
        if path is None:
            path = self._paths[segment] = self.folder / f"segment-{segment:06d}.kv"
        return path

    def _place(self, offset: int) -> tuple[Path, int]:
        """File, and where in it."""
        segment, start = divmod(offset, self._residents.slabs.slab_bytes)
        return self._path(segment), start

    def _restore(self) -> None:
        """Take over what index and folder agree on; files beyond that are removed or cut."""
        found = [path for path in self.folder.iterdir() if _SEGMENT.fullmatch(path.name)]
        sizes = {path: _file_bytes(path) for path in found}
        kept: list[tuple[Row, int]] = []
        for row in sorted(self._index.load(), key=lambda row: (row.segment, row.slot, -row.sequence)):  # newest first
            in_file = (row.slot + 1) * row.slot_bytes <= sizes.get(self._path(row.segment), 0)
            sound = in_file and slot_bytes_for(row.payload_bytes) == row.slot_bytes and row.sequence <= _MAX_SEQUENCE
            offset = self._residents.slabs.take(row.segment, row.slot, row.slot_bytes) if sound else None
            if offset is None:
                self._changed[row.key] = None
            else:
                kept.append((row, offset))
        for row, offset in sorted(kept, key=lambda each: each[0].sequence):
            self._residents.publish(row.key, offset, row.payload_bytes)
            self._sequence = row.sequence
        self._counters.add("ssd_restored", len(kept))
        self._counters.add("ssd_discarded", len(self._changed))
        self._trim({path.name: size for path, size in sizes.items()})

    def _trim(self, sizes: dict[str, int]) -> None:
        touched = self._residents.slabs.touched_by_slab()
        known = {self._path(segment).name: num_bytes for segment, num_bytes in touched.items()}
        for name, size in sizes.items():
            with suppress(OSError):
                if name not in known:
                    self._files.remove(self.folder / name)
                elif size > known[name]:
                    self._files.truncate(self.folder / name, known[name])


def _file_bytes(path: Path) -> int:
    """Size of a file of our own; 0 for what is none, or cannot be looked at."""
    with suppress(OSError):
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode):
            return facts.st_size
    return 0


def _own(folder: Path) -> int:
    """Make the folder, for its owner only, and lock it; the lock's descriptor.

    Raises StoreError, too for a folder that is not a store's: files in it are removed.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts, has_files = folder.stat(), any(folder.iterdir())
        if facts.st_uid != os.getuid() or (has_files and facts.st_mode & 0o077):
            raise StoreError(f"ssd-dir {folder} must be this user's own and closed to others: chmod 700")
        if has_files and not (folder / _LOCK).exists():
            raise StoreError(f"ssd-dir {folder} has files of others in it: name an empty folder, or one to be made")
        folder.chmod(0o700)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"ssd-dir {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreError(f"ssd-dir {folder} is in use by another store; give each its own") from None
    return descriptor
