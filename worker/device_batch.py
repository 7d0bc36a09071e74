"""One iteration as one block of int32: packed on the host from a plan, read by the kernels on the device.

The block has fixed sections, so that a captured graph reads fixed addresses whatever the plan holds. Keeps what a
rank must know of live slots on the host. Knows nothing of models or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from scheduler.plan import IterationPlan
from worker.batch_input import cut_rows
from worker.sampler import uniform
from worker.work_lists import DECODE_FIELDS, PREFILL_FIELDS, decode_units, prefill_units, range_ends

Int32 = NDArray[np.int32]
# Rows that are sampled with noise are worked off in pieces of this many: their logits fit a buffer.
RANDOM_ROWS = 256
# Attention runs on at most so many ranges of rows.
MAX_RANGES = 15
# Page table changes that travel in the block; more of them take a path of their own.
MAX_CHANGES = 4096


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest iteration there can be."""

    rows: int  # token rows
    slots: int
    page_size: int
    pages_per_slot: int
    prefill_tokens: int  # query tokens of a prefill unit
    decode_target: int  # decode units to aim at where sequences are few

    @property
    def sections(self) -> dict[str, int]:
        """int32s of each section of the block."""
        decodes = min(self.rows, self.slots)
        random = -(-decodes // RANDOM_ROWS) * RANDOM_ROWS
        return {
            "counts": 2,  # samples, random samples
            "decode_spans": MAX_RANGES + 1,  # units of attention range i are [spans[i], spans[i + 1])
            "prefill_spans": MAX_RANGES + 1,
            "tokens": self.rows,
            "positions": self.rows,
            "cells": self.rows,
            "sample_rows": decodes,
            "sample_slots": decodes,
            "random_rows": random,  # which of the samples are drawn with noise
            "temperature": 2 * random,  # of those; as fp64, like top_p and noise
            "top_k": random,
            "top_p": 2 * random,
            "noise": 2 * random,
            "decode_units": (decodes + self.decode_target) * DECODE_FIELDS,
            "prefill_units": (self.rows // self.prefill_tokens + decodes + 1 + MAX_RANGES) * PREFILL_FIELDS,
            "table_cells": MAX_CHANGES,
            "table_pages": MAX_CHANGES,
        }

    @property
    def max_partials(self) -> int:
        """Partial results of split sequences at most: each row adds at most one part to its equal share."""
        return min(self.rows, self.slots) + self.decode_target


class BlockView:
    """The sections of a block by name."""

    def __init__(self, limits: BatchLimits, block: torch.Tensor) -> None:
        self.block = block
        position = 0
        self._sections: dict[str, torch.Tensor] = {}
        for name, size in limits.sections.items():
            self._sections[name] = block[position : position + size]
            # Sections begin on 64-byte boundaries.
            position += -(-size // 16) * 16

    @staticmethod
    def size(limits: BatchLimits) -> int:
        """int32s of a whole block."""
        return sum(-(-size // 16) * 16 for size in limits.sections.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._sections[name]

    def doubles(self, name: str) -> torch.Tensor:
        """A section that holds fp64."""
        return self._sections[name].view(torch.float64)


@dataclass(frozen=True, slots=True)
class AttentionCuts:
    """Where a schedule cuts the two attention operators' rows: ends of their ranges, ascending; () for one range."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    dealt: tuple[int, ...] = ()  # ends of ranges that get their shares of the decodes; (): the decodes come first


@dataclass(frozen=True, slots=True)
class Packed:
    """What the host must remember of a packed plan."""

    sample_slots: Int32  # [samples]
    num_random: int  # samples that are drawn with noise
    extra_cells: Int32  # page table changes that did not fit into the block
    extra_pages: Int32


class HostSlots:
    """What a rank knows of the requests that hold slots."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.page_table = np.zeros((limits.slots, limits.pages_per_slot), np.int32)
        self.known = np.zeros(limits.slots, np.int64)  # tokens that a SlotStart has sent
        self.temperature = np.zeros(limits.slots, np.float64)
        self.top_k = np.zeros(limits.slots, np.int64)
        self.top_p = np.ones(limits.slots, np.float64)
        self.seed = np.zeros(limits.slots, np.uint64)
        self._tokens: dict[int, Int32] = {}

    def pack(self, plan: IterationPlan, view: BlockView, cuts: AttentionCuts = AttentionCuts()) -> Packed:
        """Take in the plan's changes and fill the block; attention's work is dealt to the ranges between cuts."""
        limits = self.limits
        for start in plan.slot_starts:
            self._tokens[start.slot] = start.token_ids
            self.known[start.slot] = len(start.token_ids)
            self.temperature[start.slot], self.seed[start.slot] = start.temperature, start.seed
            self.top_k[start.slot], self.top_p[start.slot] = start.top_k, start.top_p
        self.page_table[plan.page_slots, plan.page_indexes] = plan.page_ids
        cells = (plan.page_slots.astype(np.int64) * limits.pages_per_slot + plan.page_indexes).astype(np.int32)
        fits = min(len(cells), MAX_CHANGES)
        _fill(view["table_cells"], cells[:fits], limits.slots * limits.pages_per_slot)
        _fill(view["table_pages"], plan.page_ids[:fits], 0)
        row_of = row_of_tokens(plan, cuts.dealt)
        self._pack_rows(plan, view, row_of)
        first = (np.cumsum(plan.counts) - plan.counts).astype(np.int32)
        chosen = np.flatnonzero(plan.samples)
        slots = plan.slots[chosen].astype(np.int32)
        _fill(view["sample_rows"], row_of[(first + plan.counts - 1)[chosen]], 0)
        _fill(view["sample_slots"], slots, limits.slots)
        num_random = self._pack_random(slots, (plan.starts + plan.counts)[chosen], view)
        self._pack_units(plan, view, row_of, cuts)
        view["counts"].numpy()[:2] = (len(chosen), num_random)
        return Packed(
            slots,
            num_random,
            cells[fits:],
            plan.page_ids[fits:],
        )

    def _pack_rows(self, plan: IterationPlan, view: BlockView, row_of: Int32) -> None:
        """row_of: [tokens] the row of each of the plan's tokens."""
        page_size = self.limits.page_size
        plan_row = np.repeat(np.arange(len(plan.slots)), plan.counts)
        first = np.cumsum(plan.counts) - plan.counts
        positions = plan.starts[plan_row] + np.arange(len(plan_row)) - first[plan_row]
        slots = plan.slots[plan_row]
        tokens = -1 - slots
        known = positions < self.known[slots]
        for row in np.unique(plan_row[known]).tolist():
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            stop = min(start + int(plan.counts[row]), int(self.known[slot]))
            tokens[first[row] : first[row] + stop - start] = self._tokens[slot][start:stop]
        cells = self.page_table[slots, positions // page_size] * page_size + positions % page_size
        for name, values, padding in (("tokens", tokens, 0), ("positions", positions, 0), ("cells", cells, -1)):
            _fill(view[name], values, padding)
            view[name].numpy()[row_of] = values

    def _pack_random(self, sample_slots: Int32, positions: NDArray[np.integer], view: BlockView) -> int:
        """Parameters and noise of the samples that are not greedy; positions are those of the tokens to come."""
        rows = np.flatnonzero((self.temperature[sample_slots] > 0) & (self.top_k[sample_slots] != 1))
        slots, count = sample_slots[rows], len(rows)
        _fill(view["random_rows"], rows, 0)
        view["top_k"].numpy()[:count] = np.minimum(self.top_k[slots], np.iinfo(np.int32).max)
        view.doubles("temperature").numpy()[:count] = self.temperature[slots]
        view.doubles("top_p").numpy()[:count] = self.top_p[slots]
        view.doubles("noise").numpy()[:count] = uniform(self.seed[slots], positions[rows].astype(np.int64))
        return count

    def _pack_units(self, plan: IterationPlan, view: BlockView, row_of: Int32, cuts: AttentionCuts) -> None:
        decodes, limits = plan.num_decodes, self.limits
        units, _ = decode_units(
            row_of[:decodes],
            plan.slots[:decodes],
            plan.starts[:decodes] + 1,
            target=limits.decode_target,
            shortest=128,
            align=max(64, limits.page_size),
            cuts=cuts.decode,
        )
        chunks = prefill_units(*_pieces(plan, row_of), tokens=limits.prefill_tokens, cuts=cuts.prefill)
        view["decode_units"].numpy()[: units.size] = units.reshape(-1)
        view["prefill_units"].numpy()[: chunks.size] = chunks.reshape(-1)
        _fill(view["decode_spans"][1:], range_ends(units, cuts.decode) if cuts.decode else np.array([len(units)]), 0)
        _fill(
            view["prefill_spans"][1:], range_ends(chunks, cuts.prefill) if cuts.prefill else np.array([len(chunks)]), 0
        )


def row_of_tokens(plan: IterationPlan, ends: Sequence[int]) -> Int32:
    """[tokens] the row of each of the plan's tokens: in plan order, or dealt to the ranges that end there."""
    num_rows, decodes = plan.num_tokens, plan.num_decodes
    if not ends:
        return np.arange(num_rows, dtype=np.int32)
    cuts, decode_cuts = cut_rows(num_rows, decodes, ends)
    row_of = np.empty(num_rows, np.int32)
    for (start, stop), (first, last) in zip(pairwise(cuts), pairwise(decode_cuts)):
        middle = start + last - first
        row_of[first:last] = np.arange(start, middle)
        row_of[decodes + start - first : decodes + stop - last] = np.arange(middle, stop)
    return row_of


def _pieces(plan: IterationPlan, row_of: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """First rows, counts, first positions and slots of the prefill chunks' parts that lie in rows after each other."""
    decodes = plan.num_decodes
    plan_row = np.repeat(np.arange(decodes, len(plan.slots)), plan.counts[decodes:])
    rows = row_of[decodes:]
    begins = np.flatnonzero(np.diff(plan_row, prepend=-1) | (np.diff(rows, prepend=-2) != 1)).astype(np.int32)
    of = plan_row[begins]
    first = (np.cumsum(plan.counts) - plan.counts)[of] - decodes  # token of the chunk's begin
    counts = np.diff(begins, append=len(rows)).astype(np.int32)
    return rows[begins], counts, (plan.starts[of] + begins - first).astype(np.int32), plan.slots[of]


def _fill(section: torch.Tensor, values: NDArray[np.integer], padding: int) -> None:
    array = section.numpy()
    array[: len(values)] = values
    array[len(values) :] = padding
