"""What an executor of one rank can do beyond running plans: take other schedules while it serves.

Knows nothing of devices, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autosearch.pipeline import PipelineSchedule
from scheduler.ports import Executor


class RankExecutor(Executor, Protocol):
    """An executor that holds sets of schedules by number; `use_schedules` says which one later plans run by."""

    def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """Make a set ready to be used, beside the iterations: may take seconds. From any thread.

        Raises worker.schedule_sets.SchedulesRefusedError, with nothing changed.
        """

    def drop_schedules(self, number: int) -> None:
        """Forget a set that is not to be used after all; unknown ones are ignored. From any thread."""
