"""The service against an ideal one: the same hits, the same victims, never wrong bytes, never over a budget."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_calls import Clock, fill, get, put

from kvstore.keys import Tier
from kvstore.record import is_whole, payload_of, slot_bytes_for
from kvstore.service import KVService
from kvstore.settings import KVServiceConfig

SLOTS = 16  # 64 KiB, the least that a store may have
SLOT = 4096
PAYLOAD = 1000
KEYS = st.sampled_from([b"key-%d" % number for number in range(40)])
LEASE_S, QUARANTINE_S = 10.0, 30.0


def payload_for(key: bytes, size: int = PAYLOAD) -> bytes:
    return (key * size)[:size]


class AgainstTheIdeal(RuleBasedStateMachine):
    """One tier and one record size: an ordered dict does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        config = KVServiceConfig(SLOTS * SLOT, slab_bytes=4 * SLOT, lease_s=LEASE_S, quarantine_s=QUARANTINE_S)
        self.service = KVService(config, self.clock)
        self.order: OrderedDict[bytes, None] = OrderedDict()  # unpinned, oldest first
        self.reads: list[tuple[float, int, list[bytes]]] = []  # deadline, lease, keys
        self.writes: list[tuple[float, int, bytes, int]] = []  # deadline, lease, key, offset
        self.quarantined: list[float] = []

    @property
    def pinned(self) -> set[bytes]:
        return {key for _, _, keys in self.reads for key in keys}

    @property
    def has(self) -> set[bytes]:
        return set(self.order) | self.pinned

    def model_room(self) -> bool:
        used = len(self.has) + len(self.writes) + len(self.quarantined)
        if used < SLOTS:
            return True
        if not self.order:
            return False
        self.order.popitem(last=False)
        return True

    def model_unpin(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key not in self.pinned:
                self.order[key] = None

    @rule(key=KEYS)
    def reserve(self, key):
        reserved = self.service.reserve([key], PAYLOAD)
        if key in self.has:
            if key in self.order:
                self.order.move_to_end(key)
            assert reserved.offsets == (-1,)
        elif any(key == each[2] for each in self.writes):
            assert reserved.offsets == (-1,)
        elif not self.model_room():
            assert reserved.offsets == (-2,)
        else:
            assert reserved.offsets[0] >= 0
            self.writes.append((self.clock.now + LEASE_S, reserved.lease_id, key, reserved.offsets[0]))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6, unique=True))
    def put_a_chain(self, keys):
        reserved = self.service.reserve(keys, PAYLOAD)
        written = []
        for key, offset in zip(keys, reserved.offsets):
            if key in self.has or any(key == each[2] for each in self.writes):
                assert offset == -1
                if key in self.order:
                    self.order.move_to_end(key)
            elif not self.model_room():
                assert offset == -2
            else:
                fill(self.service, key, offset, payload_for(key))
                written.append(key)
                self.writes.append((0.0, 0, key, offset))  # takes room until it is committed
        self.writes = [each for each in self.writes if each[1]]
        assert self.service.commit(reserved.lease_id) == len(written)
        self.order.update(dict.fromkeys(reversed(written)))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), how=st.sampled_from(["whole", "torn", "given up"]))
    def end_a_put(self, data, how):
        index = data.draw(st.integers(0, len(self.writes) - 1))
        _, lease, key, offset = self.writes.pop(index)
        if how == "given up":
            assert self.service.release(lease)
            return
        if how == "torn":
            slot = self.service.arena.slot(offset, SLOT)
            slot[:300] = b"\xff" * 300
            assert self.service.commit(lease) == 0
            return
        fill(self.service, key, offset, payload_for(key))
        assert self.service.commit(lease) == 1
        self.order[key] = None

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def acquire(self, keys):
        acquired = self.service.acquire(keys)
        leading = []
        for key in keys:
            if key not in self.has:
                break
            leading.append(key)
        assert [block.key for block in acquired.blocks] == leading
        if leading:
            for key in leading:
                self.order.pop(key, None)
            self.reads.append((self.clock.now + LEASE_S, acquired.lease_id, leading))
            for block in acquired.blocks:
                slot = self.service.arena.slot(block.offset, SLOT)
                assert is_whole(slot, block.key, PAYLOAD)
                assert payload_of(slot, PAYLOAD) == payload_for(block.key)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def release(self, data):
        _, lease, keys = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        assert self.service.release(lease)
        self.model_unpin(keys)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def lookup(self, keys):
        expected = []
        for key in keys:
            if key not in self.has:
                break
            expected.append(Tier.CPU)
        assert self.service.lookup(keys) == expected

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 31.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.service.expire()
        now = self.clock.now
        while self.reads and self.reads[0][0] <= now:
            keys = self.reads.pop(0)[2]
            self.model_unpin(keys)
        while self.writes and self.writes[0][0] <= now:
            self.writes.pop(0)
            self.quarantined.append(now + QUARANTINE_S)
        self.quarantined = [until for until in self.quarantined if until > now]

    @invariant()
    def counts_agree(self):
        self.service.check_integrity()
        slabs = self.service.tiers.cpu.slabs
        assert slabs.used_bytes == SLOT * (len(self.has) + len(self.writes) + len(self.quarantined))
        assert slabs.used_bytes <= SLOTS * SLOT

    def teardown(self) -> None:
        assert self.service.close()
        assert not self.service.arena.path.exists()


TestAgainstTheIdeal = AgainstTheIdeal.TestCase
TestAgainstTheIdeal.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


class TwoTiersNeverWrong(RuleBasedStateMachine):
    """Two tiers, two record sizes, restarts: what comes back is right, and nobody takes more than was granted."""

    SSD_BYTES = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp())
        self.service = self.new()

    def new(self) -> KVService:
        return KVService(
            KVServiceConfig(
                SLOTS * SLOT,
                ssd_dir=self.folder,
                ssd_bytes=self.SSD_BYTES,
                slab_bytes=4 * SLOT,
                segment_bytes=8 * SLOT,
                ssd_after_hits=1,
                lease_s=LEASE_S,
                quarantine_s=QUARANTINE_S,
            ),
            self.clock,
        )

    @rule(key=KEYS, large=st.booleans())
    def put(self, key, large):
        size = 5000 if large else PAYLOAD
        put(self.service, b"large" + key if large else key, payload_for(key, size))

    @rule(key=KEYS, large=st.booleans())
    def get(self, key, large):
        size = 5000 if large else PAYLOAD
        found = get(self.service, b"large" + key if large else key)
        assert found is None or found[0] == payload_for(key, size)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8))
    def get_a_chain(self, keys):
        acquired = self.service.acquire(keys, wait_s=5.0)
        for block in acquired.blocks:
            slot = self.service.arena.slot(block.offset, slot_bytes_for(block.payload_bytes))
            assert is_whole(slot, block.key, PAYLOAD)
        self.service.release(acquired.lease_id)

    @rule()
    def finish(self):
        self.service.tiers.finish()

    @rule(key=KEYS)
    def report(self, key):
        self.service.report_corrupt([key])

    @rule()
    def flush(self):
        self.service.tiers.finish()
        self.service.flush()
        assert self.service.tiers.cpu.num_records == 0
        assert self.service.tiers.ssd.num_records == 0

    @rule()
    def restart(self):
        self.service.tiers.finish()
        on_ssd = self.service.tiers.ssd.num_records
        assert self.service.close()
        self.service = self.new()
        assert self.service.tiers.ssd.num_records == on_ssd

    @invariant()
    def within_budgets(self):
        self.service.check_integrity()
        assert self.service.tiers.cpu.slabs.used_bytes <= SLOTS * SLOT
        on_disk = sum(path.stat().st_size for path in self.folder.iterdir())
        assert on_disk <= self.SSD_BYTES + slot_bytes_for(5000)

    def teardown(self) -> None:
        self.service.tiers.finish()
        assert not self.service.stats()["leases"]
        assert self.service.close()
        shutil.rmtree(self.folder)


TestTwoTiersNeverWrong = TwoTiersNeverWrong.TestCase
TestTwoTiersNeverWrong.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
