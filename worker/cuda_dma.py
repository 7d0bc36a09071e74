"""What the copiers of one GPU share: its copy engines, host memory registered for them.

By CuPy, which lets other Python threads run meanwhile. Knows nothing of pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from worker import numa
from worker.dma_memory import DmaMemory

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class CudaDma:
    """One GPU's. To be closed by the last copier; idempotent."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError without CuPy."""
        import cupy

        self._cupy, self._runtime, self._device = cupy, cupy.cuda.runtime, device.index or 0
        self._pci_id: str = self._runtime.deviceGetPCIBusId(self._device)
        self.memory = DmaMemory(
            lambda address, num_bytes: self._runtime.hostRegister(address, num_bytes, _PORTABLE),
            self._unregister,
        )

    def _unregister(self, address: int) -> None:
        """In any thread."""
        with self._cupy.cuda.Device(self._device):
            self._runtime.hostUnregister(address)

    def prepare_thread(self) -> None:
        """For a thread that will copy: beside the GPU, and with the GPU as its current device."""
        numa.bind_thread(self._pci_id)
        torch.cuda.set_device(self._device)

    def register_ahead(self, arena: memoryview) -> None:
        """Register a whole arena now, while nothing else runs, instead of at first use."""
        began_s, region = time.monotonic(), self.memory.lend(arena)
        if region.register_all():
            log.info("%.1f GB of the KV store registered in %.2f s", arena.nbytes / 1e9, time.monotonic() - began_s)
        self.memory.give_back(region)

    def stream(self) -> torch.cuda.Stream:
        """A stream that does not wait for the default one."""
        return torch.cuda.Stream(self._device)

    def event(self) -> torch.cuda.Event:
        """An event for which a thread sleeps, instead of spinning."""
        return torch.cuda.Event(blocking=True)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device can read as well."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Queue a copy from pinned or registered host memory to the device."""
        self._runtime.memcpyAsync(target, source, num_bytes, _HOST_TO_DEVICE, stream.cuda_stream)

    def copy_out(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Queue a copy from the device to pinned or registered host memory."""
        self._runtime.memcpyAsync(target, source, num_bytes, _DEVICE_TO_HOST, stream.cuda_stream)

    def close(self) -> None:
        """Unregister everything. Nothing is under way."""
        self.memory.close()
