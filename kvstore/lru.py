"""Least recently used order over keys, with pins. Pure and small, all operations O(1).

A key is told by its handle, a small integer that stays its own until it is removed. Links and pins lie in flat
arrays by handle. A pinned key is out of the order, so that looking for a victim never walks over pinned ones; it
comes back as the most recently used when its last pin goes. A held key keeps its place in the order and is passed
over; holds are for the few that background work reads. Knows nothing of sizes, places or leases.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_END = 0  # the handle of the list's both ends: its next is the oldest, its previous the newest


class Lru:
    """Keys from the least to the most recently used."""

    def __init__(self) -> None:
        self._handles: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""]
        self._next = array("i", [_END])  # towards newer ones; of a free handle: the next free one
        self._previous = array("i", [_END])
        self._pins = array("i", [0])
        self._free = _END  # the first free handle
        self._held: set[int] = set()  # as many as there are background threads, at most

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, key: bytes) -> int | None:
        """The key's handle. Its place in the order stays."""
        return self._handles.get(key)

    def key_of(self, handle: int) -> bytes:
        """The key of a handle that has not been removed."""
        return self._keys[handle]

    def keys_oldest_first(self) -> list[bytes]:
        """All keys that can be found: unpinned ones by their order, then the pinned."""
        ordered = [self._keys[handle] for handle in self.oldest_first() if self._is_known(handle)]
        return list(dict.fromkeys([*ordered, *self._handles]))

    def insert(self, key: bytes) -> int:
        """Add a key, not there yet, as the most recently used."""
        assert key not in self._handles
        handle = self._free
        if handle == _END:
            handle = len(self._keys)
            self._keys.append(key)
            self._next.append(_END)
            self._previous.append(_END)
            self._pins.append(0)
        else:
            self._free = self._next[handle]
            self._keys[handle] = key
        self._handles[key] = handle
        self._link_newest(handle)
        return handle

    def touch(self, handle: int) -> None:
        """Make it the most recently used; a pinned one will be when its last pin goes."""
        if not self._pins[handle]:
            self._unlink(handle)
            self._link_newest(handle)

    def pin(self, handle: int) -> None:
        """Keep it from being a victim until as many unpins have come."""
        if not self._pins[handle]:
            self._unlink(handle)
        self._pins[handle] += 1

    def unpin(self, handle: int) -> None:
        """Take one pin away; without any it is the most recently used."""
        assert self._pins[handle] > 0
        self._pins[handle] -= 1
        if not self._pins[handle]:
            self._link_newest(handle)

    def hold(self, handle: int) -> bool:
        """Keep it from being a victim until `unhold`, its place in the order as it is. False if it is held already."""
        if handle in self._held:
            return False
        self._held.add(handle)
        return True

    def unhold(self, handle: int) -> None:
        """End a hold."""
        self._held.remove(handle)

    def is_free(self, handle: int) -> bool:
        """Whether nothing keeps it from being removed."""
        return not self._pins[handle] and handle not in self._held

    def remove(self, handle: int) -> None:
        """Take a key out that has neither pins nor a hold; its handle will be another's."""
        assert self.is_free(handle)
        self.forget(handle)
        self._unlink(handle)
        self._keys[handle] = b""
        self._next[handle] = self._free
        self._free = handle

    def forget(self, handle: int) -> None:
        """Let the key be found no more, and be inserted anew, while the handle lives on until `remove`."""
        if self._is_known(handle):
            del self._handles[self._keys[handle]]

    def oldest_first(self) -> Iterator[int]:
        """Handles neither pinned nor held, least recently used first. Do not go on with it after a change."""
        handle = self._next[_END]
        while handle != _END:
            if handle not in self._held:
                yield handle
            handle = self._next[handle]

    def check_integrity(self) -> None:
        """Raise AssertionError if keys, order and pins do not agree."""
        ordered: list[int] = []
        handle = self._next[_END]
        while handle != _END and len(ordered) < len(self._keys):
            ordered.append(handle)
            assert self._previous[self._next[handle]] == handle
            assert not self._pins[handle]
            handle = self._next[handle]
        assert handle == _END, "the order runs in a circle"
        in_order = set(ordered)
        for key, handle in self._handles.items():
            assert self._keys[handle] == key
            assert (handle in in_order) == (not self._pins[handle])

    def _is_known(self, handle: int) -> bool:
        return self._handles.get(self._keys[handle]) == handle

    def _link_newest(self, handle: int) -> None:
        newest = self._previous[_END]
        self._previous[handle], self._next[handle] = newest, _END
        self._next[newest] = self._previous[_END] = handle

    def _unlink(self, handle: int) -> None:
        before, after = self._previous[handle], self._next[handle]
        self._next[before], self._previous[after] = after, before
