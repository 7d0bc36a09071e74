"""Copies KV pages between a GPU's cache and the store: a kernel and one large transfer for each staging slot.

A load: copy engine from the store's registered memory to a slot; a kernel computes the checksums of what has come; if
they are those of the records' headers, another kernel scatters it. A save: a kernel gathers to a slot, the copy engine
takes it away, while a kernel computes the checksums that go into the headers. So the host reads no payload, which it
could not do at a link's rate, and what the transfer itself did wrong is noticed. Transfers, checksums and moves have a
stream each, of their own, so that a slot's transfer overlaps with the kernels of others; events order what touches the
same slot. A slot's records lie as far apart as the store's, so that blocks side by side go in one transfer, what lies
between them included.

Only the mover's thread waits, and only for its own events. Graphs are captured before the first move. Knows nothing
of moves or iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.client_leases import ReadLease, WriteLease
from kvstore.record import slot_bytes_for
from worker.dma_memory import DmaMemory, DmaRegion, adjacent
from worker.kernels.page_copy import MAX_PAGES
from worker.kv_cache import KVCache

_SLOT_BYTES = 32 << 20  # a transfer that takes a link's full rate, and of which a few fit anywhere
_NUM_SLOTS = 5  # one is filled, one verified, one emptied, and two wait while Python is late


def take_staging(page_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory for slots: uint8 [loads and saves, slots, pages, bytes from record to record]."""
    slot_pages = max(1, min(MAX_PAGES, _SLOT_BYTES // page_bytes))
    return torch.zeros(2, _NUM_SLOTS, slot_pages, slot_bytes_for(page_bytes), dtype=torch.uint8, device=device)


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """As torch.cuda.Stream."""

    def wait_event(self, event: Any) -> None: ...


class Dma(Protocol):
    """What is needed of worker.cuda_dma.CudaDma. Copies and kernels are queued on a stream."""

    @property
    def memory(self) -> DmaMemory: ...

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def copy_in(self, target: int, source: int, num_bytes: int, stream: Any) -> None: ...

    def copy_out(self, target: int, source: int, num_bytes: int, stream: Any) -> None: ...

    def close(self) -> None: ...


class Kernels(Protocol):
    """What is needed of worker.kernels.page_copy.PageCopyKernels."""

    def gather(self, pages: torch.Tensor, records: torch.Tensor, stream: Any) -> None: ...

    def scatter(self, pages: torch.Tensor, records: torch.Tensor, stream: Any) -> None: ...

    def checksum(self, records: torch.Tensor, num_bytes: int, checksums: torch.Tensor, stream: Any) -> None: ...


@dataclass(slots=True)
class _Slot:
    records: torch.Tensor  # uint8 [pages, bytes from record to record], on the device
    pages: torch.Tensor  # int32 [pages], pinned: the kernel reads it there
    copied: Event  # the transfer has ended; the host waits for it
    moved: Event  # gather or scatter has ended
    checksums: torch.Tensor  # int64 [pages], pinned: the kernel writes it there, the host reads it
    checked: Event  # they are there; the host waits for it
    bounce: torch.Tensor | None = None  # pinned, like records: where the store's memory is not registered
    lease: ReadLease | WriteLease | None = None  # until it is over with what was begun
    region: DmaRegion | None = None  # of the lease's arena, for as long
    numbers: Sequence[int] = ()
    expected: Sequence[int] = ()  # checksums by the headers, of the leading numbers that have right ones
    bounced: Sequence[int] = ()  # of numbers, those whose bytes wait in `bounce`


class CudaPageCopier:
    """Copies one direction's pages. As in worker.page_copy.PageCopier."""

    def __init__(self, cache: KVCache, staging: torch.Tensor, kernels: Kernels, dma: Dma) -> None:
        """staging: one direction's part of take_staging()."""
        self.page_bytes = cache.shape.elements_per_page * cache.layers[0].element_size()
        self.num_slots, self.slot_pages, self._stride = staging.shape
        assert self._stride == slot_bytes_for(self.page_bytes), "staging for pages of another size"
        self._kernels, self._dma = kernels, dma
        self._moves, self._copies, self._checks = (dma.stream() for _ in range(3))
        self._slots = [self._slot(records) for records in staging]
        self._scattered: Event | None = None  # what was scattered last has ended, and all before it

    def fetch(self, slot: int, lease: ReadLease, numbers: Sequence[int]) -> None:
        """As in PageCopier. Records that are not of a page's size are as good as not there."""
        part = self._take(slot, lease)
        part.expected = self._expected(lease, numbers)
        part.numbers = numbers[: len(part.expected)]
        offsets = [lease.payload_offset(number) for number in part.numbers]
        self._copies.wait_event(part.moved)
        try:
            for run, addresses in self._transfers(part, offsets):
                if addresses is None:
                    self._fill_bounce(part, run, lease)
                    addresses = self._bounce_range(part, run)
                target = self._address(part.records, run)
                for address, num_bytes in addresses:
                    self._dma.copy_in(target, address, num_bytes, self._copies)
                    target += num_bytes
        finally:
            part.copied.record(self._copies)  # of those that were queued, too, when one could not be
        self._checksum(part, part.copied)

    def num_whole(self, slot: int) -> int:
        """As in PageCopier. What was copied is judged, so that it does not matter whether the lease is over."""
        part, lease = self._slots[slot], self._slots[slot].lease
        assert isinstance(lease, ReadLease), "fetch() comes first"
        part.checked.synchronize()
        self._let_go(part)
        found = self._checksums_of(part)
        wrong = next((place for place, expected in enumerate(part.expected) if found[place] != expected), None)
        if wrong is None:
            return len(part.expected)
        lease.reject(part.numbers[wrong])
        return wrong

    def scatter(self, slot: int, pages: Sequence[int]) -> None:
        """As in PageCopier."""
        part = self._slots[slot]
        self._moves.wait_event(part.checked)
        self._kernels.scatter(self._page_numbers(part, pages), part.records, self._moves)
        part.moved.record(self._moves)
        self._scattered = part.moved

    def send(self, slot: int, pages: Sequence[int], lease: WriteLease, numbers: Sequence[int]) -> None:
        """As in PageCopier."""
        part = self._take(slot, lease)
        part.numbers, part.bounced = numbers, ()
        offsets = [offset for number in numbers if (offset := lease.payload_offset(number)) is not None]
        if len(offsets) < len(numbers):  # the lease is over: seal() will say so
            return
        self._moves.wait_event(part.copied)
        self._kernels.gather(self._page_numbers(part, pages), part.records, self._moves)
        part.moved.record(self._moves)
        self._checksum(part, part.moved)
        self._copies.wait_event(part.moved)
        try:
            for run, addresses in self._transfers(part, offsets):
                if addresses is None:
                    part.bounced = [*part.bounced, *run]
                    addresses = self._bounce_range(part, run)
                source = self._address(part.records, run)
                for address, num_bytes in addresses:
                    self._dma.copy_out(address, source, num_bytes, self._copies)
                    source += num_bytes
        finally:
            part.copied.record(self._copies)

    def seal(self, slot: int) -> bool:
        """As in PageCopier."""
        part, lease = self._slots[slot], self._slots[slot].lease
        assert isinstance(lease, WriteLease), "send() comes first"
        part.copied.synchronize()
        for place in part.bounced:
            room = lease.view(part.numbers[place])
            if room is None:
                return False
            assert part.bounce is not None
            np.copyto(np.frombuffer(room, np.uint8), part.bounce[place, : self.page_bytes].numpy())
        part.checked.synchronize()
        self._let_go(part)
        return all(map(lease.seal, part.numbers, self._checksums_of(part)))

    def drop(self, slot: int) -> None:
        """As in PageCopier."""
        part = self._slots[slot]
        try:
            for event in (part.moved, part.copied, part.checked):
                event.synchronize()
        finally:
            self._let_go(part)

    def settle(self) -> None:
        """As in PageCopier."""
        if self._scattered is not None:
            self._scattered.synchronize()

    def close(self) -> None:
        """As in PageCopier."""
        self._dma.close()

    def _slot(self, records: torch.Tensor) -> _Slot:
        pinned, event = self._dma.pinned, self._dma.event
        size = [self.slot_pages]
        return _Slot(records, pinned(size, torch.int32), event(), event(), pinned(size, torch.int64), event())

    def _take(self, slot: int, lease: ReadLease | WriteLease) -> _Slot:
        """The slot, with what is needed of the store for as long as something is under way."""
        part = self._slots[slot]
        assert part.region is None, "what was begun with a slot is gone on with, or dropped"
        part.lease, part.region = lease, self._dma.memory.lend(lease.arena)
        return part

    def _let_go(self, part: _Slot) -> None:
        """Nothing touches the arena for this slot any more."""
        region, part.lease, part.region = part.region, None, None
        if region is not None:
            self._dma.memory.give_back(region)

    def _expected(self, lease: ReadLease, numbers: Sequence[int]) -> list[int]:
        """Checksums that the headers give, up to the first record that is not the one asked for or not a page."""
        expected = []
        for number in numbers:
            is_page = lease.blocks[number].payload_bytes == self.page_bytes
            checksum = lease.checksum(number) if is_page else None
            if checksum is None:
                break
            expected.append(checksum)
        return expected

    def _checksum(self, part: _Slot, ready: Event) -> None:
        """Begin to compute the checksums of what lies in the slot once `ready` has passed."""
        self._checks.wait_event(ready)
        self._kernels.checksum(part.records[: len(part.numbers)], self.page_bytes, part.checksums, self._checks)
        part.checked.record(self._checks)

    def _checksums_of(self, part: _Slot) -> list[int]:
        """Those that have been computed."""
        checksums: list[int] = part.checksums.numpy().view(np.uint64)[: len(part.numbers)].tolist()
        return checksums

    def _address(self, records: torch.Tensor, run: range) -> int:
        """Of the first of these records of a slot."""
        return records.data_ptr() + run.start * self._stride

    def _transfers(self, part: _Slot, offsets: Sequence[int]) -> list[tuple[range, list[tuple[int, int]] | None]]:
        """Records side by side, with the registered ranges that they lie in; None where they cannot be registered."""
        assert part.region is not None, "_take() comes first"
        pieces = part.region.pieces
        return [(run, pieces(offsets[run.start], self._range_bytes(run))) for run in adjacent(offsets, self._stride)]

    def _range_bytes(self, run: range) -> int:
        """From the first of these records' first byte to the last one's last."""
        return (len(run) - 1) * self._stride + self.page_bytes

    def _page_numbers(self, part: _Slot, pages: Sequence[int]) -> torch.Tensor:
        numbers = part.pages[: len(pages)]
        numbers.numpy()[:] = pages
        return numbers

    def _bounce_range(self, part: _Slot, run: range) -> list[tuple[int, int]]:
        if part.bounce is None:
            part.bounce = self._dma.pinned(part.records.shape, torch.uint8)
        return [(self._address(part.bounce, run), self._range_bytes(run))]

    def _fill_bounce(self, part: _Slot, run: range, lease: ReadLease) -> None:
        """Copy records into pinned memory, as soon as what was in it has left."""
        self._bounce_range(part, run)
        assert part.bounce is not None
        part.copied.synchronize()
        for place in run:
            view = lease.view(part.numbers[place])
            np.copyto(part.bounce[place, : self.page_bytes].numpy(), np.frombuffer(view, np.uint8))
