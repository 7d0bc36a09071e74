"""Work lists for the attention kernels: which block of keys or queries is computed as one unit.

Pure numpy, made on the host once per iteration and used by every layer; `worker.kernels.decode_attention` and
`worker.kernels.prefill_attention` read them. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

DECODE_FIELDS = 8  # query row, page table row, first key, end of keys, first partial of the row, part, parts, 0
PREFILL_FIELDS = 4  # first query row, query tokens, position of the first, page table row
PREFILL_ROWS = 64  # of a prefill tile: query tokens times the query heads of a KV head, as a power of two


def prefill_tokens(group: int) -> int:
    """Query tokens that a prefill tile holds, with `group` query heads per KV head."""
    return PREFILL_ROWS >> (group - 1).bit_length()


def decode_units(
    rows: Int32, slots: Int32, lengths: Int32, *, target: int, shortest: int, align: int, cuts: Sequence[int] = ()
) -> tuple[Int32, int]:
    """Units [n, DECODE_FIELDS] and the number of partial results that they need.

    In the order of the ranges that `cuts`, ascending rows, divide the batch into; longest first within each.

    `lengths` are keys per sequence (> 0). A sequence is split when it is longer than an equal share of all
    keys over `target` units (at least `shortest` keys), so that few long sequences fill the device as many
    short ones do. Cuts fall on multiples of `align`. At most len(rows) + target units.
    """
    lengths = lengths.astype(np.int64)
    share = max(shortest, -(-int(lengths.sum()) // target) if len(lengths) else 0)
    share = -(-share // align) * align
    parts = -(-lengths // share)
    # Even out the parts of one sequence.
    even = -(-lengths // parts)
    span = -(-even // align) * align
    parts = -(-lengths // span)
    of = np.repeat(np.arange(len(rows)), parts)
    first_unit = np.cumsum(parts) - parts
    part = np.arange(len(of)) - first_unit[of]
    begin = part * span[of]
    end = np.minimum(begin + span[of], lengths[of])
    needs = np.where(parts > 1, parts, 0)
    first_partial = np.cumsum(needs) - needs
    units = np.zeros((len(of), DECODE_FIELDS), np.int32)
    for field, column in enumerate((rows[of], slots[of], begin, end, first_partial[of], part, parts[of])):
        units[:, field] = column
    return units[np.lexsort((begin - end, _range_of(rows[of], cuts)))], int(needs.sum())


def prefill_units(
    rows: Int32, counts: Int32, starts: Int32, slots: Int32, *, tokens: int, cuts: Sequence[int] = ()
) -> Int32:
    """Units [n, PREFILL_FIELDS] of at most `tokens` query tokens, none across one of the `cuts`.

    Per chunk: its first query row, its number of tokens, the position of its first token, its page table row. In the
    order of the ranges between the cuts; those with most keys first within each.
    """
    if len(cuts):
        rows, counts, starts, slots = _split(rows, counts, starts, slots, cuts)
    parts = -(-counts.astype(np.int64) // tokens)
    of = np.repeat(np.arange(len(rows)), parts)
    done = (np.arange(len(of)) - (np.cumsum(parts) - parts)[of]) * tokens
    units = np.zeros((len(of), PREFILL_FIELDS), np.int32)
    units[:, 0] = rows[of] + done
    units[:, 1] = np.minimum(counts[of] - done, tokens)
    units[:, 2] = starts[of] + done
    units[:, 3] = slots[of]
    return units[np.lexsort((-(units[:, 2] + units[:, 1]), _range_of(units[:, 0], cuts)))]


def range_ends(units: Int32, cuts: Sequence[int]) -> Int32:
    """How many of the units, of either list, lie before each cut: [cuts]. The last cut is the batch's end."""
    return np.searchsorted(_range_of(units[:, 0], cuts), np.arange(len(cuts)), side="right").astype(np.int32)


def _range_of(rows: NDArray[np.integer], cuts: Sequence[int]) -> NDArray[np.intp]:
    """Which of the ranges between cuts each row lies in."""
    return np.searchsorted(np.asarray(cuts, np.int64), rows, side="right")


def _split(
    rows: Int32, counts: Int32, starts: Int32, slots: Int32, cuts: Sequence[int]
) -> tuple[Int32, Int32, Int32, Int32]:
    """Chunks that lie across a cut become several."""
    inner = [cut for cut in cuts if np.any((rows < cut) & (cut < rows + counts))]
    begins = np.concatenate([rows, *(np.array([cut]) for cut in inner)]) if inner else rows
    begins = np.sort(begins)
    of = np.searchsorted(rows, begins, side="right") - 1
    ends = np.minimum(np.append(begins[1:], np.iinfo(np.int64).max), (rows + counts)[of])
    return begins, ends - begins, starts[of] + begins - rows[of], slots[of]
