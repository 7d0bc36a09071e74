"""Sizes that follow from sizes."""

from __future__ import annotations

import pytest

from kvstore.keys import StoreError
from kvstore.settings import KVServiceConfig


@pytest.mark.parametrize(
    ("cpu_bytes", "wanted", "slab"),
    [
        (64 << 30, None, 1 << 30),
        (4 << 30, None, 64 << 20),
        (256 << 20, None, 16 << 20),
        (1 << 20, None, 128 << 10),
        (1 << 20, 100_000, 98_304),
        (1 << 20, 1 << 30, 1 << 20),
    ],
)
def test_slabs_are_parts_of_the_arena_and_whole_pages(cpu_bytes, wanted, slab):
    assert KVServiceConfig(cpu_bytes, slab_bytes=wanted).slab() == slab


@pytest.mark.parametrize(("ssd_bytes", "segment"), [(1 << 40, 256 << 20), (1 << 30, 16 << 20), (2 << 20, 256 << 10)])
def test_segments_are_parts_of_the_budget(tmp_path, ssd_bytes, segment):
    assert KVServiceConfig(1 << 20, tmp_path, ssd_bytes).segment() == segment


def test_budgets_too_small_for_anything_are_refused(tmp_path):
    with pytest.raises(StoreError, match="cpu-bytes is 1000: at least 65536"):
        KVServiceConfig(1000).check()
    with pytest.raises(StoreError, match="ssd-bytes is 1000: at least 1048576"):
        KVServiceConfig(1 << 20, tmp_path, 1000).check()
