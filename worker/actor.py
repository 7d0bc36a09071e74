"""A worker rank as a Ray actor. Knows nothing of placement, planning or clients."""

from __future__ import annotations

import tempfile
import threading
import uuid
from pathlib import Path

import ray

from scheduler.plan import EngineCapacity, IterationPlan, StepResult
from worker.config import WorkerConfig
from worker.executor import Worker


class WorkerService:
    """One rank in a process of its own. Becomes an actor by `WorkerActor`.

    `execute` runs in the order of calls; `progress` and `lifeline` answer meanwhile.
    """

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        self._worker = Worker(config, rank)
        self._progress = "starting"

    def rendezvous(self) -> str:
        """Where all ranks of this node may meet, as a torch.distributed init method: a file, no open port."""
        return (Path(tempfile.gettempdir()) / f"nanoflow-{uuid.uuid4().hex}").as_uri()

    def load(self, rendezvous: str) -> EngineCapacity:
        """Join the other ranks and load the weights; the fitted limits."""
        self._worker.load(self._note_progress, rendezvous)
        return self._worker.capacity

    def execute(self, plan: IterationPlan) -> StepResult:
        """Run one plan."""
        return self._worker.execute(plan)

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


WorkerActor = ray.remote(concurrency_groups={"control": 2})(WorkerService)
