"""Records side by side make one read; a gap, another segment or another size in between begins a new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.ssd_reads import Read, side_by_side

SLOT = 4096
SEGMENT = 8 * SLOT


def read_at(slot: int, num_slots: int = 1) -> Read:
    return Read(slot, b"key", memoryview(bytes(num_slots * SLOT)), slot, slot * SLOT)


def test_runs_end_at_gaps_and_segments():
    runs = side_by_side([read_at(slot) for slot in (9, 3, 2, 7, 8, 5)], SEGMENT)
    assert [[read.number for read in run] for run in runs] == [[2, 3], [5], [7], [8, 9]]
    assert side_by_side([], SEGMENT) == []


def test_a_run_has_records_of_any_size():
    runs = side_by_side([read_at(0, 2), read_at(2), read_at(4)], SEGMENT)
    assert [[read.number for read in run] for run in runs] == [[0, 2], [4]]


@given(st.sets(st.integers(0, 40)).flatmap(lambda slots: st.permutations(sorted(slots))))
def test_every_record_is_in_one_run_where_its_bytes_are(slots):
    runs = side_by_side(map(read_at, slots), SEGMENT)
    assert sorted(read.number for run in runs for read in run) == sorted(slots)
    for run in runs:
        assert [read.offset for read in run] == [run[0].offset + SLOT * place for place in range(len(run))]
        assert run[0].offset // SEGMENT == run[-1].offset // SEGMENT
    starts = {run[0].number for run in runs}
    assert all(slot - 1 not in slots or slot % 8 == 0 for slot in starts), "no run is longer than need be"
