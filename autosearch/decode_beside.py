"""A family of schedules for one GPU: decode attention beside other rows' GEMMs, and nothing else split.

A batch lists its decodes first. Cut between decodes and prefill rows, or within the decodes, it becomes two
nano-batches of which the first has most of the attention: while that runs on a part of the SMs, the other one's
projections run on the rest; all else runs on whole batches and all SMs. When the GEMMs have ended, their SMs help
with the attention. So a layer has one phase in which two resources are busy, two hand-overs and few waits. Knows
nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosearch.operators import Operator
from autosearch.pipeline import NanoOperation, PipelineSchedule

ATTENTION = ("decode_attention", "prefill_attention")
GEMM_LANE, ATTENTION_LANE = 0, 1
ROW_STEP = 128  # rows of a GEMM tile
SM_STEP = 8  # the smallest partition on Hopper
KERNELS = ("cuda", "cuda-wide", "cuda-small")  # decode attention that keeps many bytes on their way per SM


def decode_beside(
    operators: Sequence[Operator],
    batch_tokens: int,
    split: int,
    attention_share: float,
    num_beside: int = 3,
    kernel: str = "",
) -> PipelineSchedule:
    """The schedule that has decode attention of rows [0, split) beside what follows attention of the other rows.

    attention_share: of the SMs, for attention. num_beside: how many operators, from the one after attention, the
    other rows run beside it; what is left of them runs after it. kernel: variant of decode attention while SMs are
    shared.
    """
    names = [operator.name for operator in operators]
    first = names.index(ATTENTION[-1]) + 1
    before, beside, after = names[: first - 2], names[first : first + num_beside], names[first + num_beside :]
    rest = 1 - attention_share

    def whole(name: str, start: int = 0, end: int = batch_tokens) -> NanoOperation:
        return NanoOperation(name, start, end)

    decode, prefill = ATTENTION
    operations = [whole(name) for name in (*before, prefill)]
    prefilled = (len(operations) - 1,)
    operations += [
        NanoOperation(decode, 0, split, ATTENTION_LANE, attention_share, kernel, after=prefilled),
        NanoOperation(decode, split, batch_tokens, GEMM_LANE, rest, kernel),
        *(NanoOperation(name, split, batch_tokens, GEMM_LANE, rest) for name in beside),
        NanoOperation(decode, 0, split, GEMM_LANE, rest, kernel, helps=True),
        *(whole(name, 0, split) for name in beside),
        *(whole(name) for name in after),
    ]
    parts = ("decode-beside", f"{batch_tokens}-{split}-{attention_share:.3f}-{num_beside}", kernel)
    name = "-".join(part for part in parts if part)
    return PipelineSchedule(name, batch_tokens, tuple(operations))


def candidates(
    operators: Sequence[Operator], batch_tokens: int, num_decodes: int, num_sms: int
) -> list[PipelineSchedule]:
    """What is worth measuring for a batch with so many decodes: the cut, operators beside attention, its SMs.

    Cuts after the decodes, and within them, where the GEMMs' SMs have attention of the other rows to do first. Empty
    where there are no decodes or no whole tile of other rows.
    """
    num_after = len(operators) - 1 - [operator.name for operator in operators].index(ATTENTION[-1])
    cut = -(-num_decodes // ROW_STEP) * ROW_STEP
    within = {ROW_STEP * round(num_decodes * share / ROW_STEP) for share in (0.5, 0.75)} - {cut}
    # All operators beside attention but the last, in each kernel; all of them; with a tile of rows less beside it.
    kinds = [(cut, num_after - 1, kernel, SM_STEP) for kernel in KERNELS]
    kinds += [(cut, num_after, KERNELS[0], SM_STEP), (cut + ROW_STEP, num_after - 1, KERNELS[0], SM_STEP)]
    kinds += [
        (less, beside, KERNELS[0], 2 * SM_STEP) for less in sorted(within) for beside in (num_after - 1, num_after)
    ]
    return [
        decode_beside(operators, batch_tokens, split, sms / num_sms, num_beside, kernel)
        for split, num_beside, kernel, step in kinds
        if num_decodes > 0 and 0 < split < batch_tokens
        for sms in range(5 * SM_STEP, num_sms - 5 * SM_STEP, step)
    ]
