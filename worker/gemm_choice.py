"""Which GEMM serves which shape: few rows by what was measured once, many rows by measuring at start.

cuBLAS and the persistent kernel are within some per cent of each other, and which is ahead changes with every shape
(wave quantisation): docs/results.md has the table. So each shape of many rows is timed once, when it is first run.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.kernels.gemm import Tile
from worker.kernels.skinny_gemm import SkinnyTile

SKINNY_ROWS = 32  # up to here the skinny kernel reads all weights fastest
DEEP, DEEP_ROWS = 8192, 64  # weights of this depth up to so many rows
MEASURED_ROWS = 512  # from here on plain shapes are timed; between these and the skinny ones cuBLAS was ahead
FULL_WAVES = 0.96  # of the SMs' time: the persistent kernel's tiles fill so much of it where folded norms pay
_ADVANTAGE = 0.98  # a challenger must be this much faster, or noise would choose
_LAUNCHES = 8


def is_skinny(rows: int, depth: int) -> bool:
    """Whether the skinny kernel is the one for so many rows of a weight of this depth."""
    return rows <= (DEEP_ROWS if depth >= DEEP else SKINNY_ROWS)


def skinny_tile(rows: int, columns: int, depth: int) -> SkinnyTile:
    """For a weight [columns, depth]: splits of its depth where it has too few columns to keep every SM reading.

    Parts of more rows are larger: there adding them up costs more than reading gains by many.
    """
    blocks, most = -(-columns // 64), 4 if rows <= SKINNY_ROWS else 2
    splits = 1
    while blocks * splits < 200 and depth // splits > 2048 and splits < most:
        splits *= 2
    return SkinnyTile(splits=splits) if blocks * splits >= 128 else SkinnyTile(columns=32, depth=256, splits=splits)


def filled_share(rows: int, shapes: Sequence[tuple[int, int]], sms: int) -> float:
    """How much of the SMs' time the persistent kernel's tiles fill, over GEMMs with weights of these [columns, depth].

    The last wave of tiles leaves SMs idle, and the last tiles of rows and columns are padded.
    """
    tile, useful, taken = Tile(), 0.0, 0.0
    for columns, depth in shapes:
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
        useful += rows * columns * depth
        taken += -(-tiles // sms) * sms * tile.rows * tile.columns * depth
    return useful / taken


class GemmChoice:
    """Remembers, per shape, which of several ways was the fastest."""

    def __init__(self, timer: Callable[[Callable[[], None]], float] | None = None) -> None:
        """timer: seconds (or any other unit) that one call takes; by default CUDA events."""
        self._timer = timer or _device_time
        self._fastest: dict[tuple[int, ...], int] = {}

    def run(self, shape: tuple[int, ...], ways: Sequence[Callable[[], None]]) -> None:
        """Run the fastest of the ways, which all compute the same; at a shape's first call, all are timed.

        The first is kept unless another is clearly faster. Not to be called first within a graph capture.
        """
        if shape not in self._fastest:
            times = [self._timer(way) for way in ways]
            best = min(range(len(ways)), key=times.__getitem__)
            self._fastest[shape] = best if times[best] < times[0] * _ADVANTAGE else 0
        ways[self._fastest[shape]]()

    @property
    def chosen(self) -> dict[tuple[int, ...], int]:
        """Which way each shape took, by its place among the ways."""
        return dict(self._fastest)


def _device_time(way: Callable[[], None]) -> float:
    """Milliseconds of one call, launches back to back."""
    for _ in range(2):
        way()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_LAUNCHES):
        way()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _LAUNCHES
