"""What a model's layer is made of: named operators that each run on a range of token rows.

An operator says which buffers it reads and writes, so that the order a schedule may choose can be checked
against what the code does. Knows nothing of any architecture or device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

RowsT = TypeVar("RowsT", contravariant=True)


@dataclass(frozen=True, slots=True)
class LayerOperator(Generic[RowsT]):
    """A step of a layer. Buffers have a row per token; what is read and written are the same rows of each."""

    name: str  # as in autosearch.operators
    run: Callable[[int, RowsT], None]  # (layer, rows)
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reads_earlier_rows: tuple[str, ...] = ()  # buffers of which all rows before the range's end are read too
