"""The one-ahead loop: while the executor runs step i, step i+1 is planned and handed over.

Works with any Executor, in one thread; other threads hand in requests and cancels. Knows nothing of policy,
Ray or devices.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from scheduler.plan import Cancel, IterationPlan, LoadReport, OutputBatch
from scheduler.ports import Executor, ExecutorError, PendingStep
from scheduler.request import NewRequest
from scheduler.scheduler import Scheduler

_STORE_POLL_S = 0.001  # while requests wait for the KV store's answers, and nothing runs


@dataclass(frozen=True, slots=True)
class _UseSchedules:
    """Let the executor exchange its schedules between two steps."""

    number: int
    done: Future[None]


_Item = NewRequest | Cancel | _UseSchedules


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the executor has been given."""

    plan: IterationPlan
    pending: PendingStep
    late: bool  # the executor had finished computing the step before when it got this one


class EngineLoop:
    """Drives a scheduler and an executor; emits one OutputBatch per step, and one when others have news."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        emit: Callable[[OutputBatch], None],
        step_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """emit is called in the loop's thread and must return soon; step_timeout_s bounds the wait for a step."""
        self._scheduler = scheduler
        self._executor = executor
        self._emit = emit
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._scheduler_lock = threading.Lock()  # held while the scheduler is called
        self._news = threading.Condition()  # guards what follows
        self._inbox: list[_Item] = []
        self._stopping = False
        self._ended = False

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Queue requests for the next plan. From any thread."""
        self._put(requests)

    def cancel(self, cancels: Sequence[Cancel]) -> None:
        """Ask for the end of requests; later than any submit() that has returned. From any thread."""
        self._put(cancels)

    def flush_cache(self) -> int:
        """Forget cached prefixes; how many pages were known. From any thread."""
        with self._scheduler_lock:
            return self._scheduler.flush_cache()

    def use_schedules(self, number: int) -> Future[None]:
        """Have later plans run by this set of schedules (Executor.use_schedules). From any thread.

        Done when the next plan will; with ExecutorError when there will be none.
        """
        done: Future[None] = Future()
        self._put([_UseSchedules(number, done)])
        return done

    def load(self) -> LoadReport:
        """The scheduler's state now. From any thread."""
        with self._scheduler_lock:
            return self._scheduler.load()

    def stop(self) -> None:
        """Let run() return after the steps in flight; requests stay where they are. From any thread."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def run(self) -> None:
        """Loop until stop(). Raises ExecutorError when the executor is lost: no request will go on."""
        flight: _Flight | None = None
        gc.freeze()  # what is there by now stays: looking through all of it for garbage takes longer than a step
        try:
            while flight is not None or not self._stopping:
                flight = self._turn(flight)
        finally:
            gc.unfreeze()
            self._end()

    def _turn(self, flight: _Flight | None) -> _Flight | None:
        """Plan and hand over the next step, then wait for the one in flight. Returns the next one."""
        arrivals = self._take_inbox(self._nap_s(flight))
        for item in arrivals:
            if isinstance(item, _UseSchedules) and item.done.set_running_or_notify_cancel():
                self._exchange(item)
        with self._scheduler_lock:
            now = self._clock()
            for item in arrivals:
                if isinstance(item, NewRequest):
                    self._scheduler.add(item, now)
                elif isinstance(item, Cancel):
                    self._scheduler.cancel(item, now)
            plan = None if self._stopping else self._scheduler.plan(now)
            ends = self._scheduler.take_ends()
        following = None
        if plan is not None:
            late = flight is not None and len(flight.plan.slots) > 0 and flight.pending.done()
            following = _Flight(plan, self._executor.submit(plan), late)
        if ends is not None:
            self._emit(ends)
        if flight is not None:
            result = flight.pending.result(self._step_timeout_s)
            with self._scheduler_lock:
                batch = self._scheduler.finish(flight.plan, result, self._clock(), flight.late)
            self._emit(batch)
        return following

    def _exchange(self, item: _UseSchedules) -> None:
        try:
            self._executor.use_schedules(item.number)
        except Exception as error:
            item.done.set_exception(error)
            raise
        item.done.set_result(None)

    def _nap_s(self, flight: _Flight | None) -> float | None:
        """How long to sleep if nobody hands in anything: for good (None) while idle, else hardly or not at all."""
        if flight is not None:
            return 0.0
        if self._scheduler.is_idle:
            return None
        return _STORE_POLL_S if self._scheduler.is_asking else 0.0

    def _put(self, items: Sequence[_Item]) -> None:
        with self._news:
            self._inbox.extend(items)
            if self._ended:
                self._refuse_exchanges()
            self._news.notify()

    def _end(self) -> None:
        with self._news:
            self._ended = True
            self._refuse_exchanges()

    def _refuse_exchanges(self) -> None:
        for item in self._inbox:
            if isinstance(item, _UseSchedules) and not item.done.done():
                item.done.set_exception(ExecutorError("the engine has ended"))

    def _take_inbox(self, nap_s: float | None) -> list[_Item]:
        """What others have handed in; if there is nothing, sleep until there is, or for nap_s."""
        with self._news:
            if nap_s != 0.0:
                self._news.wait_for(lambda: self._inbox or self._stopping, nap_s)
            arrivals, self._inbox = self._inbox, []
            return arrivals
