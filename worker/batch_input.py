"""Turns an iteration plan into arrays per token row, dealt to the ranges of a pipeline schedule.

Holds what a rank must remember of live requests between plans: their tokens, pages and sampling parameters.
Knows nothing of the model, and of the schedule only where its ranges end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from scheduler.plan import IterationPlan

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive token rows of one kind."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Consecutive token rows that hold consecutive tokens of one slot's prompt."""

    start: int  # rows [start, stop)
    stop: int
    slot: int
    position: int  # of the first row's token in its sequence


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows after which a token is sampled, in the order of the plan's rows."""

    rows: NDArray[np.int64]  # [samples] token rows of the batch
    slots: Int32  # [samples]
    positions: Int32  # [samples] of the tokens to be sampled, in their sequences


@dataclass(frozen=True, slots=True)
class BatchInput:
    """One iteration's dense batch, a row per token."""

    slots: Int32  # [rows]
    positions: Int32  # [rows] in the slot's sequence
    decodes: tuple[RowRange, ...]  # ascending; every other row belongs to a prefill piece
    prefills: tuple[PrefillPiece, ...]  # ascending
    samples: SampleRows

    @property
    def num_rows(self) -> int:
        """Token rows."""
        return len(self.slots)


class SlotTable:
    """What a rank knows of the requests that hold slots."""

    def __init__(self, max_slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self.max_model_len = max_model_len
        # Sampled tokens are written on the device and read by the next iteration without a look at the host.
        self.tokens = torch.zeros((max_slots, max_model_len + 1), dtype=torch.int64, device=device)
        self.page_table = np.zeros((max_slots, -(-max_model_len // page_size)), np.int32)
        self.temperature = np.zeros(max_slots, np.float64)
        self.top_k = np.zeros(max_slots, np.int64)
        self.top_p = np.ones(max_slots, np.float64)
        self.seed = np.zeros(max_slots, np.uint64)

    def apply(self, plan: IterationPlan) -> None:
        """Take in the plan's new slots and page table changes."""
        for start in plan.slot_starts:
            slot = start.slot
            self.tokens[slot, : len(start.token_ids)] = torch.from_numpy(start.token_ids.astype(np.int64))
            self.temperature[slot] = start.temperature
            self.top_k[slot] = start.top_k
            self.top_p[slot] = start.top_p
            self.seed[slot] = start.seed
        self.page_table[plan.page_slots, plan.page_indexes] = plan.page_ids

    def token_ids(self, slots: Int32, positions: Int32) -> torch.Tensor:
        """Tokens at positions of slots, sampled ones included: [rows]."""
        return self.tokens[torch.from_numpy(slots), torch.from_numpy(positions)]

    def append(self, samples: SampleRows, token_ids: torch.Tensor) -> None:
        """Keep sampled tokens, [samples], for the iterations to come."""
        self.tokens[torch.from_numpy(samples.slots), torch.from_numpy(samples.positions)] = token_ids


def cut_rows(
    num_rows: int, num_decodes: int, boundaries: Sequence[int], decodes_first: bool = False
) -> tuple[list[int], list[int]]:
    """Where the ranges that end at boundaries cut the rows there are, and how many decodes lie before each cut.

    Each range gets its share of the decodes, or, with decodes_first, as many as are left.
    """
    cuts = [0, *(end for end in boundaries if end < num_rows), num_rows]
    if decodes_first or not num_rows:
        return cuts, [min(cut, num_decodes) for cut in cuts]
    return cuts, [num_decodes * cut // num_rows for cut in cuts]


def build_batch(plan: IterationPlan, boundaries: Sequence[int], decodes_first: bool = False) -> BatchInput:
    """Lay the plan's tokens out as rows.

    `boundaries` are the ends of the schedule's ranges, ascending, clipped here to the tokens there are. Each range
    gets its share of the decodes (`cut_rows`), and behind them prefill tokens in plan order; so of a chunk that
    straddles a boundary the earlier tokens lie in the earlier range.
    """
    num_rows, num_decodes = plan.num_tokens, plan.num_decodes
    plan_row = np.repeat(np.arange(len(plan.slots)), plan.counts)  # of each token, in plan order
    first_token = np.cumsum(plan.counts) - plan.counts  # of each plan row
    positions = plan.starts[plan_row] + np.arange(num_rows, dtype=np.int32) - first_token[plan_row]
    cuts, decode_cuts = cut_rows(num_rows, num_decodes, boundaries, decodes_first)
    order = np.empty(num_rows, np.int64)  # row -> token
    decodes: list[RowRange] = []
    prefills: list[PrefillPiece] = []
    for (start, stop), (first_decode, last_decode) in zip(pairwise(cuts), pairwise(decode_cuts)):
        middle = start + last_decode - first_decode
        order[start:middle] = np.arange(first_decode, last_decode)
        # Prefill tokens so far: the rows so far, less the decodes among them.
        first, last = num_decodes + start - first_decode, num_decodes + stop - last_decode
        order[middle:stop] = np.arange(first, last)
        if middle > start:
            decodes.append(RowRange(start, middle))
        prefills.extend(_pieces(plan, plan_row, positions, first, last, middle - first))
    return BatchInput(
        slots=plan.slots[plan_row[order]].astype(np.int32),
        positions=positions[order].astype(np.int32),
        decodes=tuple(decodes),
        prefills=tuple(prefills),
        samples=_sample_rows(plan, order, first_token),
    )


def _pieces(
    plan: IterationPlan, plan_row: NDArray[np.int64], positions: Int32, first: int, last: int, shift: int
) -> list[PrefillPiece]:
    """Prefill tokens [first, last) in plan order, cut where the plan's row changes; token t lies in row t + shift."""
    if first == last:
        return []
    changes = np.flatnonzero(np.diff(plan_row[first:last])) + first + 1
    edges = [first, *changes.tolist(), last]
    return [
        PrefillPiece(start + shift, stop + shift, int(plan.slots[plan_row[start]]), int(positions[start]))
        for start, stop in pairwise(edges)
    ]


def _sample_rows(plan: IterationPlan, order: NDArray[np.int64], first_token: NDArray[np.int64]) -> SampleRows:
    row_of = np.empty_like(order)
    row_of[order] = np.arange(len(order))
    sampling = np.flatnonzero(plan.samples)
    last_tokens = first_token[sampling] + plan.counts[sampling] - 1
    return SampleRows(
        rows=row_of[last_tokens],
        slots=plan.slots[sampling].astype(np.int32),
        positions=(plan.starts[sampling] + plan.counts[sampling]).astype(np.int32),
    )
