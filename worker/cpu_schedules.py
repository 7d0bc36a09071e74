"""Schedules on a CPU: each one a pipeline of the decoder's operators, held by name.

Knows nothing of which one an iteration runs by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autosearch.operators import Operator
from autosearch.pipeline import PipelineSchedule, sequential
from worker.models.decoder import Rows
from worker.models.layer_operator import LayerOperator
from worker.nano_pipeline import NanoPipeline
from worker.schedule_choice import SEQUENTIAL


class CpuSchedules:
    """The worker.schedule_sets.Runner of a CPU rank. Pipelines are made by any thread and run by the rank's."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        """operators: of the layer, as schedules know them."""
        self._operators = operators
        self._run: dict[str, LayerOperator[Rows]] = {}
        self._pipelines: dict[str, NanoPipeline[Rows]] = {}
        self._sequential: dict[int, NanoPipeline[Rows]] = {}

    def load(self, operators: Sequence[LayerOperator[Rows]], schedules: Sequence[PipelineSchedule]) -> None:
        """Run on these operators of a model; schedules: to begin with. Raises InvalidScheduleError."""
        self._run = {operator.name: operator for operator in operators}
        for schedule in schedules:
            self.prepare(schedule)

    def pipeline(self, rows: int, name: str) -> NanoPipeline[Rows]:
        """What runs a batch of so many rows by the schedule of that name, or one operator after the other."""
        if name != SEQUENTIAL:
            return self._pipelines[name]
        if rows not in self._sequential:
            self._sequential[rows] = NanoPipeline(sequential(self._operators, rows), self._run)
        return self._sequential[rows]

    def prepare(self, schedule: PipelineSchedule) -> None:
        schedule.validate(self._operators)
        self._pipelines[schedule.name] = NanoPipeline(schedule, self._run)

    def release(self, name: str) -> None:
        self._pipelines.pop(name, None)

    def mark(self) -> Callable[[], None]:
        """Nothing to wait for: iterations run in the thread that exchanges sets."""
        return lambda: None
