"""An iteration plan while it is being made.

Collects starts, page table changes and rows; knows nothing of why they are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.plan import IterationPlan, KVMove, ScheduleBucket, SlotStart

Int32 = NDArray[np.int32]


def _empty() -> Int32:
    return np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class PlanDraft:
    """Decodes come as columns, prefill chunks one by one."""

    decodes: Int32 = field(default_factory=_empty)  # slots
    decode_starts: Int32 = field(default_factory=_empty)
    starts: list[SlotStart] = field(default_factory=list)
    grown_slots: Int32 = field(default_factory=_empty)  # decodes that got a page
    grown_indexes: Int32 = field(default_factory=_empty)
    grown_pages: list[int] = field(default_factory=list)
    page_changes: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, page
    chunks: list[tuple[int, int, int, bool]] = field(default_factory=list)  # slot, start, count, samples
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens
    prefix_hits: int = 0
    cpu_hits: int = 0
    ssd_hits: int = 0
    moves: list[KVMove] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Token rows so far."""
        return len(self.decodes) + sum(count for _, _, count, _ in self.chunks)

    def add_pages(self, slot: int, first_index: int, pages: Sequence[int]) -> None:
        """The slot's page table gets these pages from first_index on."""
        self.page_changes.extend((slot, first_index + i, page) for i, page in enumerate(pages))

    def build(self, step: int, bucket: ScheduleBucket) -> IterationPlan:
        """The finished plan."""
        num_decodes, chunks = len(self.decodes), np.array(self.chunks, np.int32).reshape(-1, 4)
        changes = np.array(self.page_changes, np.int32).reshape(-1, 3)
        return IterationPlan(
            step=step,
            bucket=bucket.id,
            slot_starts=tuple(self.starts),
            page_slots=np.concatenate((self.grown_slots, changes[:, 0])),
            page_indexes=np.concatenate((self.grown_indexes, changes[:, 1])),
            page_ids=np.concatenate((np.array(self.grown_pages, np.int32), changes[:, 2])),
            slots=np.concatenate((self.decodes, chunks[:, 0])),
            starts=np.concatenate((self.decode_starts, chunks[:, 1])),
            counts=np.concatenate((np.ones(num_decodes, np.int32), chunks[:, 2])),
            num_decodes=num_decodes,
            samples=np.concatenate((np.ones(num_decodes, np.bool_), chunks[:, 3].astype(np.bool_))),
            moves=tuple(self.moves),
        )
