"""Choosing a GEMM: by a timer that the test plays."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from worker.gemm_choice import GemmChoice, skinny_tile


@pytest.mark.parametrize(("times", "expected"), [((1.0, 0.5), 1), ((1.0, 0.99), 0), ((0.5, 1.0), 0)])
def test_the_fastest_runs_unless_the_first_is_about_as_fast(times, expected):
    ran, left = [], list(times)
    choice = GemmChoice(timer=lambda way: left.pop(0))
    ways = [lambda: ran.append(0), lambda: ran.append(1)]
    choice.run((1, 2), ways)
    choice.run((1, 2), ways)  # nothing is timed again
    assert ran == [expected, expected]
    assert choice.chosen == {(1, 2): expected}


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 4096), (4096, 14336), (6144, 4096), (28672 // 2, 4096), (128256, 4096), (64, 64)]
)
def test_every_sm_reads(rows, columns, depth):
    tile = skinny_tile(rows, columns, depth)
    blocks = -(-columns // tile.columns) * tile.splits
    assert blocks >= 128 or columns < 4096
    assert depth // tile.splits >= min(depth, 1024)
