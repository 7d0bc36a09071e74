"""The tensor-parallel ranks of one instance: sums and gathers over them, and a single rank's twin of it.

Runs on torch.distributed: gloo between CPUs; a device's own backend fits behind the same methods.
Knows nothing of models.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


class TensorParallelGroup(Protocol):
    """All ranks call the same methods in the same order, with tensors of the same shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, columns] of every rank -> [rows, size * columns] in rank order, the same bits on all ranks."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class SingleRank:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """It is its own sum."""

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        """Nothing to leave."""


class DistributedGroup:
    """Ranks in different processes of one machine."""

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        """Wait for all ranks. `rendezvous` is a torch.distributed init method that all ranks share.

        A file:// one needs no listening socket. A collective that waits longer than timeout_s raises RuntimeError.
        """
        # Ranks share a machine, so nothing needs to listen on an address that others can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timeout)
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(self.size * tensor.shape[0], tensor.shape[1])
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        return gathered.view(self.size, *tensor.shape).transpose(0, 1).reshape(tensor.shape[0], -1)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def make_group(rank: int, size: int, rendezvous: str, timeout_s: float = 600.0) -> TensorParallelGroup:
    """The group of `size` ranks, joined as `rank`; blocks until all have joined."""
    return SingleRank() if size == 1 else DistributedGroup(rank, size, rendezvous, timeout_s)
