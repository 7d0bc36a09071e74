"""Puts and gets on a KVService in this process, as a client does them through the arena; and what they depend on."""

from __future__ import annotations

from kvstore.keys import Tier
from kvstore.overlapped import Overlapped
from kvstore.record import is_whole, payload_of, seal, slot_bytes_for
from kvstore.service import KVService


class Clock:
    """Time that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fill(service: KVService, key: bytes, offset: int, payload: bytes) -> None:
    """Write and seal one reserved record."""
    slot = service.arena.slot(offset, slot_bytes_for(len(payload)))
    payload_of(slot, len(payload))[:] = payload
    seal(slot, key, len(payload))


def put(service: KVService, key: bytes, payload: bytes) -> bool:
    """A whole put; whether it became visible."""
    reserved = service.reserve([key], len(payload))
    if reserved.offsets[0] < 0:
        return False
    fill(service, key, reserved.offsets[0], payload)
    return service.commit(reserved.lease_id) == 1


def put_all(service: KVService, keys: list[bytes], payload: bytes) -> None:
    """Equal records for several keys, in one call."""
    reserved = service.reserve(keys, len(payload))
    for key, offset in zip(keys, reserved.offsets):
        if offset >= 0:
            fill(service, key, offset, payload)
    service.commit(reserved.lease_id)


def get(service: KVService, key: bytes, wait_s: float = 5.0) -> tuple[bytes, Tier] | None:
    """A whole get, with the tier; what is not whole is an error of the test."""
    acquired = service.acquire([key], wait_s)
    if not acquired.blocks:
        return None
    block = acquired.blocks[0]
    slot = service.arena.slot(block.offset, slot_bytes_for(block.payload_bytes))
    assert is_whole(slot, key, block.payload_bytes)
    found = bytes(payload_of(slot, block.payload_bytes))
    service.release(acquired.lease_id)
    return found, block.tier


def can_overlap() -> bool:
    """Whether the kernel lets reads overlap; some containers' rules do not."""
    try:
        Overlapped(1).close()
    except OSError:
        return False
    return True
