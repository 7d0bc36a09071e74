"""A GPU's streams as the strictest test of who waits for whom: what is queued runs as late as is allowed, or early.

Operations of one stream run in order; those of different streams in any order that events leave open, which a seed
chooses. Nothing runs but when the host waits for something, or when chance has it.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from worker.dma_memory import DmaMemory
from worker.kernels import page_copy


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.mark: list[bool] | None = None  # of the last record(): whether it was reached

    def record(self, stream: SimulatedStream) -> None:
        mark = self.mark = [False]
        self._gpu.queue(stream, lambda: mark.__setitem__(0, True))

    def synchronize(self) -> None:
        mark = self.mark
        if mark is not None:
            self._gpu.run_until(lambda: mark[0])


class SimulatedStream:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.waiting: deque = deque()  # operations, and marks to wait for

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.mark is not None:
            self.waiting.append(event.mark)


class SimulatedGpu:
    """Implements worker.page_copy_cuda.Dma and Kernels for layers in host memory. Of one thread."""

    def __init__(self, layers, seed: int, refuse: bool = False) -> None:
        self.layers, self._random, self._refuse = layers, random.Random(seed), refuse
        self._streams: list[SimulatedStream] = []
        self._pinned: list[torch.Tensor] = []
        self.registered: dict[int, int] = {}
        self.memory = DmaMemory(self._register, self.registered.pop)
        self.num_copies = 0
        self.harm: int | None = None  # the copy that comes out wrong
        self.refuse_copy: int | None = None  # the one that cannot be queued
        self.reading: list[tuple[int, int]] = []  # host memory, address and bytes, that queued copies will read

    def stream(self) -> SimulatedStream:
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def pinned(self, shape, dtype) -> torch.Tensor:
        self._pinned.append(torch.zeros(*shape, dtype=dtype))
        return self._pinned[-1]

    def copy_in(self, target: int, source: int, num_bytes: int, stream) -> None:
        self._check_host(source, num_bytes)
        self.reading.append((source, num_bytes))
        self._copy(target, source, num_bytes, stream, lambda: self.reading.remove((source, num_bytes)))

    def copy_out(self, target: int, source: int, num_bytes: int, stream) -> None:
        self._check_host(target, num_bytes)
        self._copy(target, source, num_bytes, stream)

    def _copy(self, target: int, source: int, num_bytes: int, stream, has_run=lambda: None) -> None:
        is_harmed = self.harm == self.num_copies - 1

        def run() -> None:
            ctypes.memmove(target, source, num_bytes)
            if is_harmed:
                memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(target))
                memory ^= 0x10
            has_run()

        self.queue(stream, run, "copy")

    def gather(self, pages, records, stream) -> None:
        self.queue(stream, lambda: page_copy.gather(self.layers, pages.tolist(), records), "gather")

    def scatter(self, pages, records, stream) -> None:
        self.queue(stream, lambda: page_copy.scatter(self.layers, pages.tolist(), records), "scatter")

    def checksum(self, records, num_bytes, checksums, stream) -> None:
        def run() -> None:
            for place, record in enumerate(records.numpy()):
                checksums.numpy().view(np.uint64)[place] = xxh3_64_intdigest(record[:num_bytes])

        self.queue(stream, run, "checksum")

    def queue(self, stream: SimulatedStream, operation, work: str = "mark") -> None:
        stream.waiting.append(operation)
        while self._random.random() < 0.3 and self._run_one():
            pass

    def run_until(self, condition) -> None:
        while not condition():
            assert self._run_one(), "everything waits for everything"

    def close(self) -> None:
        self.memory.close()
        assert not self.registered, "memory stays registered"
        assert not any(stream.waiting for stream in self._streams), "something is still under way"

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.waiting and self._is_ready(stream.waiting[0])]
        if not ready:
            return False
        operation = self._random.choice(ready).waiting.popleft()
        if callable(operation):
            operation()
        return True

    def _is_ready(self, operation) -> bool:
        return callable(operation) or operation[0]

    def _register(self, address: int, num_bytes: int) -> None:
        if self._refuse:
            raise RuntimeError("refused")
        for first, size in self.registered.items():
            assert address + num_bytes <= first or first + size <= address, "registered twice"
        self.registered[address] = num_bytes

    def _check_host(self, address: int, num_bytes: int) -> None:
        self.num_copies += 1
        if self.refuse_copy == self.num_copies - 1:
            raise RuntimeError("refused")
        spans = [*self.registered.items(), *((each.data_ptr(), each.nbytes) for each in self._pinned)]
        inside = [first <= address and address + num_bytes <= first + size for first, size in spans]
        assert any(inside), "a copy engine is sent to memory that is not one registered piece"


class TimedEvent:
    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu, self.at = gpu, 0.0

    def record(self, stream: TimedStream) -> None:
        self.at = stream.free_at

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self.at)


class TimedStream:
    def __init__(self) -> None:
        self.free_at = 0.0

    def wait_event(self, event: TimedEvent) -> None:
        self.free_at = max(self.free_at, event.at)


class TimedGpu(SimulatedGpu):
    """One on which work takes time, and the host none: tells when everything would have run.

    As streams run in order, and events are recorded before they are waited for, all that is known when it is queued.
    """

    def __init__(self, layers, durations: dict[str, float]) -> None:
        super().__init__(layers, 0)
        self.now, self._durations = 0.0, durations
        self.spans: dict[str, list[tuple[float, float]]] = {work: [] for work in durations}

    def stream(self) -> TimedStream:
        return TimedStream()

    def event(self) -> TimedEvent:
        return TimedEvent(self)

    def queue(self, stream: TimedStream, operation, work: str = "mark") -> None:
        operation()
        start = max(self.now, stream.free_at)
        stream.free_at = start + self._durations[work]
        self.spans[work].append((start, stream.free_at))
