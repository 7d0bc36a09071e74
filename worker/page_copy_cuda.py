"""Copies KV pages between a GPU's cache and the store: a kernel and one large transfer for each staging slot.

A load: copy engine from the store's registered memory to a slot; meanwhile the records are verified on the host; if
they are whole and the lease lasts, a kernel scatters them. A save: a kernel gathers to a slot, the copy engine takes
it away, the host computes checksums. Kernels and transfers have a stream each, of their own, so that transfers of
one slot overlap with kernels of another; events order what touches the same slot. A slot's records lie as far apart
as the store's, so that blocks side by side go in one transfer, what lies between them included.

Only the mover's thread waits, and only for its own events. Graphs are captured before the first move. Knows nothing
of moves or iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.client_leases import ReadLease, WriteLease
from kvstore.record import slot_bytes_for
from worker.dma_memory import DmaMemory, DmaRegion, address_of, adjacent
from worker.kernels.page_copy import MAX_PAGES
from worker.kv_cache import KVCache

_SLOT_BYTES = 32 << 20  # a transfer that takes a link's full rate, and of which a few fit anywhere
_NUM_SLOTS = 3  # one is filled while another is verified and a third is emptied


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

    def synchronize(self) -> None: ...


class Dma(Protocol):
    """What is needed of worker.cuda_dma.CudaDma. Copies and kernels are queued on a stream."""

    @property
    def memory(self) -> DmaMemory: ...

    @property
    def checks(self) -> Executor: ...

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


@dataclass(slots=True)
class _Slot:
    records: torch.Tensor  # uint8 [pages, bytes from record to record], on the device
    pages: torch.Tensor  # int32 [pages], pinned: the kernel reads it there
    copied: Event  # the transfer has ended; the host waits for it
    moved: Event  # the kernel has ended
    bounce: torch.Tensor | None = None  # pinned, like records: where the store's memory is not registered
    checks: list[Future[bool]] = field(default_factory=list)
    lease: ReadLease | WriteLease | None = None
    numbers: Sequence[int] = ()
    bounced: Sequence[int] = ()  # of numbers, those whose bytes wait in `bounce`


class CudaPageCopier:
    """Copies one direction's pages. As in worker.page_copy.PageCopier."""

    def __init__(self, cache: KVCache, staging: torch.Tensor, kernels: Kernels, dma: Dma) -> None:
        """staging: one direction's part of take_staging()."""
        self.page_bytes = cache.shape.elements_per_page * cache.layers[0].element_size()
        self.num_slots, self.slot_pages, self._stride = staging.shape
        assert self._stride == slot_bytes_for(self.page_bytes), "staging for pages of another size"
        self._kernels, self._dma = kernels, dma
        self._moves, self._copies = dma.stream(), dma.stream()
        self._slots = [
            _Slot(records, dma.pinned([self.slot_pages], torch.int32), dma.event(), dma.event()) for records in staging
        ]
        self._region: DmaRegion | None = None

    def fetch(self, slot: int, lease: ReadLease, numbers: Sequence[int]) -> None:
        """As in PageCopier. Records that are not of a page's size are as good as not there."""
        part = self._slots[slot]
        sizes = [lease.blocks[number].payload_bytes for number in numbers]
        num_right = next((place for place, size in enumerate(sizes) if size != self.page_bytes), len(sizes))
        part.lease, part.numbers = lease, numbers[:num_right]
        part.checks = [self._dma.checks.submit(lease.is_whole, number) for number in part.numbers]
        views = [lease.view(number) for number in part.numbers]
        self._copies.wait_event(part.moved)
        for run, addresses in self._transfers(lease, views):
            if addresses is None:
                self._fill_bounce(part, run, views)
                addresses = self._bounce_range(part, run)
            target = part.records[run.start].data_ptr()
            for address, num_bytes in addresses:
                self._dma.copy_in(target, address, num_bytes, self._copies)
                target += num_bytes
        part.copied.record(self._copies)

    def num_whole(self, slot: int) -> int:
        """As in PageCopier."""
        part = self._slots[slot]
        part.copied.synchronize()
        num_whole = 0
        for check in part.checks:
            if not check.result():
                break
            num_whole += 1
        # Asked last: until now the store has given the bytes to nobody else, so what was copied is what was verified.
        return 0 if part.lease is None or part.lease.is_over else num_whole

    def scatter(self, slot: int, pages: Sequence[int]) -> None:
        """As in PageCopier."""
        part = self._slots[slot]
        self._moves.wait_event(part.copied)
        self._kernels.scatter(self._page_numbers(part, pages), part.records, self._moves)
        part.moved.record(self._moves)

    def send(self, slot: int, pages: Sequence[int], lease: WriteLease, numbers: Sequence[int]) -> None:
        """As in PageCopier."""
        part = self._slots[slot]
        part.lease, part.numbers, part.bounced = lease, numbers, ()
        views = [view for number in numbers if (view := lease.view(number)) is not None]
        if len(views) < len(numbers):  # the lease is over: seal() will say so
            return
        self._moves.wait_event(part.copied)
        self._kernels.gather(self._page_numbers(part, pages), part.records, self._moves)
        part.moved.record(self._moves)
        self._copies.wait_event(part.moved)
        for run, addresses in self._transfers(lease, views):
            if addresses is None:
                part.bounced = [*part.bounced, *run]
                addresses = self._bounce_range(part, run)
            source = part.records[run.start].data_ptr()
            for address, num_bytes in addresses:
                self._dma.copy_out(address, source, num_bytes, self._copies)
                source += num_bytes
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
        part.checks = [self._dma.checks.submit(lease.seal, number) for number in part.numbers]
        return all(check.result() for check in part.checks)

    def settle(self) -> None:
        """As in PageCopier."""
        try:
            self._copies.synchronize()
            self._moves.synchronize()
            for part in self._slots:
                wait(part.checks)
                part.checks, part.lease = [], None
        finally:
            if self._region is not None:
                self._dma.memory.give_back(self._region)
                self._region = None

    def close(self) -> None:
        """As in PageCopier."""
        self._dma.close()

    def _transfers(
        self, lease: ReadLease | WriteLease, views: Sequence[memoryview]
    ) -> list[tuple[range, list[tuple[int, int]] | None]]:
        """Records side by side, with the registered ranges that they lie in; None where they cannot be registered."""
        if self._region is None:
            self._region = self._dma.memory.lend(lease.arena)
        firsts = [address_of(view) for view in views]
        runs = adjacent(firsts, self._stride)
        return [(run, self._region.pieces(firsts[run.start], self._range_bytes(run))) for run in runs]

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
        return [(part.bounce[run.start].data_ptr(), self._range_bytes(run))]

    def _fill_bounce(self, part: _Slot, run: range, views: Sequence[memoryview]) -> None:
        """Copy records into pinned memory, as soon as what was in it has left."""
        self._bounce_range(part, run)
        assert part.bounce is not None
        part.copied.synchronize()
        for place in run:
            np.copyto(part.bounce[place, : self.page_bytes].numpy(), np.frombuffer(views[place], np.uint8))
