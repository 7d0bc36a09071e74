"""Where a GPU's memory goes: listed at start, and the room that is left for the KV cache. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU by purpose. All but the KV cache is fixed before that is sized."""

    total: int
    spared: int  # not to be used: what --gpu-memory-utilization leaves
    others: int  # the CUDA context, libraries, other processes
    weights: int
    buffers: int  # activations, page table and plan of the largest batch
    working: int  # what kernels need for the time of an iteration
    graphs: int  # as reserved; what they took is measured afterwards
    staging: int = 0  # what pages pass through on their way to and from a KV store
    kv_cache: int = 0

    @property
    def room(self) -> int:
        """Bytes left for the KV cache, or for more of it; negative where the rest is too large already."""
        taken: int = sum(getattr(self, field.name) for field in fields(self) if field.name != "total")
        return self.total - taken

    @property
    def for_graphs(self) -> int:
        """Bytes that graphs may take: what was reserved, half of what they work in, and what nobody else got."""
        return self.graphs + self.working // 2 + max(0, self.room)

    def __str__(self) -> str:
        parts = [f"{field.name.replace('_', ' ')} {getattr(self, field.name) / GIB:.2f}" for field in fields(self)]
        return f"GPU memory in GiB: {', '.join(parts)}, left {self.room / GIB:.2f}"
