"""Work lists for the attention kernels: which block of keys or queries is computed as one unit.

Pure numpy, made on the host once per iteration and used by every layer. Knows nothing of devices; the field
orders are those of `worker.kernels.decode_attention` and `worker.kernels.prefill_attention`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

DECODE_FIELDS = 8  # query row, page table row, first key, end of keys, first partial of the row, part, parts, 0
PREFILL_FIELDS = 4  # first query row, query tokens, position of the first, page table row


def decode_units(
    rows: Int32, slots: Int32, lengths: Int32, *, target: int, shortest: int, align: int
) -> tuple[Int32, int]:
    """Units [n, DECODE_FIELDS], longest first, and the number of partial results that they need.

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
    return units[np.argsort(begin - end, kind="stable")], int(needs.sum())


def prefill_units(rows: Int32, counts: Int32, starts: Int32, slots: Int32, *, tokens: int) -> Int32:
    """Units [n, PREFILL_FIELDS] of at most `tokens` query tokens, those with most keys first.

    Per chunk: its first query row, its number of tokens, the position of its first token, its page table row.
    """
    parts = -(-counts.astype(np.int64) // tokens)
    of = np.repeat(np.arange(len(rows)), parts)
    done = (np.arange(len(of)) - (np.cumsum(parts) - parts)[of]) * tokens
    units = np.zeros((len(of), PREFILL_FIELDS), np.int32)
    units[:, 0] = rows[of] + done
    units[:, 1] = np.minimum(counts[of] - done, tokens)
    units[:, 2] = starts[of] + done
    units[:, 3] = slots[of]
    return units[np.argsort(-(units[:, 2] + units[:, 1]), kind="stable")]
