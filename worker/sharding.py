"""How one model is cut over tensor-parallel ranks: which heads, FFN columns and vocabulary rows a rank holds.

Plain numbers, no tensors. Query heads must divide evenly; KV heads are replicated where there are fewer of them
than ranks (or where a rank's query heads straddle them), and FFN width and vocabulary are padded with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosearch.specs import ModelSpec


class ShardingError(ValueError):
    """The model cannot be cut over so many ranks; the message says which number is in the way."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int  # tensor-parallel ranks
    heads: tuple[int, int]  # query heads [start, stop) of the model
    kv_heads: tuple[int, ...]  # the model's KV head behind each local one; every local one serves equally many queries
    intermediate: tuple[int, int]  # FFN columns [start, stop); fewer than intermediate_size / size on the last ranks
    intermediate_size: int  # local FFN width, padding included; the same on all ranks
    vocab: tuple[int, int]  # token ids [start, stop); fewer than vocab_size / size on the last ranks
    vocab_size: int  # local vocabulary rows, padding included; the same on all ranks

    @property
    def num_heads(self) -> int:
        """Local query heads."""
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """Local KV heads."""
        return len(self.kv_heads)

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be added once, such as the bias of a row-split projection."""
        return self.rank == 0


def shard(spec: ModelSpec, size: int, rank: int) -> Shard:
    """Rank `rank`'s part of `spec` over `size` ranks. Raises ShardingError where it does not work out."""
    if size < 1 or not 0 <= rank < size:
        raise ShardingError(f"rank {rank} of {size} does not exist: ranks are 0 to tensor_parallel_size - 1")
    if spec.num_heads % size:
        fitting = [n for n in range(1, spec.num_heads + 1) if spec.num_heads % n == 0]
        raise ShardingError(
            f"tensor_parallel_size {size} does not divide the model's {spec.num_heads} attention heads: "
            f"use one of {', '.join(map(str, fitting))}"
        )
    if spec.intermediate_size < size or spec.vocab_size < size:
        raise ShardingError(
            f"tensor_parallel_size {size} is more than the model's FFN width ({spec.intermediate_size}) "
            f"or vocabulary ({spec.vocab_size}): use fewer ranks"
        )
    num_heads = spec.num_heads // size
    queries_per_kv = spec.num_heads // spec.num_kv_heads
    # The largest runs of local query heads that never cross from one KV head to the next.
    run = math.gcd(num_heads, queries_per_kv)
    first_head = rank * num_heads
    intermediate_size = -(-spec.intermediate_size // size)
    vocab_size = -(-spec.vocab_size // size)
    return Shard(
        rank=rank,
        size=size,
        heads=(first_head, first_head + num_heads),
        kv_heads=tuple((first_head + offset) // queries_per_kv for offset in range(0, num_heads, run)),
        intermediate=_clipped(rank, intermediate_size, spec.intermediate_size),
        intermediate_size=intermediate_size,
        vocab=_clipped(rank, vocab_size, spec.vocab_size),
        vocab_size=vocab_size,
    )


def _clipped(rank: int, width: int, total: int) -> tuple[int, int]:
    return min(rank * width, total), min((rank + 1) * width, total)
