"""How pages of a cache get to records of the KV store and back: what a copier does, and the CPU's.

All copiers go by staging slots, so that copies of one slot can run while another's bytes are verified, and so that a
page never holds what was not verified. Knows nothing of moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.client_leases import ReadLease, WriteLease
from worker.kv_cache import KVCache


class PageCopier(Protocol):
    """Copies pages through staging slots. Used by one thread.

    A load is fetch, num_whole, scatter; a save is send, seal. Up to num_slots of either may be under way, each in a
    slot of its own and for whatever lease. What was begun with a slot and is not gone on with is to be dropped.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: a record's payload."""

    @property
    def num_slots(self) -> int:
        """Staging slots."""

    @property
    def slot_pages(self) -> int:
        """Pages that a slot holds."""

    def fetch(self, slot: int, lease: ReadLease, numbers: Sequence[int]) -> None:
        """Begin to bring these records to a slot, once what was scattered from it before has been."""

    def num_whole(self, slot: int) -> int:
        """Wait for what was fetched: how many leading records are the ones asked for, and unharmed in the slot.

        From now on nothing touches the lease's memory for this slot.
        """

    def scatter(self, slot: int, pages: Sequence[int]) -> None:
        """Begin to write the slot's leading records to these pages. The slot may be filled anew at once."""

    def send(self, slot: int, pages: Sequence[int], lease: WriteLease, numbers: Sequence[int]) -> None:
        """Begin to bring these pages to the records that the lease has room for under these numbers."""

    def seal(self, slot: int) -> bool:
        """Wait for what was sent and make whole records of it; False if the lease is over. Else as num_whole()."""

    def drop(self, slot: int) -> None:
        """Wait for what was fetched or sent, if anything was, unjudged. Nothing touches a lease's memory any more."""

    def settle(self) -> None:
        """Wait for all that was scattered: from now on the pages can be read."""

    def close(self) -> None:
        """Give back what was taken. Nothing is under way."""


class CpuPageCopier:
    """Plain memory copies, each done when the call returns.

    By numpy: torch's copies would share its threads with the model, and wait for them where CPUs are busy.
    """

    def __init__(self, cache: KVCache, slot_pages: int = 1, num_slots: int = 1) -> None:
        self.page_bytes = cache.shape.elements_per_page * cache.layers[0].element_size()
        self.slot_pages, self.num_slots = slot_pages, num_slots
        self._layers = [layer.view(torch.uint8).view(2, cache.shape.num_pages, -1).numpy() for layer in cache.layers]
        self._staging = np.empty((num_slots, slot_pages, self.page_bytes), np.uint8)
        self._num_whole = [0] * num_slots
        self._is_sealed = [False] * num_slots

    def fetch(self, slot: int, lease: ReadLease, numbers: Sequence[int]) -> None:
        """As in PageCopier."""
        self._num_whole[slot] = 0
        for record, number in zip(self._staging[slot], numbers):
            if not lease.copy(number, record.data):
                break
            self._num_whole[slot] += 1

    def num_whole(self, slot: int) -> int:
        """As in PageCopier."""
        return self._num_whole[slot]

    def scatter(self, slot: int, pages: Sequence[int]) -> None:
        """As in PageCopier."""
        for record, page in zip(self._staging[slot], pages):
            for layer, part in zip(self._layers, self._by_layer(record)):
                layer[:, page] = part

    def send(self, slot: int, pages: Sequence[int], lease: WriteLease, numbers: Sequence[int]) -> None:
        """As in PageCopier."""
        for record, page in zip(self._staging[slot], pages):
            for layer, part in zip(self._layers, self._by_layer(record)):
                part[:] = layer[:, page]
        written = (lease.write(number, record.data) for record, number in zip(self._staging[slot], numbers))
        self._is_sealed[slot] = all(written)

    def seal(self, slot: int) -> bool:
        """As in PageCopier."""
        return self._is_sealed[slot]

    def drop(self, slot: int) -> None:
        """As in PageCopier."""

    def settle(self) -> None:
        """As in PageCopier."""

    def close(self) -> None:
        """As in PageCopier."""

    def _by_layer(self, record: np.ndarray) -> np.ndarray:
        """A record's bytes as [layers, K and V, bytes]."""
        return record.reshape(len(self._layers), 2, -1)
