"""`bench offload disk`: how fast the KV store's SSD tier reads records, beside `fio` on the same files.

The store is the product's service in this process: its reader threads, its reads into the arena, its checksums. fio
reads the very segment files that the store wrote, in blocks of a record's slot, directly, with as many jobs as the
store has readers; what the kernel has cached of the files is dropped before each run. Both read in random order, and in
the order of writing: a conversation's pages are asked for together and lie side by side. Where fio is not installed a
plain stand-in does the random reads: threads that call preadv. Knows nothing of engines.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from control_plane.bench.offload_options import DiskOptions
from control_plane.bench.offload_table import print_table
from control_plane.options import ConfigError
from kvstore.keys import KVKey
from kvstore.record import HEADER_BYTES, payload_of, seal, slot_bytes_for
from kvstore.service import KVService
from kvstore.settings import KVServiceConfig
from kvstore.tiers import NUM_READERS

_NUM_SEGMENTS = 8  # files: fio takes a few names only
_GROUP = 16  # records that are asked for at once, at least: what a load asks for
_MAX_GROUP = 64  # and at most: what a prompt of 4,096 tokens in pages of 64 asks for
_GROUP_BYTES = 16 << 20  # between them, so many bytes
_ARENA_GROUPS = 4
_WAIT_S = 120.0
_IN_ORDER = ", in order"


class DiskBench:
    """A folder of records that are read again and again."""

    def __init__(self, options: DiskOptions, folder: Path) -> None:
        """Write them. Raises StoreError where the store cannot use the folder, ConfigError where it has no room."""
        self._folder = folder
        self._payload_bytes = options.record_bytes
        self.slot_bytes = slot_bytes_for(options.record_bytes)
        self._group = max(_GROUP, min(_MAX_GROUP, _GROUP_BYTES // self.slot_bytes))
        self.num_records = max(self._group, options.total_bytes // self.slot_bytes)
        segment = -(-self.num_records // _NUM_SEGMENTS) * self.slot_bytes
        self._config = KVServiceConfig(
            cpu_bytes=_ARENA_GROUPS * self._group * self.slot_bytes,
            ssd_dir=folder,
            ssd_bytes=self.num_records * self.slot_bytes * 21 // 20 + 2 * segment,  # a twentieth for the index
            slab_bytes=self.slot_bytes,
            segment_bytes=segment,
            ssd_after_hits=0,
        )
        self._keys = [KVKey(number.to_bytes(32, "big")) for number in range(self.num_records)]
        self._write()
        self._shuffled = random.Random(0).sample(self._keys, self.num_records)

    @property
    def num_bytes(self) -> int:
        """Read in one run."""
        return self.num_records * self.slot_bytes

    def store(self, in_order: bool = False) -> float:
        """Bytes a second through the store: from the question to the last record whole in the arena."""
        service = KVService(self._config)
        order = self._keys if in_order else self._shuffled
        groups = [order[start : start + self._group] for start in range(0, self.num_records, self._group)]
        try:
            began = time.perf_counter()
            service.prefetch(groups[0])
            for number, group in enumerate(groups):
                if number + 1 < len(groups):
                    service.prefetch(groups[number + 1])  # so that the readers never wait for a question
                acquired = service.acquire(group, _WAIT_S)
                assert len(acquired.blocks) == len(group), "a record is lost"
                service.release(acquired.lease_id)
            took_s = time.perf_counter() - began
        finally:
            service.close()
        return self.num_bytes / took_s

    def fio(self, in_order: bool = False) -> float:
        """Bytes a second. Raises ConfigError where fio fails."""
        names = [path.name for path in self._segments()]
        command = ["fio", f"--bs={self.slot_bytes}", "--direct=1", "--ioengine=psync", "--readonly", "--thread"]
        command += ["--group_reporting", "--output-format=json"]
        if in_order:  # each job has files of its own
            command += ["--rw=read", "--file_service_type=sequential"]
            for job in range(NUM_READERS):
                command += [f"--name=read{job}", f"--filename={':'.join(names[job::NUM_READERS])}"]
        else:
            command += ["--rw=randread", f"--io_size={self.num_bytes // NUM_READERS}", f"--numjobs={NUM_READERS}"]
            command += ["--name=read", f"--filename={':'.join(names)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=self._folder)
        with suppress(ValueError, KeyError, IndexError):
            found = json.loads(done.stdout[done.stdout.index("{") :])
            return float(found["jobs"][0]["read"]["bw_bytes"])
        raise ConfigError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")

    def stand_in(self) -> float:
        """Bytes a second of the same reads in the same order by plain threads."""
        slots = [(path, start) for path in self._segments() for start in range(0, path.stat().st_size, self.slot_bytes)]
        random.Random(1).shuffle(slots)
        waiting, lock = iter(slots), threading.Lock()

        def read() -> int:
            num_bytes = 0
            with mmap.mmap(-1, self.slot_bytes) as memory:
                while True:
                    with lock:
                        slot = next(waiting, None)
                    if slot is None:
                        return num_bytes
                    num_bytes += _read_direct(*slot, memory)

        with ThreadPoolExecutor(NUM_READERS) as threads:
            began = time.perf_counter()
            readers = [threads.submit(read) for _ in range(NUM_READERS)]
            num_bytes = sum(reader.result() for reader in readers)
            return num_bytes / (time.perf_counter() - began)

    def forget(self) -> None:
        """Have the kernel drop what it has cached of the files."""
        for path in self._segments():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob("segment-*.kv"))

    def _write(self) -> None:
        service = KVService(self._config)
        payload = os.urandom(self._payload_bytes)
        try:
            for number, key in enumerate(self._keys):
                reserved = service.reserve([key], self._payload_bytes)
                slot = service.arena.slot(reserved.offsets[0], self.slot_bytes)
                payload_of(slot, self._payload_bytes)[:] = payload
                seal(slot, key, self._payload_bytes)
                slot.release()
                service.commit(reserved.lease_id)
                if number % self._group == self._group - 1:
                    service.tiers.finish()
            service.tiers.finish()
            num_written = service.stats()["ssd_records"]
        finally:
            service.close()
        if num_written < self.num_records:
            raise ConfigError(f"{self._folder} has taken {num_written} of {self.num_records} records: is it full?")


def run(options: DiskOptions) -> dict[str, Any]:
    """Measure; prints a table and, last, one JSON line, which is returned. Raises ConfigError and StoreError."""
    if options.record_bytes <= HEADER_BYTES:
        raise ConfigError(f"record-bytes is {options.record_bytes}: more than {HEADER_BYTES} are needed")
    try:
        options.ssd_dir.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="nanoflow-bench-", dir=options.ssd_dir)
    except OSError as error:
        raise ConfigError(f"ssd-dir={options.ssd_dir}: {error.strerror}") from None
    with folder as name:
        bench = DiskBench(options, Path(name))
        setting = _setting(options, bench)
        print(f"offload, disk: {setting}", file=sys.stderr, flush=True)
        rates = _rates(bench, _ways(bench), options.repeats)
    reference = "fio" if "fio" in rates else "stand-in"
    in_order = rates.get(f"fio{_IN_ORDER}", rates[reference])
    rows = [_row(way, found, in_order if way.endswith(_IN_ORDER) else rates[reference]) for way, found in rates.items()]
    print_table(
        f"reading {bench.num_bytes / 1e9:.1f} GB in records of {bench.slot_bytes:,} bytes",
        rows,
        {"way": "", "min_mb_s": "MB/s min", "median_mb_s": "median", "max_mb_s": "max", "share": f"of {reference}"},
    )
    result = {**setting, "reference": reference, "rows": rows}
    print(json.dumps(result), flush=True)
    return result


def _ways(bench: DiskBench) -> dict[str, Callable[[], float]]:
    ways: dict[str, Callable[[], float]] = {
        "store": bench.store,
        f"store{_IN_ORDER}": lambda: bench.store(in_order=True),
        "stand-in": bench.stand_in,
    }
    if shutil.which("fio"):
        ways["fio"] = bench.fio
        ways[f"fio{_IN_ORDER}"] = lambda: bench.fio(in_order=True)
    return ways


def _rates(bench: DiskBench, ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """In turns, forwards and backwards."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            bench.forget()
            found[way].append(ways[way]())
            print(f"  {way}: {found[way][-1] / 1e6:.0f} MB/s", file=sys.stderr, flush=True)
    return found


def _row(way: str, rates: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    return {
        "way": way,
        "min_mb_s": round(min(rates) / 1e6),
        "median_mb_s": round(statistics.median(rates) / 1e6),
        "max_mb_s": round(max(rates) / 1e6),
        "share": round(statistics.median(rates) / statistics.median(reference), 3),
    }


def _setting(options: DiskOptions, bench: DiskBench) -> dict[str, Any]:
    return {
        "benchmark": "offload-disk",
        "slot_bytes": bench.slot_bytes,
        "total_bytes": bench.num_bytes,
        "num_readers": NUM_READERS,
        "repeats": options.repeats,
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _read_direct(path: Path, start: int, into: mmap.mmap) -> int:
    """Past the page cache, if the file system can do that."""
    for flags in (os.O_DIRECT, 0):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | flags)
            try:
                return os.preadv(descriptor, [into], start)
            finally:
                os.close(descriptor)
    raise ConfigError(f"{path} cannot be read")
