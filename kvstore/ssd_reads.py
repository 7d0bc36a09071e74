"""Which of the records that are wanted can be read at once: those that lie side by side, as a chain's mostly do.

Pure; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Read(NamedTuple):
    """One record that is wanted."""

    number: int  # among those asked for
    key: bytes
    into: memoryview  # a slot
    handle: int  # of the SSD tier, pinned
    offset: int  # of all segments' bytes


def side_by_side(reads: Iterable[Read], segment_bytes: int) -> list[list[Read]]:
    """Runs of records each of which begins where the one before it ends, in the same segment."""
    runs: list[list[Read]] = []
    for read in sorted(reads, key=lambda each: each.offset):
        last = runs[-1][-1] if runs else None
        if last is None or read.offset != last.offset + len(last.into) or not read.offset % segment_bytes:
            runs.append([])
        runs[-1].append(read)
    return runs
