"""Schedules whose norms are computed in the ends of the GEMMs around them, by names of kernels.

The GEMM before a norm adds its product to the residual stream and leaves the rows' sums of squares; the one after it
divides its rows by their root mean square (worker.kernels.gemm). So a norm's own pass over memory is saved, where the
kernel that can do so is as fast as the one that cannot: a measurement decides. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autosearch.pipeline import InvalidScheduleError, PipelineSchedule

ADD, SCALED, NO_PASS = "add", "scaled", "folded"
_KERNELS = {"attn_norm": NO_PASS, "qkv": SCALED, "o": ADD, "ffn_norm": NO_PASS, "up_gate": SCALED, "down": ADD}


def fold_norms(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same schedule with folded norms, under a name of its own."""
    operations = tuple(replace(op, kernel=_KERNELS.get(op.operator, op.kernel)) for op in schedule.operations)
    return replace(schedule, name=f"{schedule.name}-folded", operations=operations)


def is_folded(schedule: PipelineSchedule) -> bool:
    """Whether its norms are. Raises InvalidScheduleError where only some are."""
    folded = {op.kernel == _KERNELS[op.operator] for op in schedule.operations if op.operator in _KERNELS}
    if len(folded) > 1:
        wanted = ", ".join(f"{name}: {kernel}" for name, kernel in _KERNELS.items())
        raise InvalidScheduleError(f"{schedule.name}: norms are folded everywhere or nowhere, by kernels {wanted}")
    return folded == {True}


def folded_too(schedules: Iterable[PipelineSchedule]) -> list[PipelineSchedule]:
    """Those of them that have no folded norms yet, with them."""
    return [fold_norms(schedule) for schedule in schedules if not is_folded(schedule)]
