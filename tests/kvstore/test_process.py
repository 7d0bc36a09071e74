"""A real service and what may happen to it: whatever does, a client gets right bytes or none, and in time."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from store_process import StoreProcess, until

from kvstore.client import KVClient
from kvstore.keys import Tier
from kvstore.pb import kvstore_pb2, kvstore_pb2_grpc

PAYLOAD = 5000


def payload_for(key: bytes, size: int = PAYLOAD) -> bytes:
    return random.Random(key).randbytes(size)


def keys(count: int, prefix: str = "key") -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(count)]


def put(client: KVClient, key: bytes) -> bool:
    return client.put(key, payload_for(key))


def get(client: KVClient, key: bytes, wait_s: float = 2.0) -> bool:
    """Whether it is there; wrong bytes are an error of the test."""
    found = client.get(key, wait_s)
    assert found is None or found == payload_for(key)
    return found is not None


def with_ssd(start, tmp_path, **flags) -> StoreProcess:
    return start(ssd_dir=tmp_path / "ssd", ssd_bytes=4 << 20, ssd_after_hits=0, **flags)


def arena_of(store: StoreProcess) -> Path:
    """The file that the store tells clients to map."""
    with grpc.insecure_channel(store.address) as channel:
        attach = kvstore_pb2_grpc.KVStoreStub(channel).Attach
        return Path(attach(kvstore_pb2.AttachRequest(), timeout=5).arena_path)


def test_puts_and_gets_go_through_the_arena(store_process):
    store = store_process()
    client = store.client()
    assert not get(client, b"key-0")
    assert all(put(client, key) for key in keys(5))
    assert not put(client, b"key-0"), "it is there already"
    assert all(get(client, key) for key in keys(5))
    assert client.lookup(keys(7)) == [Tier.CPU] * 5
    lease = client.acquire(keys(7))
    assert [block.key for block in lease.blocks] == keys(5)
    assert all(lease.view(number) == payload_for(key) for number, key in enumerate(keys(5)))
    assert not lease.is_over
    lease.release()
    assert lease.is_over
    assert until(lambda: client.stats()["leases"] == 0)
    assert client.stats()["hits_cpu"] == 10
    assert client.flush()
    assert client.lookup(keys(1)) == []


def test_sigterm_ends_it_cleanly_and_keeps_what_is_on_ssd(store_process, tmp_path):
    store = with_ssd(store_process, tmp_path)
    client = store.client()
    arena = arena_of(store)
    for key in keys(200):
        assert put(client, key)
        assert until(lambda: client.stats()["background_waiting"] < 32)  # lest copies be dropped
    assert until(lambda: client.stats()["ssd_records"] == 200)
    assert arena.exists()
    assert store.terminate() == 0
    assert not arena.exists()
    assert not store.socket.exists()
    store.start()
    assert until(lambda: client.lookup([b"key-0"]) == [Tier.SSD])
    assert all(get(client, key) for key in keys(200))
    assert client.stats()["hits_ssd"] > 100


def test_killed_and_restarted_at_once_clients_go_on(store_process, tmp_path):
    store = with_ssd(store_process, tmp_path)
    client = store.client()
    arena = arena_of(store)
    assert all(put(client, key) for key in keys(50))
    assert until(lambda: client.stats()["ssd_records"] == 50)
    assert until(lambda: client.stats()["ssd_unsaved"] == 0)
    lease = client.acquire([b"key-0"])
    store.kill()
    assert lease.view(0) == payload_for(b"key-0"), "a mapped arena stays"
    assert not get(client, b"key-0")
    store.start()
    assert not arena.exists(), "the killed one's arena is removed by the next"
    assert until(lambda: get(client, b"key-1"))
    assert all(get(client, key) for key in keys(50))
    assert client.counters["attached"] >= 2
    assert put(client, b"after")
    assert get(client, b"after")


def test_memory_of_a_store_that_is_gone_is_mapped_by_nobody_who_has_no_lease(store_process):
    store = store_process()
    client = store.client()
    assert put(client, b"key")
    number = arena_of(store).stat().st_ino

    def is_mapped() -> bool:
        return any(line.split()[4] == str(number) for line in Path("/proc/self/maps").read_text().splitlines())

    lease = client.acquire([b"key"])
    store.kill()
    assert not until(lambda: not is_mapped(), 1.0)
    assert bytes(lease.view(0)) == payload_for(b"key")
    del lease
    assert until(lambda: not is_mapped()), "its next run may need the memory"


def test_a_restart_between_reserve_and_commit_makes_nothing_visible(store_process):
    store = store_process()
    client = store.client()
    lease = client.reserve([b"key"], PAYLOAD)
    assert lease.write(0, payload_for(b"key"))
    store.kill()
    store.start()
    assert lease.commit() == 0
    assert until(lambda: client.stats() is not None)
    assert not get(client, b"key")


def test_stalled_it_costs_a_bounded_wait_then_none_and_comes_back(store_process):
    store = store_process()
    client = store.client(call_timeout_s=0.3)
    assert put(client, b"key")
    assert until(lambda: get(client, b"key", 0.0))
    store.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not get(client, b"key", 0.2)
    assert time.monotonic() - began < 2.0
    assert until(lambda: (get(client, b"key", 0.0), client.breaker.is_open)[1])
    began = time.monotonic()
    refused = client.counters["refused"]
    for _ in range(20):
        get(client, b"key", 0.0)
    assert client.counters["refused"] > refused + 10
    assert time.monotonic() - began < 2.0
    assert client.counters["timeouts"] >= 3
    assert client.breaker.times_opened >= 1
    store.signal(signal.SIGCONT)
    assert until(lambda: get(client, b"key", 0.0))
    assert not client.breaker.is_open


def test_not_there_at_all_it_is_a_miss(tmp_path):
    from kvstore.client import ClientConfig

    client = KVClient(ClientConfig(f"unix:{tmp_path}/nowhere.sock", call_timeout_s=0.5))
    began = time.monotonic()
    for _ in range(50):
        assert client.get(b"key") is None
        assert not client.put(b"key", b"payload")
        assert client.lookup([b"key"]) == []
        assert client.prefetch([b"key"]) == 0
        assert client.stats() is None
        assert not client.flush()
    assert time.monotonic() - began < 5.0
    assert client.counters["refused"] > 200
    client.close()
    assert client.get(b"key") is None


def test_a_dead_client_keeps_nothing(store_process):
    store = store_process(cpu_bytes=8 * 8192, slab_bytes=8192, store_lease=0.5)
    dead, alive = store.client(), store.client()
    assert all(put(alive, key) for key in keys(8))
    lease = dead.acquire(keys(8))
    assert len(lease.blocks) == 8
    assert not put(alive, b"more"), "everything is leased"
    dead.close()
    assert until(lambda: put(alive, b"more"))
    assert until(lambda: alive.stats()["leases"] == 0)
    assert lease.is_over


def test_eviction_under_a_reader_that_outlived_its_lease_is_a_miss(store_process):
    store = store_process(cpu_bytes=8 * 8192, slab_bytes=8192, store_lease=0.3)
    client = store.client()
    assert put(client, b"old")
    lease = client.acquire([b"old"])
    time.sleep(0.5)
    assert until(lambda: (all(put(client, key) for key in keys(8)), not client.lookup([b"old"]))[1])
    assert not lease.copy(0, memoryview(bytearray(PAYLOAD)))
    assert client.counters["leases_outlived"] == 1
    assert all(get(client, key) for key in keys(8))


def test_a_late_writer_cannot_spoil_others(store_process):
    store = store_process(cpu_bytes=8 * 8192, slab_bytes=8192, store_lease=0.3)
    client = store.client()
    lease = client.reserve([b"late"], PAYLOAD)
    room = lease.view(0)
    time.sleep(0.5)
    assert until(lambda: client.stats()["quarantined"] == 1)
    assert lease.view(0) is None
    assert not lease.write(0, payload_for(b"late"))
    assert lease.commit() == 0
    for key in keys(20):
        put(client, key)
    room[:] = bytes(PAYLOAD)  # a copy engine that was under way all that time
    assert all(get(client, key) for key in keys(20)[-7:])
    assert client.counters["corrupt"] == 0


def test_bytes_spoilt_in_the_arena_are_a_miss_and_dropped(store_process):
    store = store_process()
    client = store.client()
    assert put(client, b"key")
    with client.acquire([b"key"]) as lease:
        lease.view(0)[17] ^= 1
    assert not get(client, b"key")
    assert client.counters["corrupt"] == 1
    assert until(lambda: client.stats()["reported_corrupt"] == 1)
    assert put(client, b"key")
    assert get(client, b"key")


def test_a_disk_that_is_full(store_process, small_disk):
    store = store_process(ssd_dir=small_disk / "ssd", ssd_bytes=4 << 20, ssd_after_hits=0)
    client = store.client()
    assert all(put(client, key) for key in keys(50))
    assert until(lambda: client.stats()["ssd_records"] == 50 and not client.stats()["ssd_unsaved"])
    assert all(put(client, key) for key in keys(200)[50:])
    assert until(lambda: client.stats()["ssd_write_errors"] > 0 == client.stats()["background_waiting"])
    assert sum(get(client, key) for key in keys(200)) >= 50
    store.kill()  # the index had no room for the later ones
    store.start()  # on the full disk
    assert until(lambda: client.stats() is not None)
    assert sum(get(client, key) for key in keys(200)) == client.stats()["ssd_restored"] >= 50
    assert put(client, b"another")
    assert get(client, b"another")
    assert store.terminate() == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(AssertionError, match="Read-only file system"):
        store.start()


def test_a_disk_that_fails_to_write_and_to_read(store_process, tmp_path):
    store = with_ssd(store_process, tmp_path)
    client = store.client()
    assert all(put(client, key) for key in keys(40))
    assert until(lambda: client.stats()["ssd_records"] == 40)
    before = resource.prlimit(store.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(store.pid, resource.RLIMIT_FSIZE, (4096, before[1]))  # writes beyond that are errors
    assert all(put(client, key) for key in keys(40, "other"))
    assert until(lambda: client.stats()["ssd_write_errors"] > 0)
    assert all(get(client, key) for key in keys(40, "other"))
    assert client.stats()["ssd_records"] == 40
    store.kill()
    for path in (tmp_path / "ssd").glob("segment-*"):
        path.rename(path.with_suffix(".was"))
        path.symlink_to(path.with_suffix(".was"))  # not followed: an error of each read
    store.start()
    assert until(lambda: client.stats() is not None)
    assert not any(get(client, key) for key in keys(40))
    assert put(client, b"key-0")
    assert get(client, b"key-0")
    assert store.terminate() == 0


def test_files_are_for_their_owner_only(store_process, tmp_path):
    umask = os.umask(0)
    try:
        store = with_ssd(store_process, tmp_path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(arena_of(store).stat().st_mode) == 0o600
    assert stat.S_IMODE(store.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "ssd").stat().st_mode) == 0o700


def test_a_second_store_is_refused_in_one_line(store_process, tmp_path):
    store = with_ssd(store_process, tmp_path)
    with pytest.raises(AssertionError, match="another store listens"):
        store_process()
    other = tmp_path / "other"
    with pytest.raises(AssertionError, match="in use by another store"):
        with_ssd(store_process, tmp_path, socket=other / "kv.sock")
    assert "Traceback" not in store.log
    assert put(store.client(), b"key")


def test_two_clients_of_different_models_share_it(store_process, tmp_path):
    store = with_ssd(store_process, tmp_path)
    first, second = store.client(), store.client()

    def work(client: KVClient, prefix: str, size: int, wrong: list[bytes]) -> None:
        for key in keys(60, prefix):
            client.put(key, payload_for(key, size))
        for key in keys(60, prefix):
            found = client.get(key, 2.0)
            if found is not None and found != payload_for(key, size):
                wrong.append(key)

    wrong: list[bytes] = []
    threads = [
        threading.Thread(target=work, args=(first, "llama", 3000, wrong)),
        threading.Thread(target=work, args=(second, "qwen", 20_000, wrong)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert first.stats()["puts"] == 120
    assert len(first.lookup([b"qwen-59", b"llama-59"])) == 2


def test_a_harmed_index_ends_at_most_one_start(store_process, tmp_path):
    """LMDB trusts its file: bits flipped in it may end the process, but not the next one."""
    store = with_ssd(store_process, tmp_path)
    client = store.client()
    for key in keys(300):
        put(client, key)
    assert until(lambda: client.stats()["background_waiting"] == 0)
    assert store.terminate() == 0
    index = tmp_path / "ssd" / "index.mdb"
    sound = index.read_bytes()
    chance = random.Random(3)
    for _ in range(4):
        harmed = bytearray(sound)
        for _ in range(len(harmed) // 100):
            harmed[chance.randrange(len(harmed))] ^= 1 << chance.randrange(8)
        index.write_bytes(harmed)
        with suppress(AssertionError):  # it did not start
            store.start()
        if store.process.poll() is not None:
            store.start()
        assert until(lambda: client.stats() is not None)
        for key in keys(20):
            get(client, key)
        assert put(client, b"new")
        store.kill()
