"""What crosses the store's border: keys, tiers, and where a record lies.

A key is opaque: whoever makes it has put in everything that its bytes depend on (tokens, model, layout, rank).
Knows nothing of tokens, models or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

MAX_KEY_BYTES = 128
MAX_KEYS_PER_CALL = 16384

# Instead of a slot's offset, for one of the keys that room was asked for. They go over the wire.
NOT_NEEDED = -1  # the key is there, or being written
NO_ROOM = -2  # larger than a slab, or everything is in use

KVKey = NewType("KVKey", bytes)  # 1 to MAX_KEY_BYTES bytes, compared in full


class StoreError(Exception):
    """A store that cannot be set up as asked: the message says what is wrong, where, and how to mend it."""


class InvalidCallError(ValueError):
    """A call whose arguments can never be right: a key too long, a size below one."""


class Tier(IntEnum):
    """Where a record was found. The values go over the wire."""

    NONE = 0  # a miss
    CPU = 1
    SSD = 2


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One record in the arena, as a lease names it."""

    key: KVKey
    offset: int  # bytes from the arena's start to the record's slot: its header, then its payload
    payload_bytes: int
    tier: Tier  # which tier it came from; it lies in the arena by now


def checked_key(raw: bytes) -> KVKey:
    """The bytes as a key. Raises InvalidCallError if they are empty or too many."""
    if not 1 <= len(raw) <= MAX_KEY_BYTES:
        raise InvalidCallError(f"key of {len(raw)} bytes: 1 to {MAX_KEY_BYTES} are allowed")
    return KVKey(raw)


def checked_keys(raws: Iterable[bytes]) -> list[KVKey]:
    """All of them as keys. Raises InvalidCallError."""
    return [checked_key(raw) for raw in raws]
