"""The one format of a record, the same bytes in memory and on disk: a header with the full key, then the payload.

Both have checksums (XXH3, 64 bits), so whoever reads can tell by the record alone whether it is whole and the one
that was asked for, whatever an index or a service said. Slots are multiples of 4 KiB, as direct disk I/O wants
them. Knows nothing of where slots come from.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvstore.keys import MAX_KEY_BYTES

HEADER_BYTES = 256
SLOT_ALIGNMENT = 4096

_MAGIC = b"NFKVREC1"  # the last character is the format's version
_FIELDS = struct.Struct("<8sHxxxxxxQQ")  # magic, key length, payload bytes, payload checksum
_CHECKSUM = struct.Struct("<Q")  # of the fields and the key
_KEY_START = _FIELDS.size + _CHECKSUM.size
assert _KEY_START + MAX_KEY_BYTES <= HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, its checksum verified."""

    key: bytes
    payload_bytes: int
    checksum: int  # of the payload


def slot_bytes_for(payload_bytes: int) -> int:
    """Bytes of the slot that holds a payload: header and payload, rounded up."""
    return -(-(HEADER_BYTES + payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def payload_of(slot: memoryview, payload_bytes: int) -> memoryview:
    """The part of a slot that holds the payload."""
    return slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(slot: memoryview, key: bytes, payload_bytes: int, checksum: int | None = None) -> None:
    """Write the header over a payload that lies in the slot already; its checksum, if not given, is computed."""
    if checksum is None:
        checksum = xxh3_64_intdigest(payload_of(slot, payload_bytes))
    write_header(slot, Header(key, payload_bytes, checksum))


def write_header(slot: memoryview, header: Header) -> None:
    """Write a header; the key's room is filled up with zeros."""
    fields = _FIELDS.pack(_MAGIC, len(header.key), header.payload_bytes, header.checksum)
    packed = fields + _CHECKSUM.pack(xxh3_64_intdigest(fields + header.key)) + header.key
    slot[:HEADER_BYTES] = packed.ljust(HEADER_BYTES, b"\0")


def read_header(slot: memoryview | bytes) -> Header | None:
    """The slot's header; None if there is no valid one."""
    raw = bytes(slot[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        return None
    magic, key_len, payload_bytes, checksum = _FIELDS.unpack_from(raw)
    key = raw[_KEY_START : _KEY_START + key_len]
    if magic != _MAGIC or key_len > MAX_KEY_BYTES:
        return None
    if xxh3_64_intdigest(raw[: _FIELDS.size] + key) != _CHECKSUM.unpack_from(raw, _FIELDS.size)[0]:
        return None
    return Header(key, payload_bytes, checksum)


def is_whole(slot: memoryview, key: bytes, payload_bytes: int) -> bool:
    """Whether the slot holds exactly this key's record, header and payload both unharmed."""
    header = read_header(slot)
    if header is None or header.key != key or header.payload_bytes != payload_bytes:
        return False
    return xxh3_64_intdigest(payload_of(slot, payload_bytes)) == header.checksum
