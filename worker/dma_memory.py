"""The KV store's shared memory, registered for DMA piece by piece, so that copy engines reach it at the link's rate.

A piece is registered when it is first used, or ahead for a whole arena at start; it takes milliseconds, so that no
launch of others waits long for the driver. What is registered is kept mapped: copy engines go on writing to the old
memory where a mapping changes under them. When a restarted store brings a new arena, the old one is given up as soon
as nobody uses it. Knows nothing of CUDA but the two functions that it is given. Safe for threads.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20


def address_of(memory: memoryview) -> int:
    """Where its first byte lies in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if memory.nbytes else 0


class DmaRegion:
    """One arena. To be used between DmaMemory.lend() and give_back()."""

    def __init__(
        self, arena: memoryview, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        self.arena = arena
        self.num_users = 0
        self.is_gone = False  # its store has ended
        self._register, self._unregister = register, unregister
        self._first, self._num_bytes = address_of(arena), arena.nbytes
        self._registered: set[int] = set()  # pieces, by number
        self._is_refused = False
        self._lock = threading.Lock()

    def pieces(self, start: int, num_bytes: int) -> list[tuple[int, int]] | None:
        """The range that begins at this byte of the arena, as (address, bytes), each within one registered piece.

        None where it cannot be registered.
        """
        stop = start + num_bytes
        assert 0 <= start <= stop <= self._num_bytes, "not a part of the arena"
        found = []
        for number in range(start // PIECE_BYTES, -(-stop // PIECE_BYTES)):
            if not self._is_ready(number):
                return None
            low, high = max(start, number * PIECE_BYTES), min(stop, (number + 1) * PIECE_BYTES)
            found.append((self._first + low, high - low))
        return found

    def register_all(self) -> bool:
        """Register all of it; whether that was possible."""
        return self.pieces(0, self._num_bytes) is not None

    def close(self) -> None:
        """Unregister what is. No copy is under way."""
        with self._lock:
            for number in sorted(self._registered):
                try:
                    self._unregister(self._first + number * PIECE_BYTES)
                except Exception:
                    log.exception("memory of the KV store could not be unregistered")
            self._registered.clear()

    def _is_ready(self, number: int) -> bool:
        if number in self._registered:  # a piece stays registered while the region is lent
            return True
        with self._lock:
            if number in self._registered:
                return True
            if self._is_refused:
                return False
            start = number * PIECE_BYTES
            try:
                self._register(self._first + start, min(PIECE_BYTES, self._num_bytes - start))
            except Exception as error:
                self._is_refused = True
                log.warning("the KV store's memory cannot be registered for DMA (%s): pages are copied twice", error)
                return False
            self._registered.add(number)
            return True


class DmaMemory:
    """The arenas of one store client: the one that it uses now and, for a while, the one before."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """register(address, bytes) and unregister(address) raise where they cannot."""
        self._register, self._unregister = register, unregister
        self._lock = threading.Lock()
        self._regions: list[DmaRegion] = []  # the newest last
        self._gone: list[weakref.ref[memoryview]] = []  # arenas whose stores have ended, while somebody has them

    def lend(self, arena: memoryview) -> DmaRegion:
        """The region of this arena, to be given back."""
        with self._lock:
            region = next((region for region in self._regions if region.arena is arena), None)
            if region is None:
                region = DmaRegion(arena, self._register, self._unregister)
                region.is_gone = any(each() is arena for each in self._gone)
                self._regions.insert(0 if region.is_gone else len(self._regions), region)
            region.num_users += 1
            self._drop_old()
        return region

    def give_back(self, region: DmaRegion) -> None:
        """No copy of this user is under way in it."""
        with self._lock:
            region.num_users -= 1
            self._drop_old()

    def forget(self, arena: memoryview) -> None:
        """Its store is gone: give it up as soon as nobody uses it, as the store's next run needs the memory."""
        with self._lock:
            self._gone = [each for each in self._gone if each() is not None] + [weakref.ref(arena)]
            for region in self._regions:
                region.is_gone |= region.arena is arena
            self._drop_old()

    def close(self) -> None:
        """Unregister everything. Nothing is lent."""
        with self._lock:
            for region in self._regions:
                region.close()
            self._regions.clear()

    def _drop_old(self) -> None:
        for region in list(self._regions):
            if not region.num_users and (region.is_gone or region is not self._regions[-1]):
                region.close()
                self._regions.remove(region)


def adjacent(offsets: Sequence[int], stride: int) -> list[range]:
    """The places of records that lie side by side, each `stride` bytes after the one before: one transfer each."""
    firsts = [place for place, at in enumerate(offsets) if not place or at != offsets[place - 1] + stride]
    return [range(first, stop) for first, stop in zip(firsts, [*firsts[1:], len(offsets)])]
