"""The protocols that others implement for the scheduler: how it reaches the workers.

Knows nothing of Ray, torch or devices. `worker.executor` implements it in process, `scheduler.actor`
by calls to worker actors, and tests by a fake.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.plan import EngineCapacity, IterationPlan, StepResult


class ExecutorError(RuntimeError):
    """The executor is lost (a dead or silent rank): nothing in flight will ever finish."""


class PendingStep(Protocol):
    """A plan on its way through the executor."""

    def done(self) -> bool:
        """Whether result() would return (or raise) at once."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step. Raises ExecutorError when it cannot finish, or not within timeout_s."""


class Executor(Protocol):
    """All ranks of one instance. Runs plans strictly in the order of submission."""

    @property
    def capacity(self) -> EngineCapacity:
        """The fitted limits; constant for the executor's life."""

    def submit(self, plan: IterationPlan) -> PendingStep:
        """Hand over a plan and return at once; earlier plans may still be running."""

    def close(self) -> None:
        """Free everything. Idempotent."""
