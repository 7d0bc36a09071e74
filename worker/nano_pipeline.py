"""The pipeline interpreter: runs a schedule's nano-operations, layer by layer, on the rows that a batch has.

The schedule is data: sequential, nano-batched and searched ones take the same path. Here lanes run one after the
other, in the schedule's issue order. Knows nothing of what an operator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from autosearch.pipeline import PipelineSchedule
from worker.models.layer_operator import LayerOperator

RowsT = TypeVar("RowsT")


class NanoPipeline(Generic[RowsT]):
    """One schedule on one model. The schedule must be valid for the model's operators."""

    def __init__(self, schedule: PipelineSchedule, operators: Mapping[str, LayerOperator[RowsT]]) -> None:
        self.schedule = schedule
        self.boundaries = schedule.boundaries()
        # What helps has nothing to do here: what it would help with has ended.
        own = tuple(op for op in schedule.operations if not op.helps)
        self._operations = tuple((op.start, op.end, operators[op.operator].run) for op in own)

    def run(self, num_rows: int, num_layers: int, rows: Callable[[int, int], RowsT]) -> None:
        """Run all layers on rows [0, num_rows), of at most batch_tokens; rows(start, stop) gives a range of them."""
        steps = [(run, rows(start, min(stop, num_rows))) for start, stop, run in self._operations if start < num_rows]
        for layer in range(num_layers):
            for run, part in steps:
                run(layer, part)
