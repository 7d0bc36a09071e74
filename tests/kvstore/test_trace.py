"""Hits on a real trace of conversations, against a textbook LRU of as many records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from store_calls import put_all

from control_plane.bench.offload_ideal import Use, ideal_hits
from kvstore.keys import Tier
from kvstore.service import KVService
from kvstore.settings import KVServiceConfig
from kvstore.ssd_index import index_bytes_for

SHARED = Path(os.environ.get("NANOFLOW_SHARED", Path(__file__).parents[2].parent / "shared"))
TRACE = SHARED / "traces" / "mooncake_conversation.jsonl"
SLOT = 4096


@pytest.fixture(scope="module")
def requests() -> list[list[bytes]]:
    """Keys of each request's blocks, heads first."""
    if not TRACE.exists():
        pytest.skip(f"{TRACE} is not there; NANOFLOW_SHARED names the folder with traces/")
    with TRACE.open() as file:
        return [[number.to_bytes(32, "big") for number in json.loads(line)["hash_ids"]] for line in file]


def store_hits(service: KVService, requests: list[list[bytes]]) -> dict[Tier, int]:
    hits = {Tier.CPU: 0, Tier.SSD: 0}
    for keys in requests:
        acquired = service.acquire(keys, wait_s=10.0)
        for block in acquired.blocks:
            hits[block.tier] += 1
        service.release(acquired.lease_id)
        put_all(service, keys[len(acquired.blocks) :], b"x")
        if service.tiers.num_waiting > 16:
            service.tiers.finish()
    return hits


@pytest.mark.parametrize("capacity", [2_000, 20_000])
def test_one_tier_hits_as_often_as_the_ideal(requests, capacity):
    service = KVService(KVServiceConfig(capacity * SLOT, slab_bytes=100 * SLOT))
    num_blocks = sum(map(len, requests))
    found = sum(store_hits(service, requests).values())
    ideal = ideal_hits(map(Use, requests), capacity)
    print(f"{capacity} records: {found / num_blocks:.3%} of {num_blocks} blocks hit, ideal {ideal / num_blocks:.3%}")
    assert abs(found - ideal) / num_blocks < 0.005
    service.check_integrity()
    assert service.close()


def test_two_tiers_hit_as_often_as_one_of_the_larger_ones_size(requests, tmp_path):
    requests = requests[:1500]
    cpu, ssd_bytes = 500, 4000 * SLOT
    config = KVServiceConfig(
        cpu * SLOT,
        tmp_path,
        ssd_bytes,
        slab_bytes=100 * SLOT,
        segment_bytes=500 * SLOT,
        ssd_after_hits=0,
    )
    service = KVService(config)
    num_blocks = sum(map(len, requests))
    hits = store_hits(service, requests)
    on_ssd = (ssd_bytes - index_bytes_for(ssd_bytes)) // SLOT
    ideal = ideal_hits(map(Use, requests), on_ssd)
    dropped = service.counters["demotions_dropped"] + service.counters["demotions_late"]
    print(f"{hits} of {num_blocks}, ideal {ideal} with {on_ssd} records, {dropped} copies to SSD not made")
    assert hits[Tier.SSD] > 0
    assert abs(sum(hits.values()) - ideal) / num_blocks < 0.005
    assert service.close()
