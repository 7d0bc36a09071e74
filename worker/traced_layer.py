"""From operations that were seen on a device to a trace with what each had to do: floating-point operations and bytes.

Work follows from the batch itself: which rows an operation has, and how many keys each of them reads. Knows nothing of
how operations were seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosearch.layer_trace import LayerTrace, Peaks, TracedOperation
from autosearch.operator_costs import Cost, layer_costs
from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from autosearch.workload import Workload
from scheduler.plan import IterationPlan
from worker.folded_norms import NO_PASS
from worker.layer_watch import Seen, Watched


@dataclass(frozen=True, slots=True)
class Where:
    """What was traced, for the picture's title."""

    model: str
    gpu: str
    iteration_ms: float  # that nothing watched
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class Rows:
    """What attention does for each row of a batch."""

    keys: NDArray[np.int64]  # [rows] how many it reads, its own among them
    decodes: NDArray[np.bool_]  # [rows] whether it is a decode's

    @classmethod
    def of_plan(cls, plan: IterationPlan, row_of: NDArray[np.int32]) -> Rows:
        """row_of: [tokens] the row of each of the plan's tokens."""
        counts = plan.counts.astype(np.int64)
        first = np.cumsum(counts) - counts
        keys, decodes = np.empty(len(row_of), np.int64), np.zeros(len(row_of), np.bool_)
        keys[row_of] = np.arange(len(row_of)) + np.repeat(plan.starts.astype(np.int64) - first, counts) + 1
        decodes[row_of[: plan.num_decodes]] = True
        return cls(keys, decodes)


def traced_layer(spec: ModelSpec, rows: Rows, schedule: PipelineSchedule, watched: Watched, where: Where) -> LayerTrace:
    """The trace of the middle layer; what was seen of its neighbours may run beside it."""
    operations = tuple(_operation(spec, rows, schedule, each, watched.middle) for each in watched.seen)
    begin = min(each.begin_us for each in operations if each.layer == 0)
    following = [each.begin_us for each in operations if each.layer == 1]
    end = min(following) if following else max(each.end_us for each in operations)
    return LayerTrace(
        schedule.name,
        where.model,
        where.gpu,
        len(rows.keys),
        begin,
        end,
        where.iteration_ms,
        watched.iteration_ms,
        where.peaks,
        operations,
    )


def _operation(spec: ModelSpec, rows: Rows, schedule: PipelineSchedule, seen: Seen, middle: int) -> TracedOperation:
    op = schedule.operations[seen.index]
    cost = Cost() if op.kernel == NO_PASS else _cost(spec, op.operator, rows, op.start, op.end)
    return TracedOperation(
        op.operator,
        op.start,
        op.end,
        op.lane,
        op.sm_share,
        seen.layer - middle,
        seen.begin_us,
        seen.end_us,
        cost,
        op.helps,
    )


def _cost(spec: ModelSpec, operator: str, rows: Rows, start: int, end: int) -> Cost:
    """Of rows [start, end)."""
    keys, decodes = rows.keys[start:end], rows.decodes[start:end]
    work = Workload(end - start, int(decodes.sum()), float(keys[decodes].sum()), float(keys[~decodes].sum()))
    return layer_costs(spec, 1, work)[operator]
