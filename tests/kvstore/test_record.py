"""A record that is not whole, or another's, is told as such by its bytes alone."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import MAX_KEY_BYTES, InvalidCallError, checked_key
from kvstore.record import HEADER_BYTES, SLOT_ALIGNMENT, is_whole, payload_of, read_header, seal, slot_bytes_for

KEYS = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
PAYLOADS = st.binary(min_size=1, max_size=600)


def record(key: bytes, payload: bytes) -> bytearray:
    slot = bytearray(os.urandom(slot_bytes_for(len(payload))))
    payload_of(memoryview(slot), len(payload))[:] = payload
    seal(memoryview(slot), key, len(payload))
    return slot


@given(KEYS, PAYLOADS)
def test_what_was_sealed_is_whole(key, payload):
    slot = record(key, payload)
    assert is_whole(memoryview(slot), key, len(payload))
    header = read_header(bytes(slot))
    assert (header.key, header.payload_bytes) == (key, len(payload))
    assert payload_of(memoryview(slot), len(payload)) == payload
    assert len(slot) % SLOT_ALIGNMENT == 0


@given(KEYS, PAYLOADS, st.data())
def test_any_flipped_bit_that_counts_is_found(key, payload, data):
    slot = record(key, payload)
    used = [*range(40 + len(key)), *range(HEADER_BYTES, HEADER_BYTES + len(payload))]  # the rest is padding
    place, bit = data.draw(st.sampled_from(used)), data.draw(st.integers(0, 7))
    slot[place] ^= 1 << bit
    assert not is_whole(memoryview(slot), key, len(payload))


@given(KEYS, KEYS, PAYLOADS)
def test_another_keys_record_is_not_taken(key, other, payload):
    assert is_whole(memoryview(record(other, payload)), key, len(payload)) == (key == other)


@given(KEYS, PAYLOADS, st.integers(0, 300))
def test_a_cut_off_record_is_not_taken(key, payload, keep):
    slot = record(key, payload)[: min(keep, HEADER_BYTES + len(payload) - 1)]
    assert not is_whole(memoryview(slot), key, len(payload))


@pytest.mark.parametrize("raw", [b"", b"x" * (MAX_KEY_BYTES + 1)])
def test_keys_of_impossible_sizes_are_refused(raw):
    with pytest.raises(InvalidCallError, match="1 to 128"):
        checked_key(raw)
