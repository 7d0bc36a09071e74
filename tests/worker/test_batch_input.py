"""Plans become rows: every token once, in the right range, with its own slot, position and kind."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan import IterationPlan, SlotStart
from worker.batch_input import SlotTable, build_batch


def int32(values):
    return np.array(list(values), np.int32)


def plan_of(decodes, prefills, slot_starts=(), pages=()):
    """decodes: (slot, position); prefills: (slot, start, count, whether it samples)."""
    rows = [(slot, position, 1, True) for slot, position in decodes] + list(prefills)
    return IterationPlan(
        step=0,
        bucket=0,
        slot_starts=tuple(slot_starts),
        page_slots=int32(page[0] for page in pages),
        page_indexes=int32(page[1] for page in pages),
        page_ids=int32(page[2] for page in pages),
        slots=int32(row[0] for row in rows),
        starts=int32(row[1] for row in rows),
        counts=int32(row[2] for row in rows),
        num_decodes=len(decodes),
        samples=np.array([row[3] for row in rows], bool),
    )


@st.composite
def plans(draw):
    decodes = draw(st.lists(st.integers(0, 50), max_size=12))
    chunks = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), max_size=5))
    return plan_of(list(enumerate(decodes)), [(len(decodes) + i, *chunk) for i, chunk in enumerate(chunks)])


cuts = st.lists(st.integers(1, 120), min_size=1, max_size=6, unique=True).map(sorted)


@given(plan=plans(), boundaries=cuts)
def test_every_token_has_one_row_of_its_kind(plan, boundaries):
    batch = build_batch(plan, boundaries)
    expected = [
        (slot, start + i) for slot, start, count in zip(plan.slots, plan.starts, plan.counts) for i in range(count)
    ]
    rows = list(zip(batch.slots.tolist(), batch.positions.tolist()))
    assert sorted(rows) == sorted(expected)
    kinds = [""] * batch.num_rows
    for run in batch.decodes:
        for row in range(run.start, run.stop):
            kinds[row] += "d"
            assert rows[row] in expected[: plan.num_decodes]
    for piece in batch.prefills:
        for row in range(piece.start, piece.stop):
            kinds[row] += "p"
            assert rows[row] == (piece.slot, piece.position + row - piece.start)
            assert rows[row] in expected[plan.num_decodes :]
    assert set(kinds) <= {"d", "p"}, "each row is of exactly one kind"


@given(plan=plans(), boundaries=cuts)
def test_a_chunk_lies_in_order_and_samples_after_its_last_token(plan, boundaries):
    batch = build_batch(plan, boundaries)
    for slot in set(plan.slots.tolist()):
        positions = batch.positions[batch.slots == slot]
        assert (np.diff(positions) == 1).all(), "earlier tokens in earlier rows"
    sampling = np.flatnonzero(plan.samples)
    assert batch.samples.slots.tolist() == plan.slots[sampling].tolist(), "in plan order"
    assert batch.samples.positions.tolist() == (plan.starts + plan.counts)[sampling].tolist()
    assert batch.slots[batch.samples.rows].tolist() == batch.samples.slots.tolist()
    assert (batch.positions[batch.samples.rows] + 1).tolist() == batch.samples.positions.tolist()


@given(plan=plans(), boundaries=cuts)
def test_each_range_gets_its_share_of_the_decodes(plan, boundaries):
    batch = build_batch(plan, boundaries)
    inner = [cut for cut in boundaries if cut < batch.num_rows]
    for start, stop in zip([0, *inner], [*inner, batch.num_rows]):
        decodes = sum(max(0, min(stop, run.stop) - max(start, run.start)) for run in batch.decodes)
        assert abs(decodes - plan.num_decodes * (stop - start) / max(1, batch.num_rows)) < 1
        for piece in batch.prefills:
            assert piece.stop <= start or piece.start >= stop or (start <= piece.start and piece.stop <= stop)


def test_one_range_keeps_the_order_of_the_plan():
    batch = build_batch(plan_of([(3, 9), (1, 4)], [(0, 5, 3, False), (2, 0, 2, True)]), [64])
    assert batch.slots.tolist() == [3, 1, 0, 0, 0, 2, 2]
    assert batch.positions.tolist() == [9, 4, 5, 6, 7, 0, 1]
    assert batch.samples.rows.tolist() == [0, 1, 6]


def test_the_slot_table_remembers_what_plans_say():
    table = SlotTable(4, max_model_len=10, page_size=4, device=torch.device("cpu"))
    start = SlotStart(2, "a", int32([7, 8, 9]), 0, 0.5, 3, 0.9, 2**63 - 1)
    table.apply(plan_of([], [(2, 0, 3, True)], [start], pages=[(2, 0, 11), (2, 2, 5)]))
    assert table.page_table[2].tolist() == [11, 0, 5]
    parameters = table.temperature[2], table.top_k[2], table.top_p[2], int(table.seed[2])
    assert parameters == (0.5, 3, 0.9, 2**63 - 1)
    samples = build_batch(plan_of([], [(2, 0, 3, True)]), [8]).samples
    table.append(samples, torch.tensor([6]))
    assert table.token_ids(int32([2] * 4), int32(range(4))).tolist() == [7, 8, 9, 6]
    table.apply(plan_of([], [], [SlotStart(2, "b", int32([1]), 0, 0.0, 0, 1.0, 0)]))
    assert table.token_ids(int32([2]), int32([0])).tolist() == [1]
    assert table.temperature[2] == 0.0
