"""Which schedule an iteration runs by: the fastest one that was measured for batches like it.

Each measured schedule says what batch it was measured on (`planned_for`) and how fast it and the sequential one were.
Where the sequential one was faster, or nothing like the batch was measured, the choice is sequential: a plan that is
slower is never served. Knows nothing of devices or of how schedules were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autosearch.pipeline import PipelineSchedule
from scheduler.plan import IterationPlan

SEQUENTIAL = ""  # the name that stands for it
# How far a batch may be from the nearest measured one: in share of decodes, and in doublings of their mean context.
SHARE_REACH, CONTEXT_REACH = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """By which schedule, and whether that is known to be best for batches like this one."""

    name: str
    is_known: bool


@dataclass(frozen=True, slots=True)
class _Cell:
    """A batch that was measured, and what won there."""

    decode_share: float
    log_context: float
    name: str
    gain: float  # over the sequential schedule

    def distance(self, decode_share: float, log_context: float) -> float:
        """1 at the edge of its reach."""
        share = abs(self.decode_share - decode_share) / SHARE_REACH
        return max(share, abs(self.log_context - log_context) / CONTEXT_REACH)


def gain(schedule: PipelineSchedule) -> float:
    """Over the sequential one, as measured; none where it was only predicted."""
    measured = schedule.measured
    return 0.0 if measured is None else measured.tokens_per_s_per_gpu / measured.sequential_tokens_per_s_per_gpu


def may_be_chosen(schedule: PipelineSchedule) -> bool:
    """Whether any batch may run by it: it is for all of its size, or was measured to be faster."""
    return schedule.planned_for is None or gain(schedule) > 1


class ScheduleChoice:
    """The schedules of one engine by batch size. Those that say no batch are for all batches of their size."""

    def __init__(self, schedules: Iterable[PipelineSchedule]) -> None:
        self._cells: dict[int, list[_Cell]] = {}
        self._always: dict[int, str] = {}
        for schedule in schedules:
            work = schedule.planned_for
            if work is None:
                self._always[schedule.batch_tokens] = schedule.name
                continue
            name = schedule.name if may_be_chosen(schedule) else SEQUENTIAL
            share, log_context = schedule.decode_share or 0.0, math.log2(max(1.0, schedule.mean_context or 0.0))
            self._cells.setdefault(schedule.batch_tokens, []).append(_Cell(share, log_context, name, gain(schedule)))

    def choose_for(self, plan: IterationPlan, batch_tokens: int) -> Choice:
        """For a plan that runs as a batch of that size."""
        decodes = plan.num_decodes
        return self.choose(batch_tokens, decodes, int(plan.starts[:decodes].sum()) + decodes)

    def choose(self, batch_tokens: int, num_decodes: int, context_tokens: int) -> Choice:
        """For a batch of that size with so many decodes, whose contexts sum to context_tokens."""
        if batch_tokens in self._always:
            return Choice(self._always[batch_tokens], True)
        cells = self._cells.get(batch_tokens)
        if not cells:
            return Choice(SEQUENTIAL, False)
        share, log_context = num_decodes / batch_tokens, math.log2(max(1.0, context_tokens / max(1, num_decodes)))
        nearest = min(cell.distance(share, log_context) for cell in cells)
        if nearest > 1:
            return Choice(SEQUENTIAL, False)
        best = max(
            (cell for cell in cells if cell.distance(share, log_context) <= nearest + 1e-9), key=lambda cell: cell.gain
        )
        return Choice(best.name, True)
