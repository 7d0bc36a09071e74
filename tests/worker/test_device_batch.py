"""What a packed block says of the samples that are drawn with noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan import IterationPlan, SlotStart
from worker.batch_input import build_batch
from worker.device_batch import AttentionCuts, BatchLimits, BlockView, HostSlots
from worker.sampler import uniform

LIMITS = BatchLimits(rows=32, slots=6, page_size=4, pages_per_slot=8, prefill_tokens=8, decode_target=4)
# Temperature, top-k, top-p by slot: slots 0 and 2 are greedy, the one by its temperature, the other by its top-k.
SAMPLING = [(0.0, 0, 1.0), (0.7, 3, 0.9), (1.0, 1, 1.0), (1.5, 10**12, 0.5), (2.0, 0, 1.0)]


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def first_plan() -> IterationPlan:
    """A prompt of 5 tokens in each slot, in the order 4 to 0; slot 1's is not at its end, so it samples nothing."""
    starts = tuple(
        SlotStart(slot, str(slot), int32(*range(5)), 0, *SAMPLING[slot], seed=100 + slot) for slot in range(5)
    )
    slots, counts = int32(4, 3, 2, 1, 0), int32(5, 5, 5, 3, 5)
    pages = int32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4), int32(*[0, 1] * 5), int32(*range(10))
    return IterationPlan(0, 0, starts, *pages, slots, int32(*[0] * 5), counts, 0, np.array([1, 1, 1, 0, 1], bool))


def test_random_samples_are_listed_with_their_parameters_and_noise():
    view = BlockView(LIMITS, torch.full((BlockView.size(LIMITS),), -1, dtype=torch.int32))
    slots = HostSlots(LIMITS)
    packed = slots.pack(first_plan(), view)
    assert packed.sample_slots.tolist() == [4, 3, 2, 0]
    assert packed.num_random == view["counts"][1] == 2
    assert view["random_rows"][:2].tolist() == [0, 1]  # of the samples: slots 4 and 3
    assert not view["random_rows"][2:].any()  # padding must be a row that there is
    assert view.doubles("temperature")[:2].tolist() == [2.0, 1.5]
    assert view["top_k"][:2].tolist() == [0, 2**31 - 1]
    assert view.doubles("top_p")[:2].tolist() == [1.0, 0.5]
    noise = uniform(np.array([104, 103], np.uint64), np.array([5, 5]))
    assert view.doubles("noise")[:2].tolist() == noise.tolist()


def test_noise_goes_with_the_position_of_the_token_to_come():
    view = BlockView(LIMITS, torch.zeros(BlockView.size(LIMITS), dtype=torch.int32))
    slots = HostSlots(LIMITS)
    slots.pack(first_plan(), view)
    no_pages = int32(), int32(), int32()
    decode = IterationPlan(1, 0, (), *no_pages, int32(0, 3), int32(5, 5), int32(1, 1), 2, np.array([1, 1], bool))
    assert slots.pack(decode, view).num_random == 1
    assert view["random_rows"][0] == 1
    assert view.doubles("noise")[0] == uniform(np.array([103], np.uint64), np.array([6]))[0]


def test_parts_of_sections_of_doubles_keep_their_alignment():
    view = BlockView(LIMITS, torch.zeros(BlockView.size(LIMITS), dtype=torch.int32))
    base = view.block.data_ptr()
    for name in ("temperature", "top_p", "noise"):
        assert (view.doubles(name).data_ptr() - base) % 64 == 0
        assert len(view.doubles(name)) == len(view["random_rows"]) == 256  # whole pieces, whatever the limits


@given(
    counts=st.lists(st.integers(1, 12), max_size=4),
    decodes=st.integers(0, 5),
    ends=st.lists(st.integers(1, 31), max_size=3, unique=True).map(sorted),
)
def test_dealt_rows_hold_the_same_tokens_as_the_cpu_worker_deals(counts, decodes, ends):
    counts = counts[: 6 - decodes]
    while sum(counts) + decodes > 32:
        counts.pop()
    if not counts and not decodes:
        return
    total = decodes + len(counts)
    plan = IterationPlan(
        0,
        0,
        tuple(
            SlotStart(s, str(s), np.arange(100 * s, 100 * s + 31, dtype=np.int32), 0, 0.0, 0, 1.0, 0)
            for s in range(total)
        ),
        *[int32()] * 3,
        int32(*range(total)),
        int32(*[7] * decodes, *[3] * len(counts)),
        int32(*[1] * decodes, *counts),
        decodes,
        np.ones(total, bool),
    )
    expected = build_batch(plan, [*ends, 32])
    view = BlockView(LIMITS, torch.zeros(BlockView.size(LIMITS), dtype=torch.int32))
    cuts = AttentionCuts((*ends, 32), (*ends, 32), tuple(ends))
    HostSlots(LIMITS).pack(plan, view, cuts)
    rows = plan.num_tokens
    assert view["positions"][:rows].tolist() == expected.positions.tolist()
    assert (view["tokens"][:rows] // 100).tolist() == expected.slots.tolist()
    assert view["sample_rows"][:total].tolist() == expected.samples.rows.tolist()
    num_decode, num_prefill = int(view["decode_spans"][len(ends) + 1]), int(view["prefill_spans"][len(ends) + 1])
    decode = view["decode_units"].view(-1, 8)[:num_decode]
    assert sorted(decode[:, 0].tolist()) == [row for part in expected.decodes for row in range(part.start, part.stop)]
    pieces = view["prefill_units"].view(-1, 4)[:num_prefill].tolist()
    covered = sorted((row + i, position + i, slot) for row, count, position, slot in pieces for i in range(count))
    wanted = [
        (row, piece.position + row - piece.start, piece.slot)
        for piece in expected.prefills
        for row in range(piece.start, piece.stop)
    ]
    assert covered == sorted(wanted)
    edges = [0, *ends, 32]
    for number, (begin, end) in enumerate(pairwise(edges)):
        part = pieces[int(view["prefill_spans"][number]) : int(view["prefill_spans"][number + 1])]
        assert all(begin <= row and row + count <= end for row, count, _, _ in part)
