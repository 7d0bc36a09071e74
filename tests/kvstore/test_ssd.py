"""The SSD tier and what disks do to it: every fault is a miss and a number, never wrong bytes, never an exception."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import shutil
import stat
import struct
from collections import OrderedDict
from contextlib import suppress

import lmdb
import pytest
from store_calls import Clock, can_overlap

from kvstore.counters import Counters
from kvstore.files import Files
from kvstore.keys import StoreError
from kvstore.overlapped import Overlapped
from kvstore.overlapped_files import OverlappedFiles
from kvstore.record import payload_of, seal, slot_bytes_for
from kvstore.ssd import COUNTERS, SsdTier
from kvstore.ssd_index import index_bytes_for

BUDGET = 1 << 20
SEGMENT = 16 * 4096
PAYLOAD = 3000
CAPACITY = (BUDGET - index_bytes_for(BUDGET)) // 4096  # records


def payload_for(key: bytes, size: int = PAYLOAD) -> bytes:
    return random.Random(key).randbytes(size)


class Tier:
    """An SsdTier with puts and gets of whole records."""

    def __init__(self, folder, files=None, budget=BUDGET):
        self.counters = Counters(COUNTERS)
        self.clock = Clock()
        self.ssd = SsdTier(folder, budget, self.counters, SEGMENT, files, self.clock)

    def put(self, key: bytes, size: int = PAYLOAD) -> bool:
        slot = memoryview(bytearray(slot_bytes_for(size)))
        payload_of(slot, size)[:] = payload_for(key, size)
        seal(slot, key, size)
        return self.ssd.write(key, slot, size)

    def get(self, key: bytes) -> bool:
        """Whether it is there; wrong bytes are an error of the test."""
        size = self.ssd.payload_bytes(key)
        if size is None:
            return False
        slot = memoryview(mmap.mmap(-1, slot_bytes_for(size)))  # aligned, as an arena is
        if not self.ssd.read(key, slot):
            return False
        assert payload_of(slot, size) == payload_for(key, size)
        return True

    def stop(self) -> None:
        self.ssd.check_integrity()
        self.ssd.close()


def keys(count: int, prefix: str = "key") -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(count)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ssd"


def filled(folder, count: int = 40) -> list[bytes]:
    """A folder with records, left in order."""
    tier = Tier(folder)
    assert all(tier.put(key) for key in keys(count))
    tier.stop()
    return keys(count)


def segments(folder):
    return sorted(folder.glob("segment-*"))


def disk_bytes(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_least_recently_used_goes_first_and_the_budget_holds(folder):
    tier, ideal, order = Tier(folder), OrderedDict(), random.Random(1)
    for _ in range(1500):
        key = b"key-%d" % order.randrange(2 * CAPACITY)
        assert tier.get(key) == (key in ideal)
        tier.put(key)
        ideal[key] = None
        ideal.move_to_end(key)
        if len(ideal) > CAPACITY:
            ideal.popitem(last=False)
        assert disk_bytes(folder) <= BUDGET + 4096
    assert tier.counters["ssd_evictions"] > 300
    tier.stop()


def test_files_without_records_go_with_the_next_save_of_the_index(folder):
    tier = Tier(folder)
    for key in keys(40):
        tier.put(key)
    assert len(segments(folder)) > 1
    tier.ssd.clear()
    assert tier.ssd.used_bytes == 0
    tier.ssd.save_index()
    assert segments(folder) == []
    assert tier.put(b"next")
    assert tier.get(b"next")
    tier.stop()


def test_a_write_that_is_refused_forgets_no_file_that_is_to_go(folder):
    tier = Tier(folder)
    for key in keys(40):
        tier.put(key)
    tier.ssd.clear()
    slot = memoryview(bytearray(slot_bytes_for(PAYLOAD)))  # no record
    assert not tier.ssd.write(b"torn", slot, PAYLOAD)
    assert tier.put(b"next")
    assert len(segments(folder)) == 1
    tier.stop()


def test_a_restart_finds_the_records_and_their_order(folder):
    tier = Tier(folder)
    for key in keys(CAPACITY):
        tier.put(key)
    assert tier.get(keys(1)[0])
    tier.stop()
    tier = Tier(folder)
    assert tier.counters["ssd_restored"] == CAPACITY
    assert tier.put(b"one more")
    assert tier.get(keys(1)[0]), "it was used last before the restart"
    assert not tier.get(keys(2)[1])
    tier.stop()


def test_record_sizes_change_hands_within_the_budget(folder):
    tier = Tier(folder)
    for key in keys(2 * CAPACITY):
        tier.put(key)
    for key in keys(30, "large"):
        assert tier.put(key, 30_000)
        assert disk_bytes(folder) <= BUDGET + slot_bytes_for(30_000)
    assert sum(tier.get(key) for key in keys(30, "large")) > 10
    tier.stop()


def test_a_smaller_budget_counts_what_it_finds(folder):
    tier = Tier(folder, budget=4 * BUDGET)
    for key in keys(700):
        tier.put(key)
    tier.stop()
    assert disk_bytes(folder) > 2 * BUDGET
    tier = Tier(folder, budget=BUDGET)
    assert disk_bytes(folder) <= BUDGET + 4096
    for key in keys(300, "new"):
        tier.put(key)
        assert disk_bytes(folder) <= BUDGET + 4096
    assert tier.get(keys(300, "new")[-1])
    tier.stop()


def test_files_of_no_record_are_counted_and_removed(folder):
    filled(folder)
    (folder / "segment-000009.kv").write_bytes(bytes(3 * SEGMENT))
    with segments(folder)[0].open("ab") as file:
        file.write(bytes(SEGMENT))
    tier = Tier(folder)
    assert disk_bytes(folder) < 60 * 4096
    assert all(map(tier.get, keys(40)))
    tier.stop()


def test_a_crash_between_data_and_index_loses_records_at_most(folder, tmp_path):
    tier = Tier(folder)
    for key in keys(CAPACITY):
        tier.put(key)
    tier.ssd.save_index()
    for key in keys(50, "late"):  # written over slots of the oldest, but not in the index when the crash comes
        tier.put(key)
    shutil.copytree(folder, tmp_path / "after")
    after = Tier(tmp_path / "after")
    found = [after.get(key) for key in keys(CAPACITY)]
    assert found == [False] * 50 + [True] * (CAPACITY - 50)
    assert after.counters["ssd_corrupt"] == 50
    assert not any(map(after.get, keys(50, "late")))
    assert all(map(after.put, keys(50, "late")))
    after.stop()
    tier.stop()


def test_bit_flips_are_misses_and_the_record_is_dropped(folder):
    filled(folder)
    flips = random.Random(2)
    for path in segments(folder):
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), 4096):
            if flips.random() < 0.5:
                data[start + 256 + flips.randrange(PAYLOAD)] ^= 1 << flips.randrange(8)
        path.write_bytes(data)
    tier = Tier(folder)
    found = sum(map(tier.get, keys(40)))
    assert 5 < found < 35
    assert tier.counters["ssd_corrupt"] == 40 - found
    assert sum(map(tier.get, keys(40))) == found
    assert tier.counters["ssd_corrupt"] == 40 - found, "a dropped record is not read again"
    tier.stop()


def test_truncated_files_are_misses(folder):
    filled(folder)
    tier = Tier(folder)
    for path in segments(folder):
        os.truncate(path, path.stat().st_size // 2 + 100)
    assert 0 < sum(map(tier.get, keys(40))) < 30
    assert tier.counters["ssd_corrupt"] > 10
    tier.stop()


def test_files_cut_off_before_the_start_are_discarded(folder):
    filled(folder)
    os.truncate(segments(folder)[0], 5000)
    tier = Tier(folder)
    assert tier.counters["ssd_discarded"] == 15
    assert sum(map(tier.get, keys(40))) == 25
    tier.stop()


def test_swapped_files_are_misses(folder):
    filled(folder)
    first, second, *_ = segments(folder)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)
    tier = Tier(folder)
    assert sum(map(tier.get, keys(40))) == 8
    assert tier.counters["ssd_corrupt"] == 32
    tier.stop()


@pytest.mark.parametrize("running", [True, False])
def test_deleted_files_are_misses(folder, running):
    filled(folder)
    if running:
        tier = Tier(folder)
    for path in segments(folder):
        path.unlink()
    if not running:
        tier = Tier(folder)
    assert not any(map(tier.get, keys(40)))
    assert tier.counters["ssd_read_errors" if running else "ssd_discarded"] == 40
    assert all(map(tier.put, keys(40)))
    assert all(map(tier.get, keys(40)))
    tier.stop()


def held_bytes(folder) -> int:
    """Of deleted segment files that this process has open: the disk has them still."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith(str(folder)) and link.endswith(" (deleted)"):
                found += os.fstat(int(name)).st_size
    return found


def test_files_deleted_while_they_are_open_are_misses_once_the_index_is_saved(folder):
    filled(folder)
    tier = Tier(folder)
    assert all(map(tier.get, keys(40)))
    for path in segments(folder):
        path.unlink()
    assert all(map(tier.get, keys(10))), "whole records of the right keys do no harm"
    assert held_bytes(folder) == 40 * 4096
    tier.ssd.save_index()
    assert held_bytes(folder) == 0, "the disk has its room again"
    assert not any(map(tier.get, keys(40)))
    assert tier.counters["ssd_read_errors"] == 40
    tier.stop()


def test_what_is_written_to_a_deleted_files_path_is_read_there(folder):
    filled(folder, 10)
    tier = Tier(folder)
    assert all(map(tier.get, keys(10)))
    segments(folder)[0].unlink()
    assert tier.put(b"new")
    assert held_bytes(folder) == 0, "not two files for one segment"
    assert tier.get(b"new")
    assert not any(map(tier.get, keys(10)))
    tier.stop()


@pytest.mark.parametrize("harm", ["swapped", "replaced", "truncated"])
def test_files_harmed_while_they_are_open_give_no_wrong_bytes(folder, harm):
    filled(folder)
    tier = Tier(folder)
    assert all(map(tier.get, keys(40)))
    first, second, *_ = segments(folder)
    if harm == "swapped":
        first.rename(folder / "other")
        second.rename(first)
        (folder / "other").rename(second)
    elif harm == "replaced":
        (folder / "other").write_bytes(os.urandom(SEGMENT))
        (folder / "other").rename(first)
    else:
        os.truncate(first, 4096)
    before = sum(map(tier.get, keys(40)))
    tier.ssd.save_index()
    after = sum(map(tier.get, keys(40)))
    assert (before, after) == {"swapped": (40, 8), "replaced": (40, 24), "truncated": (25, 25)}[harm]
    assert held_bytes(folder) == 0
    tier.stop()


def test_segments_that_were_read_and_dropped_are_not_kept_open(folder):
    tier = Tier(folder)
    for key in keys(CAPACITY):
        tier.put(key)
        assert tier.get(key)
    for key in keys(30, "large"):  # takes whole segments from the small ones
        assert tier.put(key, 30_000)
        assert tier.get(key)
        assert disk_bytes(folder) + held_bytes(folder) <= BUDGET + slot_bytes_for(30_000)
    tier.stop()
    assert held_bytes(folder) == 0


def test_a_deleted_folder_is_no_worse(folder):
    filled(folder)
    tier = Tier(folder)
    shutil.rmtree(folder)
    assert not any(map(tier.get, keys(40)))
    assert not tier.put(b"new")
    assert tier.counters["ssd_write_errors"] == 1
    tier.ssd.save_index()
    tier.ssd.close()
    assert Tier(folder).put(b"new")


@pytest.mark.parametrize("harm", ["gone", "cut", "empty", "noise", "large"])
def test_a_harmed_index_costs_the_records_only(folder, harm):
    filled(folder)
    index = folder / "index.mdb"
    if harm == "gone":
        index.unlink()
    elif harm == "large":
        with index.open("ab") as file:
            file.truncate(64 << 20)
    else:
        keep = {"cut": 12_000, "empty": 0, "noise": 0}[harm]
        index.write_bytes(index.read_bytes()[:keep] + (os.urandom(50_000) if harm == "noise" else b""))
    tier = Tier(folder)
    assert tier.ssd.num_records == 0
    assert disk_bytes(folder) <= BUDGET
    assert all(map(tier.put, keys(40)))
    tier.stop()
    assert all(map(Tier(folder).get, keys(40)))


def test_an_index_that_shows_to_be_harmed_when_it_is_written_is_begun_anew(folder):
    for number in range(8):  # rows that come and go: LMDB keeps a list of free pages
        tier = Tier(folder)
        assert all(map(tier.put, keys(100, f"round-{number}")))
        tier.stop()
    page = lmdb_page_of_free_list(folder / "index.mdb")
    with (folder / "index.mdb").open("r+b") as file:
        file.seek(page * 4096 + 10)
        file.write(b"\0\0")  # the kind of page: none
    tier = Tier(folder)
    found = [key for number in range(8) for key in keys(100, f"round-{number}") if tier.get(key)]
    assert len(found) > CAPACITY // 2
    assert tier.put(b"new")
    tier.ssd.save_index()
    assert tier.counters["ssd_index_errors"] == 1
    tier.ssd.save_index()  # all of them
    assert tier.counters["ssd_index_errors"] == 1
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)  # as a kill leaves it
    tier.stop()
    after = Tier(copy)
    assert sum(map(after.get, [*found, b"new"])) >= len(found)
    after.stop()


def test_a_full_index_is_begun_anew_and_has_all_rows_that_there_are(folder):
    """Small records in a small folder, by which old versions of the index's pages take more room than it has."""
    budget = 16 << 20
    tier = Tier(folder, budget=budget)
    names = [hashlib.blake2b(key, digest_size=48).digest() for key in keys(4000)]
    for number, name in enumerate(names):
        assert tier.put(name, 7000)
        if number % 400 == 0:
            tier.ssd.save_index()
    assert tier.counters["ssd_index_errors"]
    tier.ssd.save_index()
    num_records = tier.ssd.num_records
    tier.stop()
    assert disk_bytes(folder) <= budget
    assert Tier(folder, budget=budget).ssd.num_records == num_records


def test_rows_that_could_not_be_written_are_tried_again(folder, tmp_path):
    tier = Tier(folder)
    assert all(map(tier.put, keys(40)))
    write = tier.ssd._index.write
    tier.ssd._index.write = lambda put, removed: False  # the disk is full, say
    tier.ssd.save_index()
    assert tier.ssd.num_unsaved == 40
    tier.ssd._index.write = write
    tier.ssd.save_index()
    assert (tier.ssd.num_unsaved, tier.counters["ssd_index_errors"]) == (0, 1)
    shutil.copytree(folder, tmp_path / "copy")  # as a kill leaves it
    assert all(map(Tier(tmp_path / "copy").get, keys(40)))


def test_of_two_rows_for_one_place_the_newer_one_counts(folder):
    names = filled(folder)
    with lmdb.open(str(folder / "index.mdb"), subdir=False) as environment, environment.begin(write=True) as rows:
        row = rows.get(names[0])
        rows.put(b"a", row[:-8] + bytes(8))  # left by one that went; by its name it comes before
    tier = Tier(folder)
    assert tier.counters["ssd_discarded"] == 1
    assert all(map(tier.get, names))


def lmdb_page_of_free_list(index) -> int:
    """Number of the root page of the list of free pages, by the newer of LMDB's two first pages."""
    head = index.read_bytes()[: 2 * 4096]
    metas = [struct.unpack_from("<80xQ56xQ", head, start) for start in (0, 4096)]
    return max(metas, key=lambda meta: meta[1])[0]


def test_a_row_with_the_last_number_that_there_is_costs_its_record_only(folder):
    names = filled(folder)
    with lmdb.open(str(folder / "index.mdb"), subdir=False) as environment, environment.begin(write=True) as rows:
        rows.put(names[0], rows.get(names[0])[:-8] + b"\xff" * 8)
    tier = Tier(folder)
    assert not tier.get(names[0])
    assert all(map(tier.get, names[1:]))
    assert tier.put(names[0])
    tier.ssd.save_index()
    tier.stop()
    assert all(map(Tier(folder).get, names))


@pytest.mark.parametrize("target", ["nowhere", "a file"])
def test_a_link_in_the_place_of_a_segment_is_removed_and_not_followed(folder, tmp_path, target):
    names = filled(folder)
    segment, outside = sorted(folder.glob("segment-*"))[0], tmp_path / "outside"
    if target == "a file":
        outside.write_bytes(segment.read_bytes() + b"more")
    segment.unlink()
    segment.symlink_to(outside)
    tier = Tier(folder)
    assert not segment.is_symlink()
    assert 0 < sum(map(tier.get, names)) < len(names)
    assert all(map(tier.put, names))
    tier.stop()
    if target == "a file":
        assert outside.read_bytes().endswith(b"more")


def test_an_index_in_whose_loading_a_process_died_is_not_tried_again(folder):
    filled(folder)
    (folder / "index.loading").touch()
    tier = Tier(folder)
    assert tier.ssd.num_records == 0
    assert not (folder / "index.loading").exists()
    tier.stop()


class FaultyFiles(Files):
    """A disk that fails as told."""

    fault: int | None = None  # an errno

    def read(self, path, offset, *into):
        self._fail()
        return super().read(path, offset, *into)

    def write(self, path, offset, data):
        if self.fault is not None:
            super().write(path, offset, data[: len(data) // 2])  # as much as fitted
        self._fail()
        super().write(path, offset, data)

    def _fail(self):
        if self.fault is not None:
            raise OSError(self.fault, os.strerror(self.fault))


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_failed_writes_are_not_visible_and_not_repeated_at_once(folder, fault):
    files = FaultyFiles()
    tier = Tier(folder, files)
    tier.put(b"before")
    files.fault = fault
    assert not tier.put(b"failed")
    assert not tier.put(b"not tried")
    assert tier.counters["ssd_write_errors"] == 1
    assert tier.counters["ssd_writes_suspended"] == 1
    files.fault = None
    assert tier.get(b"before")
    assert not tier.get(b"failed")
    tier.clock.now += 60
    assert tier.put(b"failed")
    assert tier.get(b"failed")
    tier.stop()


def test_failed_reads_are_misses(folder):
    filled(folder)
    files = FaultyFiles()
    tier = Tier(folder, files)
    files.fault = errno.EIO
    assert not any(map(tier.get, keys(10)))
    assert tier.counters["ssd_read_errors"] == 10
    files.fault = None
    assert not any(map(tier.get, keys(10))), "dropped: nobody knows what the disk would give"
    assert all(map(tier.get, keys(40)[10:]))
    tier.stop()


def test_records_side_by_side_are_read_at_once_and_one_by_one_where_that_fails(folder):
    filled(folder, 8)
    reads = []

    class BadSector(Files):
        def read(self, path, offset, *into):
            reads.append(len(into))
            if offset <= 3 * 4096 < offset + sum(map(len, into)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, offset, *into)

    tier = Tier(folder, BadSector())
    slots = [memoryview(mmap.mmap(-1, 4096)) for _ in range(8)]
    assert tier.ssd.read_all(list(zip(keys(8), slots))[::-1]) == [number != 3 for number in range(8)][::-1]
    assert reads == [8] + [1] * 8
    assert tier.counters["ssd_read_errors"] == 1
    assert tier.counters["ssd_reads"] == 7
    for key, slot in zip(keys(8), slots):
        assert key == b"key-3" or payload_of(slot, PAYLOAD) == payload_for(key)
    assert [tier.get(key) for key in keys(8)] == [number != 3 for number in range(8)]
    tier.stop()


def test_records_apart_are_read_at_once_and_a_bad_one_is_one_miss(folder):
    """An unreadable one and a harmed one among runs of one and two records."""
    if not can_overlap():
        pytest.skip("reads cannot overlap here")
    filled(folder, 12)
    with segments(folder)[0].open("r+b") as file:
        file.seek(6 * 4096 + 300)
        file.write(b"harm")
    alone = []

    class BadSector(OverlappedFiles):
        def read(self, path, offset, *into):
            alone.append(offset // 4096)
            if offset == 3 * 4096:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, offset, *into)

    class BadRead(Overlapped):
        def read(self, wanted):
            done = super().read(wanted)
            return [-errno.EIO if offset == 3 * 4096 else found for found, (_, offset, _) in zip(done, wanted)]

    tier = Tier(folder, BadSector(make=BadRead))
    numbers = [8, 0, 3, 6, 1, 10]
    slots = [memoryview(mmap.mmap(-1, 4096)) for _ in numbers]
    wanted = [(keys(12)[number], slot) for number, slot in zip(numbers, slots)]
    assert tier.ssd.read_all(wanted) == [number not in (3, 6) for number in numbers]
    assert alone == [3]
    assert tier.counters["ssd_read_errors"] == tier.counters["ssd_corrupt"] == 1
    assert tier.counters["ssd_reads"] == 4
    assert tier.counters["ssd_read_bytes"] == 5 * 4096
    for number, (key, slot) in zip(numbers, wanted):
        assert number in (3, 6) or payload_of(slot, PAYLOAD) == payload_for(key)
    assert [tier.get(key) for key in keys(12)] == [number not in (3, 6) for number in range(12)]
    tier.ssd.check_integrity()
    tier.stop()


def test_a_full_disk(small_disk):
    tier = Tier(small_disk / "ssd", budget=8 * BUDGET)
    for key in keys(400):
        tier.put(key)
        tier.clock.now += 60  # try each of them
    assert tier.counters["ssd_write_errors"] > 50
    tier.ssd.save_index()
    visible = sum(map(tier.get, keys(400)))
    assert 100 < visible < 256
    tier.stop()


def test_what_is_not_whole_is_not_written(folder):
    tier = Tier(folder)
    slot = memoryview(bytearray(4096))
    seal(slot, b"key", PAYLOAD)
    slot[300] ^= 1
    assert not tier.ssd.write(b"key", slot, PAYLOAD)
    assert not tier.get(b"key")
    assert tier.counters["ssd_writes_refused"] == 1
    tier.stop()


def test_folder_and_files_are_for_their_owner_only(folder):
    folder.mkdir(mode=0o755)
    umask = os.umask(0)
    try:
        filled(folder)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_two_stores_do_not_share_a_folder(folder):
    tier = Tier(folder)
    with pytest.raises(StoreError, match="in use by another store"):
        Tier(folder)
    tier.stop()
    Tier(folder).stop()


def test_rows_count_as_unsaved_until_they_are_on_disk(folder):
    tier = Tier(folder)
    tier.put(b"key")
    index = tier.ssd._index
    write, seen = index.write, []
    index.write = lambda put, removed: (seen.append(tier.ssd.num_unsaved), write(put, removed))[1]
    tier.ssd.save_index()
    assert seen == [1]
    assert tier.ssd.num_unsaved == 0
    tier.stop()


def test_a_folder_that_is_not_a_stores_is_left_as_it_is(tmp_path):
    """Files of others are neither closed to their readers nor removed."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    (folder / "segment-mydata.kv").write_text("hi")
    with pytest.raises(StoreError, match="chmod 700"):
        Tier(folder)
    folder.chmod(0o700)
    with pytest.raises(StoreError, match="files of others"):
        Tier(folder)
    assert (folder / "segment-mydata.kv").read_text() == "hi"
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    Tier(empty).stop()
    assert empty.stat().st_mode & 0o777 == 0o700
    (empty / "segment-mydata.kv").write_text("hi")
    Tier(empty).stop()
    assert (empty / "segment-mydata.kv").exists()
