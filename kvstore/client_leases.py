"""What a client holds after it was let into the arena: records to read, or room to write.

Both end by themselves at the store; until then they are to be released, best by `with`. Knows nothing of calls but
what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from xxhash import xxh3_64_intdigest

from kvstore.keys import NOT_NEEDED, KVBlock, KVKey
from kvstore.record import HEADER_BYTES, payload_of, read_header, seal, slot_bytes_for


@dataclass(frozen=True, slots=True)
class Arrival:
    """A lease as it came."""

    arena: memoryview  # all of it
    lease_id: int
    deadline: float  # by `clock`: reckoned from before it was asked for, so never later than the store's own
    clock: Callable[[], float]
    release: Callable[[int], None]

    @property
    def is_over(self) -> bool:
        """Whether the store may have given the bytes to others."""
        return self.clock() >= self.deadline

    def slot(self, offset: int, payload_bytes: int) -> memoryview:
        """The bytes of a slot."""
        return self.arena[offset : offset + slot_bytes_for(payload_bytes)]


class _Lease:
    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._released = False

    @property
    def is_over(self) -> bool:
        """Whether the store may have given the bytes to others: what was read since it was last False is void."""
        return self._released or self._arrival.is_over

    @property
    def arena(self) -> memoryview:
        """All of the store's memory, the same object for all leases while it is mapped: to register it for DMA."""
        return self._arrival.arena

    def release(self) -> None:
        """Give it back, without waiting. Idempotent."""
        if not self._released:
            self._released = True
            self._arrival.release(self._arrival.lease_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class ReadLease(_Lease):
    """The leading records of a get; `blocks` says how many and how large."""

    def __init__(
        self, arrival: Arrival, blocks: tuple[KVBlock, ...], on_corrupt: Callable[[KVKey, bool], None]
    ) -> None:
        super().__init__(arrival)
        self.blocks = blocks
        self._on_corrupt = on_corrupt

    def copy(self, number: int, into: memoryview) -> bool:
        """Copy a record's payload out and verify the copy; False if it is not the record, or not of that size."""
        block = self.blocks[number]
        if block.payload_bytes != into.nbytes:
            self.reject(number)
            return False
        checksum = self.checksum(number)
        if checksum is None:
            return False
        into[:] = self.view(number)
        if xxh3_64_intdigest(into) != checksum:
            self.reject(number)
            return False
        return True

    def view(self, number: int) -> memoryview:
        """A record's payload in the arena, for copy engines. The copy is to be trusted only if it has `checksum`."""
        block = self.blocks[number]
        return payload_of(self._arrival.slot(block.offset, block.payload_bytes), block.payload_bytes)

    def payload_offset(self, number: int) -> int:
        """Where view() begins in the arena."""
        return self.blocks[number].offset + HEADER_BYTES

    def checksum(self, number: int) -> int | None:
        """What the payload's checksum must be (XXH3, 64 bits); None, and reported, if this is not the record asked for.

        Whatever lies there later: a copy that has this checksum is the payload that belongs to the key.
        """
        block = self.blocks[number]
        header = read_header(self._arrival.slot(block.offset, block.payload_bytes))
        if header is not None and header.key == block.key and header.payload_bytes == block.payload_bytes:
            return header.checksum
        self.reject(number)
        return None

    def reject(self, number: int) -> None:
        """Report a record whose copy is not whole."""
        self._on_corrupt(self.blocks[number].key, self.is_over)


class WriteLease(_Lease):
    """Room for records. Write or fill and seal them, then commit."""

    def __init__(
        self,
        arrival: Arrival,
        keys: tuple[KVKey, ...],
        offsets: tuple[int, ...],
        payload_bytes: int,
        commit: Callable[[int], int],
    ) -> None:
        super().__init__(arrival)
        self._keys = keys
        self._offsets = offsets
        self._payload_bytes = payload_bytes
        self._commit = commit
        self.wanted = tuple(number for number, offset in enumerate(offsets) if offset >= 0)  # keys that have room

    @property
    def num_placed(self) -> int:
        """Leading keys that have room here, or are there already."""
        refused = (number for number, offset in enumerate(self._offsets) if offset < 0 and offset != NOT_NEEDED)
        return next(refused, len(self._offsets))

    def write(self, number: int, payload: bytes | memoryview) -> bool:
        """Copy a payload in and seal it; False if the lease is over."""
        room = self.view(number)
        if room is None:
            return False
        room[:] = payload
        return self.seal(number)

    def view(self, number: int) -> memoryview | None:
        """Where the payload of key `number` (one of `wanted`) goes; None if the lease is over."""
        if self.is_over:
            return None
        return payload_of(self._slot(number), self._payload_bytes)

    def payload_offset(self, number: int) -> int | None:
        """Where view() begins in the arena; None if the lease is over."""
        return None if self.is_over else self._offsets[number] + HEADER_BYTES

    def seal(self, number: int, checksum: int | None = None) -> bool:
        """Put the header over the payload, which is complete; False if the lease is over.

        checksum: the payload's (XXH3, 64 bits), where it is known already.
        """
        if self.is_over:
            return False
        seal(self._slot(number), self._keys[number], self._payload_bytes, checksum)
        return True

    def commit(self) -> int:
        """Make the sealed records visible and end the lease; how many were new."""
        if self.is_over:
            return 0
        self._released = True
        return self._commit(self._arrival.lease_id)

    def _slot(self, number: int) -> memoryview:
        assert self._offsets[number] >= 0, "this key has no room: see `wanted`"
        return self._arrival.slot(self._offsets[number], self._payload_bytes)


assert HEADER_BYTES % 64 == 0, "payloads start on a cache line"
