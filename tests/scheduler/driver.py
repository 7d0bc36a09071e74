"""Drives a scheduler one iteration ahead of a fake executor, and checks what every consumer relies on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple

from fake_executor import FakeExecutor, FakePending, expected_output
from fake_store import FakeMover, FakeStore

from scheduler.plan import (
    Cancel,
    EngineCapacity,
    IterationPlan,
    MoveCounts,
    MoveKind,
    OutputBatch,
    RequestEnd,
    RequestStart,
    StepStats,
)
from scheduler.request import FinishReason, NewRequest
from scheduler.scheduler import Scheduler, SchedulerConfig


class Driver:
    """Integrity is checked after every call; outputs must come without gaps and end once."""

    def __init__(
        self, capacity: EngineCapacity, config: SchedulerConfig | None = None, store: FakeStore | None = None
    ) -> None:
        self.capacity = capacity
        self.store = store
        self.executor = FakeExecutor(capacity, store)
        self.scheduler = Scheduler(config or SchedulerConfig(), capacity, store)
        self.now = 0.0
        self.requests: dict[str, NewRequest] = {}
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.starts: dict[str, RequestStart] = {}  # the latest of each
        self.ends: dict[str, RequestEnd] = {}
        self.cancelled: set[str] = set()
        self.plans: list[IterationPlan] = []
        self.stats: list[StepStats] = []
        self._flight: tuple[IterationPlan, FakePending] | None = None

    @property
    def live(self) -> list[str]:
        """Ids that have been added and have not ended, as far as anyone was told."""
        return [request_id for request_id in self.requests if request_id not in self.ends]

    def add(self, *requests: NewRequest) -> None:
        """Hand in requests."""
        for request in requests:
            self.requests[request.request_id] = request
            self.executor.model.salts[request.request_id] = request.cache_salt
            self.scheduler.add(request, self.now)
            self.scheduler.check_integrity()
        self._take(self.scheduler.take_ends())

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ask for the end of one."""
        self.cancelled.add(request_id)
        self.scheduler.cancel(Cancel(request_id, reason), self.now)
        self.scheduler.check_integrity()
        self._take(self.scheduler.take_ends())

    def step(self) -> bool:
        """Plan the next iteration, then finish the one in flight; False when there was neither."""
        before = self._flight
        self._flight = self._plan()
        if before is not None:
            self._finish(before)
        if before is None and self._flight is None and self.store is not None and self.scheduler.is_asking:
            self.now += 0.1  # nothing runs while all wait for the store's answers
            return True
        return before is not None or self._flight is not None

    def land(self) -> None:
        """Finish the iteration in flight without planning another."""
        before, self._flight = self._flight, None
        if before is not None:
            self._finish(before)

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do; fails when that takes too long."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.load()}")
        assert not self.live, "idle, but some requests have not ended"

    def check_outputs(self) -> None:
        """Whoever ended by itself has what it yields alone; the others have the beginning of it."""
        for request_id, end in self.ends.items():
            if end.finish_reason is FinishReason.FAILED and not self.outputs[request_id]:
                continue
            expected = expected_output(self.requests[request_id], self.capacity.max_model_len)
            output = self.outputs[request_id]
            assert output == expected[: len(output)], request_id
            by_itself = end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if by_itself and request_id not in self.cancelled:
                assert output == expected, request_id
                stopped = output[-1] in self.requests[request_id].sampling.stop_token_ids
                assert end.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    def check_baseline(self) -> None:
        """Nothing is left behind when idle."""
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.live_pages) == (0, 0, 0, 0)
        assert load.free_pages + load.cached_pages == load.total_pages
        if self.store is not None:
            assert self.store.released == self.store.asked.keys(), "a ticket is never released"
            assert self.executor.mover is not None
            assert not self.executor.mover.copies, "a move is left"

    @property
    def mover(self) -> FakeMover:
        """Of an executor with a store."""
        assert self.executor.mover is not None
        return self.executor.mover

    def count_moves(self) -> MoveCounts:
        """Of all steps together."""
        columns = zip(*(astuple(stats.moves) for stats in self.stats))
        return MoveCounts(*(sum(column) for column in columns))

    @property
    def num_preemptions(self) -> int:
        """So far."""
        return sum(stats.num_preemptions for stats in self.stats)

    def _plan(self) -> tuple[IterationPlan, FakePending] | None:
        num_preemptions = self.scheduler._residence.num_preemptions
        plan = self.scheduler.plan(self.now)
        preempted = self.scheduler._residence.num_preemptions > num_preemptions
        self.scheduler.check_integrity()
        if plan is not None and preempted:  # a load that has ended makes a start too, but of one that was placed before
            assert self.store is not None or not plan.slot_starts, "preempts one and starts another at once"
            assert all(move.kind is MoveKind.STORE for move in plan.moves), "preempts one and loads for another"
        self._take(self.scheduler.take_ends())
        if plan is None:
            return None
        self.plans.append(plan)
        return plan, self.executor.submit(plan)

    def _finish(self, flight: tuple[IterationPlan, FakePending]) -> None:
        plan, pending = flight
        batch = self.scheduler.finish(plan, pending.result(), self.now)
        self.scheduler.check_integrity()
        assert batch.stats is not None
        self.stats.append(batch.stats)
        self._take(batch)

    def _take(self, batch: OutputBatch | None) -> None:
        if batch is None:
            return
        for start in batch.starts:
            assert start.request_id not in self.ends, f"{start.request_id} starts after its end"
            self.starts[start.request_id] = start
        columns = zip(batch.request_ids, batch.token_ids.tolist(), batch.num_output_tokens.tolist(), strict=True)
        for request_id, token, num_output_tokens in columns:
            assert request_id not in self.ends, f"{request_id} gets a token after its end"
            assert request_id in self.starts, f"{request_id} gets a token before it has started"
            self.outputs[request_id].append(token)
            assert num_output_tokens == len(self.outputs[request_id]), f"{request_id}: a token is lost or repeated"
        for end in batch.ends:
            assert end.request_id not in self.ends, f"{end.request_id} ends twice"
            assert end.num_output_tokens == len(self.outputs[end.request_id])
            assert 0 <= end.num_cached_tokens <= max(0, len(self.requests[end.request_id].prompt_token_ids) - 1)
            assert end.num_cpu_cached_tokens + end.num_ssd_cached_tokens <= end.num_cached_tokens
            if (start := self.starts.get(end.request_id)) is not None:
                assert (start.num_cached_tokens, start.queue_s) == (end.num_cached_tokens, end.queue_s)
                tiers = start.num_cpu_cached_tokens, start.num_ssd_cached_tokens
                assert tiers == (end.num_cpu_cached_tokens, end.num_ssd_cached_tokens)
                num_preemptions = end.num_preemptions - start.num_preemptions
                # A start in the plan in flight is told with its result: it may be preempted again before that.
                in_flight = () if self._flight is None else self._flight[0].slot_starts
                most = 1 + sum(start.request_id == end.request_id for start in in_flight)
                # After a load a request may be preempted again before its first row, which tells of its start.
                assert 0 <= num_preemptions <= (most if self.store is None else 100), (
                    "a preempted one has not come back"
                )
            self.ends[end.request_id] = end
