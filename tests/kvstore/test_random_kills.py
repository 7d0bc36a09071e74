"""Random operations while the store is killed, stalled and its files are harmed: never a wrong byte.

2,500 operations by default; NANOFLOW_KV_OPERATIONS=10000 for more.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

from store_process import until

from kvstore.record import slot_bytes_for

NUM_OPERATIONS = int(os.environ.get("NANOFLOW_KV_OPERATIONS", "2500"))
SSD_BYTES = 2 << 20
CPU_BYTES = 512 << 10
SIZES = (1000, 6000, 14_000)


def size_of(key: bytes) -> int:
    return SIZES[key[-1] % 3]


def payload_for(key: bytes) -> bytes:
    return random.Random(key).randbytes(size_of(key))


def disk_bytes(folder: Path) -> int:
    """Of files that are still there when asked."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def harm(folder: Path, chance: random.Random) -> None:
    """What a bad disk does to one of the segments."""
    segments = sorted(folder.glob("segment-*"))
    if not segments:
        return
    path = chance.choice(segments)
    size = path.stat().st_size
    match chance.choice(["flip", "truncate", "delete", "swap"]):
        case "flip":
            with path.open("r+b") as file:
                for _ in range(20):
                    file.seek(chance.randrange(max(size, 1)))
                    file.write(chance.randbytes(3))
        case "truncate":
            os.truncate(path, size // 2)
        case "delete":
            path.unlink()
        case "swap":
            other = chance.choice(segments)
            spare = folder / "spare"
            path.rename(spare)
            if other != path:
                other.rename(path)
            spare.rename(other)


def test_never_a_wrong_byte(store_process, tmp_path):
    ssd_dir = tmp_path / "ssd"
    store = store_process(
        cpu_bytes=CPU_BYTES, slab_bytes=64 << 10, ssd_dir=ssd_dir, ssd_bytes=SSD_BYTES, ssd_after_hits=1
    )
    client = store.client(call_timeout_s=1.0)
    chance = random.Random(20)
    keys = [b"key-%03d" % number for number in range(300)]
    hits = kills = 0
    for _ in range(NUM_OPERATIONS):
        key = keys[min(int(chance.expovariate(1 / 80)), 299)]
        match chance.random():
            case luck if luck < 0.45:
                client.put(key, payload_for(key))
            case luck if luck < 0.90:
                found = client.get(key, wait_s=chance.choice([0.0, 0.5]))
                assert found is None or found == payload_for(key)
                hits += found is not None
            case luck if luck < 0.96:
                chain = chance.sample(keys, 6)
                lease = client.acquire(chain, 0.2)
                for number, block in enumerate(lease.blocks if lease else ()):
                    assert block.key == chain[number]
                    into = memoryview(bytearray(block.payload_bytes))
                    assert not lease.copy(number, into) or into == payload_for(block.key)
                if lease and chance.random() < 0.7:  # or leave it to its end
                    lease.release()
            case luck if luck < 0.994:
                client.prefetch([key])
            case luck if luck < 0.996:
                harm(ssd_dir, chance)
            case luck if luck < 0.998:
                store.signal(signal.SIGSTOP)
                client.get(key)
                store.signal(signal.SIGCONT)
                assert until(lambda: client.stats() is not None)
            case _:
                store.kill()
                kills += 1
                client.get(key)
                store.start()
                assert until(lambda: client.stats() is not None)
        assert disk_bytes(ssd_dir) <= SSD_BYTES + slot_bytes_for(max(SIZES))
    assert kills >= NUM_OPERATIONS // 1000
    assert hits > NUM_OPERATIONS // 10
    stats = client.stats()
    assert stats["cpu_used_bytes"] <= CPU_BYTES
    print(f"{NUM_OPERATIONS} operations, {kills} kills, {hits} hits; {client.counters.snapshot()}; {stats}")
    assert store.terminate() == 0
