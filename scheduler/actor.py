"""The central scheduler as a Ray actor, and worker actors as its executor.

One scheduler actor per instance. It calls the ranks through `RayExecutor`, hands each step's outputs to
whoever polls `next_outputs`, and dies with its instance: it keeps nothing that must survive. Knows nothing
of placement, restarts or clients.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from scheduler.loop import EngineLoop
from scheduler.move_quorum import MoveQuorum
from scheduler.plan import Cancel, EngineCapacity, IterationPlan, OutputBatch, StepResult
from scheduler.ports import ExecutorError, PrefixStore
from scheduler.request import NewRequest
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig


class RayPendingStep:
    """A plan that all ranks are working on."""

    def __init__(self, refs: list[Any], quorum: MoveQuorum) -> None:
        """refs: of the ranks' results; quorum: of all their moves."""
        self._refs = refs
        self._quorum = quorum

    def done(self) -> bool:
        """Whether every rank has answered (or died)."""
        ready, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        return len(ready) == len(self._refs)

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Rank 0's result, once all ranks are through, with the moves that have ended on all. To be called once.

        Raises ExecutorError when a rank is dead or silent.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rest = list(self._refs)
        while rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, rest = ray.wait(rest, num_returns=1, timeout=left)
            if not ready:
                raise ExecutorError(f"no answer from {len(rest)} of {len(self._refs)} ranks within {timeout_s} s")
            try:
                ray.get(ready)  # a dead rank shows here, before the others wait for it in a collective
            except ray.exceptions.RayError as error:
                raise ExecutorError(f"a rank failed: {_reason(error)}") from error
        results: list[StepResult] = ray.get(self._refs)
        return replace(results[0], moves=self._quorum.take([result.moves for result in results]))


class RayExecutor:
    """All ranks of an instance as worker actors. A rank's calls run in the order of submission."""

    def __init__(self, workers: Sequence[Any], capacity: EngineCapacity) -> None:
        self._workers = list(workers)
        self._capacity = capacity
        self._quorum = MoveQuorum(len(self._workers))

    @property
    def capacity(self) -> EngineCapacity:
        """The limits that every rank agreed on."""
        return self._capacity

    def submit(self, plan: IterationPlan) -> RayPendingStep:
        """Send the plan to every rank."""
        for worker in self._workers:
            worker.execute.remote(plan)
        return RayPendingStep([worker.result.remote() for worker in self._workers], self._quorum)

    def use_schedules(self, number: int) -> None:
        """Between the plans sent before and after: each rank takes them in the order of sending."""
        for worker in self._workers:
            worker.use_schedules.remote(number)

    def close(self) -> None:
        """Nothing to free here: the worker actors belong to the control plane."""


class SchedulerService:
    """The scheduler's loop in a thread, with an asynchronous face. Becomes an actor by `SchedulerActor`."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: EngineCapacity,
        workers: Sequence[Any],
        step_timeout_s: float,
        open_store: Callable[[], PrefixStore] | None = None,
    ) -> None:
        self._outputs: list[OutputBatch] = []
        self._news = asyncio.Event()
        self._error: ExecutorError | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._loop = EngineLoop(
            Scheduler(config, capacity, open_store() if open_store else None),
            RayExecutor(workers, capacity),
            self._emit,
            step_timeout_s=step_timeout_s,
        )

    async def start(self) -> None:
        """Start planning. Call once, before anything else."""
        self._event_loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="scheduler-loop", daemon=True).start()

    async def submit(self, requests: Sequence[NewRequest]) -> None:
        """Queue requests for the next plan."""
        self._loop.submit(requests)

    async def cancel(self, cancels: Sequence[Cancel]) -> None:
        """Ask for the end of requests; unknown and ended ones are ignored."""
        self._loop.cancel(cancels)

    async def flush_cache(self) -> int:
        """Drop all cached pages that no request uses; how many."""
        return await asyncio.to_thread(self._loop.flush_cache)

    async def use_schedules(self, number: int) -> None:
        """Run later plans by this set of schedules, which all ranks hold ready. Raises ExecutorError."""
        await asyncio.wrap_future(self._loop.use_schedules(number))

    async def next_outputs(self, max_wait_s: float) -> list[OutputBatch]:
        """All outputs since the last call; waits for some, and gives [] after max_wait_s as a sign of life.

        Raises ExecutorError when the ranks are lost. One caller at a time.
        """
        if not self._outputs and self._error is None:
            try:
                await asyncio.wait_for(self._news.wait(), max_wait_s)
            except TimeoutError:
                return []
        self._news.clear()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def _run(self) -> None:
        try:
            self._loop.run()
        except ExecutorError as error:
            self._fail(error)
        except Exception as error:  # a fault of ours: the instance is lost, its callers must hear of it
            self._fail(ExecutorError(f"the scheduler failed: {type(error).__name__}: {error}"))
            raise

    def _emit(self, batch: OutputBatch) -> None:
        self._on_event_loop(self._push, batch)

    def _fail(self, error: ExecutorError) -> None:
        self._on_event_loop(self._set_error, error)

    def _on_event_loop(self, function: Any, argument: object) -> None:
        if self._event_loop is None:
            raise RuntimeError("start() comes first")
        self._event_loop.call_soon_threadsafe(function, argument)

    def _push(self, batch: OutputBatch) -> None:
        self._outputs.append(batch)
        self._news.set()

    def _set_error(self, error: ExecutorError) -> None:
        self._error = error
        self._news.set()


def _reason(error: BaseException) -> str:
    """One line: what the rank itself raised, or what Ray says of its end."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


SchedulerActor = ray.remote(SchedulerService)
