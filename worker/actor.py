"""A worker rank as a Ray actor. Knows nothing of placement, planning or clients."""

from __future__ import annotations

import gc
import logging
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import ray

from autosearch.pipeline import PipelineSchedule
from scheduler.plan import EngineCapacity, IterationPlan, StepResult
from scheduler.ports import ExecutorError, PendingStep
from worker.config import WorkerConfig
from worker.rank_executor import RankExecutor

log = logging.getLogger(__name__)


class WorkerService:
    """One rank in a process of its own. Becomes an actor by `WorkerActor`.

    `execute` hands plans over in the order of calls and returns at once, so that a GPU has the next plan while it
    runs one; `result` waits. `progress` and `lifeline` answer meanwhile.
    """

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        # Whoever holds a handle of this actor, as the scheduler does, imports this module: without torch, please.
        from worker import backend

        backend.check(config, rank)
        self._config, self._rank = config, rank
        self._progress = "starting"
        self._executor: RankExecutor | None = None
        self._pending: SimpleQueue[PendingStep | ExecutorError] = SimpleQueue()

    def rendezvous(self) -> str:
        """Where all ranks of this node may meet, as a torch.distributed init method: a file, no open port.

        To be called on one rank, before any is loaded. Raises CapacityError where not all of them would fit.
        """
        from worker import backend

        backend.check_memory_here(self._config)
        return (Path(tempfile.gettempdir()) / f"nanoflow-{uuid.uuid4().hex}").as_uri()

    def load(self, rendezvous: str) -> EngineCapacity:
        """Join the other ranks and load the weights; the fitted limits."""
        from worker import backend

        self._executor = backend.open_executor(self._config, self._rank, self._note_progress, rendezvous)
        gc.collect()
        gc.freeze()  # for as long as the process lives: no step waits while garbage is sought among all of this
        return self._executor.capacity

    def execute(self, plan: IterationPlan) -> None:
        """Hand over one plan. What goes wrong is told by its result()."""
        assert self._executor is not None, "load() comes first"
        try:
            self._pending.put(self._executor.submit(plan))
        except Exception as error:
            log.exception("step %d could not be handed over", plan.step)
            self._pending.put(ExecutorError(f"the step failed: {error}"))

    def use_schedules(self, number: int) -> None:
        """Run plans that are handed over from now on by the set that was prepared under this number."""
        assert self._executor is not None, "load() comes first"
        self._executor.use_schedules(number)

    @ray.method(concurrency_group="schedules")
    def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """Make a set of schedules ready, beside the iterations. Raises SchedulesRefusedError."""
        assert self._executor is not None, "load() comes first"
        self._executor.prepare_schedules(number, schedules)

    @ray.method(concurrency_group="schedules")
    def drop_schedules(self, number: int) -> None:
        """Forget a set that is not to be used after all."""
        assert self._executor is not None, "load() comes first"
        self._executor.drop_schedules(number)

    @ray.method(concurrency_group="results")
    def result(self) -> StepResult:
        """Wait for the first plan whose result has not been asked for. Raises ExecutorError."""
        pending = self._pending.get()
        if isinstance(pending, ExecutorError):
            raise pending
        return pending.result()

    @ray.method(concurrency_group="control")
    def progress(self) -> str:
        """What load() is doing, in one line."""
        return self._progress

    @ray.method(concurrency_group="control")
    def lifeline(self) -> None:
        """Never returns: whoever waits for it hears at once when this process ends."""
        threading.Event().wait()

    def _note_progress(self, what: str, share: float | None) -> None:
        self._progress = what if share is None else f"{what}: {share:.0%}"


WorkerActor = ray.remote(concurrency_groups={"control": 2, "results": 1, "schedules": 1})(WorkerService)
