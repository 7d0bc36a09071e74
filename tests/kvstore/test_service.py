"""What the models leave out: whole slabs that change hands, loads under way, queues that are full."""

from __future__ import annotations

import random
import threading

import pytest
from store_calls import Clock, fill, get, put

from kvstore.files import Files
from kvstore.keys import InvalidCallError, Tier
from kvstore.service import NO_ROOM, NOT_NEEDED, KVService
from kvstore.settings import KVServiceConfig

SLOT = 4096


def payload_for(key: bytes, size: int = 1000) -> bytes:
    return (key * size)[:size]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(files=None, **settings) -> KVService:
        given = {"cpu_bytes": 16 * SLOT, "slab_bytes": 4 * SLOT, "segment_bytes": 16 * SLOT, **settings}
        service = KVService(KVServiceConfig(**given), Clock(), files)
        made.append(service)
        return service

    yield make
    for service in made:
        service.check_integrity()
        assert service.close()


class SlowFiles(Files):
    """A disk that waits until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def read(self, path, offset, *into):
        assert self.let_go.wait(20)
        return super().read(path, offset, *into)


def on_ssd_only(service: KVService, key: bytes) -> None:
    put(service, key, payload_for(key))
    service.tiers.finish()
    for number in range(16):
        put(service, b"other-%d" % number, payload_for(b"other"))
        service.tiers.finish()
    assert service.lookup([key]) == [Tier.SSD]


def test_another_record_size_takes_the_oldest_slab_whole(make):
    service = make()
    keys = [b"key-%02d" % number for number in range(16)]
    for key in keys:
        assert put(service, key, payload_for(key))
    assert put(service, b"large", payload_for(b"large", 3 * SLOT))
    assert [service.lookup([key]) for key in keys] == [[]] * 4 + [[Tier.CPU]] * 12
    assert get(service, b"large")[0] == payload_for(b"large", 3 * SLOT)


def test_a_slab_with_a_leased_record_stays(make):
    service = make()
    keys = [b"key-%02d" % number for number in range(16)]
    for key in keys:
        assert put(service, key, payload_for(key))
    lease = service.acquire([keys[1]]).lease_id
    assert put(service, b"large", payload_for(b"large", 3 * SLOT))
    assert [service.lookup([key]) for key in keys] == [[Tier.CPU]] * 4 + [[]] * 4 + [[Tier.CPU]] * 8
    service.release(lease)


def test_records_larger_than_a_slab_are_refused(make):
    service = make()
    assert service.reserve([b"key"], 4 * SLOT).offsets == (NO_ROOM,)
    assert service.counters["puts_refused"] == 1
    with pytest.raises(InvalidCallError, match="at least 1"):
        service.reserve([b"key"], 0)


def test_two_who_write_the_same_key_write_it_once(make):
    service = make()
    first = service.reserve([b"key"], 1000)
    assert service.reserve([b"key"], 1000).offsets == (NOT_NEEDED,)
    fill(service, b"key", first.offsets[0], payload_for(b"key"))
    assert service.commit(first.lease_id) == 1
    assert service.commit(first.lease_id) == 0


def test_what_a_writer_that_died_was_to_write_is_missed_and_written_by_another(make):
    service = make()
    service.reserve([b"key"], 1000)
    assert service.reserve([b"key"], 1000).offsets == (NOT_NEEDED,)  # as if it were there
    assert service.lookup([b"key"]) == []
    service._clock.now += service.config.lease_s
    put(service, b"key", payload_for(b"key"))
    assert service.lookup([b"key"]) == [Tier.CPU]


def test_a_put_is_seen_only_when_it_is_whole(make):
    service = make()
    reserved = service.reserve([b"key"], 1000)
    assert service.lookup([b"key"]) == []
    fill(service, b"key", reserved.offsets[0], payload_for(b"key"))
    assert service.lookup([b"key"]) == []
    service.commit(reserved.lease_id)
    assert service.lookup([b"key"]) == [Tier.CPU]


def test_only_what_was_hit_often_enough_goes_to_ssd(make, tmp_path):
    service = make(ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=2)
    put(service, b"key", payload_for(b"key"))
    for expected in (0, 0, 1, 1):
        service.tiers.finish()
        assert service.stats()["ssd_records"] == expected
        get(service, b"key")
    assert service.counters["ssd_writes"] == 1


@pytest.mark.parametrize("way", ["loaded", "put again"])
def test_a_key_in_both_tiers_is_kept_once(make, tmp_path, way):
    service = make(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 20, ssd_after_hits=0)
    on_ssd_only(service, b"key")
    again = bytes(bytearray(b"key"))  # as each call brings its own
    assert get(service, again) is not None if way == "loaded" else put(service, again, payload_for(again))
    tiers = (service.tiers.cpu, service.tiers.ssd._residents)
    first, second = (tier.lru.key_of(tier.find(b"key")) for tier in tiers)
    assert first is second


def test_a_load_under_way_holds_up_nobody_else_and_is_shared(make, tmp_path):
    files = SlowFiles()
    service = make(files, ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=0)
    on_ssd_only(service, b"key")
    assert service.acquire([b"key"], wait_s=0.0).blocks == ()
    assert service.acquire([b"key"], wait_s=0.05).blocks == ()
    assert service.prefetch([b"key"]) == 1
    assert service.counters["promotions"] == 1
    assert put(service, b"new", payload_for(b"new"))
    assert get(service, b"new")[1] is Tier.CPU
    files.let_go.set()
    acquired = service.acquire([b"key"], wait_s=5.0)
    assert [block.tier for block in acquired.blocks] == [Tier.SSD]
    service.release(acquired.lease_id)
    assert get(service, b"key") == (payload_for(b"key"), Tier.CPU)


def test_a_bad_record_among_those_that_are_read_together_ends_nobody_elses_load(make, tmp_path):
    service = make(ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=0)
    keys = [b"key-%02d" % number for number in range(16)]
    for key in [*keys, *(b"other-%d" % number for number in range(16))]:
        put(service, key, payload_for(key))
        service.tiers.finish()
    segment = next(tmp_path.glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[data.index(payload_for(keys[5]))] ^= 1
    segment.write_bytes(data)
    acquired = service.acquire(keys, wait_s=5.0)
    assert [block.key for block in acquired.blocks] == keys[:5]
    service.release(acquired.lease_id)
    assert service.lookup(keys[6:]) == [Tier.CPU] * 10
    assert service.lookup(keys[5:]) == []
    assert service.counters["promotions_failed"] == service.counters["ssd_corrupt"] == 1


def test_a_put_of_what_is_being_loaded_is_no_trouble(make, tmp_path):
    files = SlowFiles()
    service = make(files, ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=0)
    on_ssd_only(service, b"key")
    service.prefetch([b"key"])
    assert put(service, b"key", payload_for(b"key"))
    files.let_go.set()
    service.tiers.finish()
    assert get(service, b"key") == (payload_for(b"key"), Tier.CPU)
    assert service.tiers.cpu.slabs.used_bytes == service.tiers.cpu.num_records * SLOT, "the load's room came back"


def test_chains_longer_than_the_arena_give_what_fits(make, tmp_path):
    service = make(ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=0)
    keys = [b"key-%02d" % number for number in range(40)]
    for key in keys:
        put(service, key, payload_for(key))
        service.tiers.finish()
    acquired = service.acquire(keys, wait_s=5.0)
    assert [block.key for block in acquired.blocks] == keys[: len(acquired.blocks)]
    service.release(acquired.lease_id)
    service.tiers.finish()
    assert service.stats()["leases"] == 0


def test_of_one_calls_keys_the_head_goes_last(make):
    service = make()
    keys = [b"key-%02d" % number for number in range(16)]
    reserved = service.reserve(keys, 1000)
    for key, offset in zip(keys, reserved.offsets):
        fill(service, key, offset, payload_for(key))
    assert service.commit(reserved.lease_id) == 16
    put(service, b"new", payload_for(b"new"))
    assert len(service.lookup(keys)) == 15


def test_a_flush_leaves_leased_records_readable(make, tmp_path):
    service = make(ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=0)
    put(service, b"key", payload_for(b"key"))
    service.tiers.finish()
    acquired = service.acquire([b"key"])
    service.flush()
    assert service.lookup([b"key"]) == []
    assert put(service, b"key", b"anew" * 10)
    slot = service.arena.slot(acquired.blocks[0].offset, SLOT)
    assert slot[256:1256] == payload_for(b"key")
    service.release(acquired.lease_id)
    assert get(service, b"key")[0] == b"anew" * 10


class HeldFiles(Files):
    """A disk that waits in the middle of everything until it is let go."""

    def __init__(self):
        super().__init__()
        self.is_busy, self.let_go = threading.Event(), threading.Event()

    def read(self, path, offset, *into):
        self.is_busy.set()
        assert self.let_go.wait(10)
        return super().read(path, offset, *into)

    def write(self, path, offset, data):
        self.is_busy.set()
        assert self.let_go.wait(10)
        super().write(path, offset, data)


def test_a_flush_also_forgets_what_is_being_copied_or_loaded(make, tmp_path):
    files = HeldFiles()
    service = make(files, ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 20, ssd_after_hits=0)
    put(service, b"k", payload_for(b"k"))
    assert files.is_busy.wait(10)
    service.flush()
    files.let_go.set()
    service.tiers.finish()
    assert service.lookup([b"k"]) == []
    put(service, b"k", payload_for(b"k"))
    service.tiers.finish()
    service.tiers.drop(b"k")
    files.is_busy.clear()
    files.let_go.clear()
    assert service.prefetch([b"k"]) == 1
    assert files.is_busy.wait(10)
    service.flush()
    files.let_go.set()
    service.tiers.finish()
    assert service.lookup([b"k"]) == []


def test_threads_get_right_bytes_and_leave_nothing_behind(make, tmp_path):
    service = make(ssd_dir=tmp_path, ssd_bytes=1 << 20, ssd_after_hits=1)
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(400):
            key = b"key-%02d" % chance.randrange(60)
            size = 5000 if key[-1] % 2 else 1000
            if chance.random() < 0.5:
                put(service, key, payload_for(key, size))
            else:
                found = get(service, key, wait_s=0.5)
                if found is not None and found[0] != payload_for(key, size):
                    wrong.append(key)

    for seeds in (range(4), range(4, 8)):  # the second ones find what has gone to SSD by then
        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        service.tiers.finish()
    assert not wrong
    assert service.stats()["leases"] == 0
    assert service.counters["hits_ssd"] > 0
