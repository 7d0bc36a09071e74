"""The protocols that others implement for the scheduler: how it reaches the workers, and asks the KV store.

Knows nothing of Ray, torch or devices. `worker.executor` implements Executor in process, `scheduler.actor`
by calls to worker actors, and tests by a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler.plan import EngineCapacity, IterationPlan, PrefixAnswer, StepResult


class ExecutorError(RuntimeError):
    """The executor is lost (a dead or silent rank): nothing in flight will ever finish."""


class PendingStep(Protocol):
    """A plan on its way through the executor."""

    def done(self) -> bool:
        """Whether result() would return (or raise) at once."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step. Raises ExecutorError when it cannot finish, or not within timeout_s."""


class Executor(Protocol):
    """All ranks of one instance. Runs plans strictly in the order of submission.

    Moves of pages run beside the plans. The executor bounds the time of each: a store that is slow or gone makes a
    move fail, with a result that says so once nothing of it will touch a page any more. Until that result its pages
    are nobody else's, so that one that never came would take them out of use for good. Therefore a move ends within
    StoreConfig.move_timeout_s after all that were started before it; an executor that breaks this counts as lost.
    """

    @property
    def capacity(self) -> EngineCapacity:
        """The fitted limits; constant for the executor's life."""

    def submit(self, plan: IterationPlan) -> PendingStep:
        """Hand over a plan and return at once; earlier plans may still be running."""

    def use_schedules(self, number: int) -> None:
        """Run plans submitted from now on by the set of schedules that all ranks hold ready under this number."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class PrefixStore(Protocol):
    """Asks the KV store which pages of a chain it holds. No call blocks, none raises; an answer may never come.

    The pages themselves are moved by the executor, as plans say.
    """

    @property
    def num_faults(self) -> int:
        """Calls so far that the store did not answer in time, or wrongly."""

    @property
    def is_off(self) -> bool:
        """Whether it is not asked for a while, after faults in a row."""

    def ask(self, ticket: int, digests: Sequence[bytes]) -> None:
        """Which leading pages of this chain does the store hold, on every rank?

        It keeps them, and brings them nearer, until the ticket is released, but not for longer than a time of its
        own. Tickets are used once.
        """

    def take_answers(self) -> list[PrefixAnswer]:
        """Answers since the last call, each once; those of tickets released before may be left out."""

    def release(self, ticket: int) -> None:
        """Nobody waits for this ticket's answer or needs its pages any more. Called once for each."""
