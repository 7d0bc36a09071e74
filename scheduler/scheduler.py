"""The central scheduler: decides what every iteration computes, one iteration ahead of the executor.

Single-threaded and passive: the loop calls it, the clock is an argument. Knows nothing of executors, threads,
devices or text.

A request waits, is placed in a slot, has its known tokens prefilled in chunks, decodes one token per iteration
and ends. Plans are made before the results of the plan before are known, so a slot and its pages are given to
others only when the last planned step that touches them has finished. With a KV store, pages that it holds are
loaded instead of computed, and pages that become full are given to it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler import batcher
from scheduler.admission import Admission
from scheduler.deadlines import Deadlines
from scheduler.kv_transfer import KVTransfer
from scheduler.latency_cap import LatencyCap
from scheduler.memory_forecast import OutputLengths
from scheduler.plan import (
    Cancel,
    EngineCapacity,
    IterationPlan,
    LoadReport,
    MoveCounts,
    OutputBatch,
    RequestEnd,
    RequestStart,
    StepResult,
    StepStats,
)
from scheduler.plan_draft import PlanDraft
from scheduler.planner import Planner
from scheduler.ports import ExecutorError, PrefixStore
from scheduler.refusal import refusal, token_limit
from scheduler.request import FinishReason, NewRequest
from scheduler.residence import Residence
from scheduler.scheduler_config import SchedulerConfig
from scheduler.slot_table import SlotState, has_result
from scheduler.tracked_request import TrackedRequest
from scheduler.unfinished_step import UnfinishedStep

Int32 = NDArray[np.int32]

__all__ = ["Scheduler", "SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The token columns of an OutputBatch."""

    request_ids: tuple[str, ...]
    token_ids: Int32
    num_output_tokens: Int32


_NO_MOVES = MoveCounts()
_NO_TOKENS = _Tokens((), np.empty(0, np.int32), np.empty(0, np.int32))


class Scheduler:
    """All requests of one instance."""

    def __init__(self, config: SchedulerConfig, capacity: EngineCapacity, store: PrefixStore | None = None) -> None:
        """store: where to ask for KV of earlier tokens; the executor must then carry out the plans' moves.

        Raises ValueError for a store without prefix caching, which keeps account of what pages hold.
        """
        if store is not None and not config.enable_prefix_caching:
            raise ValueError("a KV store needs prefix caching: set enable_prefix_caching, or use no store")
        self._config = config
        self._capacity = capacity
        self._page_size = capacity.page_size
        self._lengths = OutputLengths(capacity.max_model_len)
        self._residence = Residence(capacity)
        self._slots, self._pool, self._waiting = self._residence.slots, self._residence.pool, self._residence.waiting
        self._cap: LatencyCap | None = None
        if config.target_itl_s is not None:
            self._cap = LatencyCap([bucket.batch_tokens for bucket in capacity.buckets], config.target_itl_s)
        self._transfer: KVTransfer | None = None
        if store is not None:
            self._transfer = KVTransfer(config.store, store, capacity, self._residence)
        admission = Admission(config, capacity, self._residence, self._lengths, self._transfer)
        self._planner = Planner(config, capacity, self._residence, admission, self._cap, self._transfer)
        self._requests: dict[str, TrackedRequest] = {}  # all that have not ended
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._num_preemptions_told = 0
        self._unfinished: deque[UnfinishedStep] = deque()  # in step order
        self._ends: list[RequestEnd] = []  # not yet told

    # --- what comes in ---

    def add(self, request: NewRequest, now: float) -> None:
        """Queue a request. One that can never run ends as FAILED; nothing is raised."""
        if error := self._refusal(request):
            self._ends.append(RequestEnd(request.request_id, FinishReason.FAILED, 0, 0, 0.0, 0, error))
            return
        limit = token_limit(request, self._capacity)
        tracked = TrackedRequest(request, self._num_arrivals, now, limit, array("i", request.prompt_token_ids))
        self._num_arrivals += 1
        self._requests[request.request_id] = tracked
        self._waiting.push(tracked)
        if self._transfer is not None:
            self._transfer.ask(tracked, now)
        self._deadlines.add(tracked)

    def cancel(self, cancel: Cancel, now: float) -> None:
        """End a request; unknown and ended ids are ignored."""
        request = self._requests.get(cancel.request_id)
        if request is not None:
            self._end(request, cancel.reason, now)

    def flush_cache(self) -> int:
        """Forget what pages hold, so that no later request hits them; how many were known."""
        return self._pool.flush()

    def _refusal(self, request: NewRequest) -> str:
        """Why a request cannot be taken; empty if it can."""
        if request.request_id in self._requests:
            return "a request with this id is running already"
        if len(self._waiting) >= self._config.max_waiting:
            return f"the queue is full: {self._config.max_waiting} requests are waiting"
        return refusal(request, self._capacity)

    # --- one iteration ---

    def plan(self, now: float) -> IterationPlan | None:
        """The next iteration, or None when there is nothing to compute or to move yet."""
        started = time.perf_counter()
        for request in self._deadlines.take_due(self._requests, now):
            self._end(request, FinishReason.EXPIRED, now)
        returned = self._residence.take_returned()
        if self._transfer is not None:
            self._transfer.update(returned, now)
        draft = self._planner.draft(now)
        if not draft.num_rows and not draft.moves and not self._must_hear_of_moves:
            return None
        bucket = batcher.smallest_bucket(self._capacity.buckets, draft.num_tokens)
        plan = draft.build(self._residence.num_planned, bucket)
        self._residence.step_planned(plan)
        num_preemptions = self._residence.num_preemptions - self._num_preemptions_told
        self._num_preemptions_told += num_preemptions
        plan_s, most = time.perf_counter() - started, self._planner.max_tokens
        self._unfinished.append(UnfinishedStep(plan, draft, bucket.batch_tokens, most, num_preemptions, plan_s))
        return plan

    def finish(self, plan: IterationPlan, result: StepResult, now: float, late: bool = False) -> OutputBatch:
        """Take in the result of the oldest unfinished plan; late: the executor had to wait for the plan.

        Raises ExecutorError when the result does not belong to the plan.
        """
        unfinished = self._unfinished.popleft()
        assert unfinished.plan is plan, "plans must be finished in order"
        if result.step != plan.step or len(result.sampled) != np.count_nonzero(plan.samples):
            raise ExecutorError(f"step {plan.step} was answered by a result that is not its own")
        self._residence.step_finished()
        counts = self._take_moves(result)
        self._learn_time(unfinished, result)
        starts = self._starts(unfinished.draft)
        wasted = int(plan.counts[self._slots.state[plan.slots] == SlotState.ENDED].sum())
        for fault in result.faults:
            if self._slots.state[fault.slot] not in (SlotState.FREE, SlotState.ENDED):
                self._end(self._slots.request(fault.slot), FinishReason.FAILED, now, fault.message)
        self._save_full_pages(plan)
        tokens = self._take_tokens(plan, result, now)
        self._residence.free_left()
        return self._batch(tokens, unfinished.stats(result, wasted, late, counts), starts)

    def take_ends(self) -> OutputBatch | None:
        """Ends that no iteration has told yet (refused, cancelled, expired), or None."""
        return self._batch(_NO_TOKENS, None) if self._ends else None

    @property
    def is_idle(self) -> bool:
        """Whether plan() has nothing to do until something is added. Plans may still be unfinished."""
        return not self._requests and (self._transfer is None or not self._transfer.is_busy)

    @property
    def is_asking(self) -> bool:
        """Whether answers of the KV store are due: they come without anybody being told."""
        return self._transfer is not None and self._transfer.is_asking

    @property
    def _must_hear_of_moves(self) -> bool:
        """Whether moves are on the way and no plan is, whose result could tell of them."""
        return self._transfer is not None and self._transfer.num_moving > 0 and not self._unfinished

    def load(self) -> LoadReport:
        """The state between two iterations."""
        slots, pool = self._slots, self._pool
        coming_back = slots.where(SlotState.PREEMPTED)
        return LoadReport(
            num_running=len(slots.live()),
            num_waiting=len(self._waiting) + len(coming_back),
            num_waiting_tokens=self._waiting.num_tokens + int(slots.known[coming_back].sum()),
            live_pages=pool.num_live,
            cached_pages=pool.num_cached,
            free_pages=pool.num_free,
            total_pages=pool.num_pages,
            store_is_off=self._transfer is not None and self._transfer.is_off,
        )

    # --- taking in a result ---

    def _take_moves(self, result: StepResult) -> MoveCounts:
        """Moves that have ended. Raises ExecutorError for one that was never asked for."""
        if self._transfer is not None:
            return self._transfer.finish(result.moves)
        if result.moves:
            raise ExecutorError("the result of a move came, and there is no KV store")
        return _NO_MOVES

    def _learn_time(self, unfinished: UnfinishedStep, result: StepResult) -> None:
        """How long the step took: between two tokens, where latency has a target; for a prompt, where it could load."""
        if self._transfer is not None:
            num_tokens = unfinished.draft.num_tokens
            self._transfer.costs.computed(num_tokens, num_tokens - unfinished.plan.num_decodes, result.run_s)
        if self._cap is not None and len(unfinished.plan.slots):
            # Decodes had a row in the step before too: the device's wait for this one lies between their tokens.
            waited_s = result.idle_s if unfinished.plan.num_decodes else 0.0
            self._cap.record(unfinished.batch_tokens, waited_s + result.run_s)

    def _save_full_pages(self, plan: IterationPlan) -> None:
        """Pages that the plan has filled: keep their tokens, and let the prefix cache know them."""
        ends = plan.starts + plan.counts
        fills = ends // self._page_size > plan.starts // self._page_size
        rows = np.flatnonzero(fills & has_result(self._slots.state[plan.slots]))
        for slot, end in zip(plan.slots[rows].tolist(), ends[rows].tolist()):
            request = self._slots.request(slot)
            num_full = end // self._page_size
            self._slots.save_tokens(slot, num_full * self._page_size)
            if self._config.enable_prefix_caching:
                request.digest(num_full - 1, self._page_size)
                new = slice(request.num_published, num_full)
                self._pool.publish(request.pages[new], request.digests[new])
                request.num_published = num_full
                if self._transfer is not None:
                    self._transfer.saves.filled(request.digests[new])

    def _take_tokens(self, plan: IterationPlan, result: StepResult, now: float) -> _Tokens:
        """Append sampled tokens to their requests, and end those that this completes."""
        table = self._slots
        slots = plan.slots[plan.samples]
        kept = has_result(table.state[slots])
        slots, token_ids = slots[kept], result.sampled[kept].astype(np.int32)
        table.append_tokens(slots, token_ids)
        for slot in slots[table.state[slots] == SlotState.PREEMPTED].tolist():
            table.save_tokens(slot, int(table.known[slot]))
        tokens = _Tokens(tuple(table.ids[slots].tolist()), token_ids, table.known[slots] - table.prompt_len[slots])
        stopped = table.stopped(slots, token_ids)
        complete = table.known[slots] == table.limit[slots]
        for i in np.flatnonzero(stopped | complete).tolist():
            reason = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            self._end(table.request(int(slots[i])), reason, now)
        return tokens

    def _starts(self, draft: PlanDraft) -> tuple[RequestStart, ...]:
        """Of the requests that the plan has started, those that have not ended since."""
        found = (self._requests.get(start.request_id) for start in draft.starts)
        return tuple(
            RequestStart(
                each.request.request_id,
                each.num_cached,
                each.queue_s,
                each.num_preemptions,
                each.num_cpu_cached,
                each.num_ssd_cached,
            )
            for each in found
            if each is not None
        )

    def _batch(self, tokens: _Tokens, stats: StepStats | None, starts: tuple[RequestStart, ...] = ()) -> OutputBatch:
        ends, self._ends = tuple(self._ends), []
        columns = tokens.request_ids, tokens.token_ids, tokens.num_output_tokens
        return OutputBatch(*columns, ends, stats, self.load(), starts)

    # --- ends ---

    def _end(self, request: TrackedRequest, reason: FinishReason, now: float, error: str = "") -> None:
        """A request's one and only end, wherever it is."""
        table, slot = self._slots, request.slot
        num_output = (int(table.known[slot]) if slot >= 0 else len(request.tokens)) - request.prompt_len
        queue_s = request.queue_s if request.queue_s >= 0 else now - request.arrived_s
        request_id = request.request.request_id
        del self._requests[request_id]
        self._ends.append(
            RequestEnd(
                request_id,
                reason,
                num_output,
                request.num_cached,
                queue_s,
                request.num_preemptions,
                error,
                request.num_cpu_cached,
                request.num_ssd_cached,
            )
        )
        if num_output and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.record(num_output)
        if self._transfer is not None:
            self._transfer.leave(request)
        self._residence.remove(request)

    # --- own invariants ---

    def check_integrity(self) -> None:
        """Assert that pages, slots, queue and steps in flight agree. For tests, after every step."""
        self._residence.check_integrity()
        if self._transfer is not None:
            self._transfer.check_integrity()
        with_slot = [request for request in self._requests.values() if request.slot >= 0]
        assert len(self._requests) == len(with_slot) + len(self._waiting), "a request is nowhere"
        assert len(with_slot) == np.count_nonzero(has_result(self._slots.state)), "a slot outlives its request"
        steps = [unfinished.plan.step for unfinished in self._unfinished]
        assert steps == list(range(self._residence.num_finished, self._residence.num_planned)), "a step is lost"
