"""A scripted instance: deterministic tokens, one iteration per step(), and every fault on command."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autosearch.pipeline import PipelineSchedule
from control_plane.instance import InstanceLost
from scheduler.plan import (
    Cancel,
    EngineCapacity,
    LoadReport,
    OutputBatch,
    RequestEnd,
    RequestStart,
    ScheduleBucket,
    StepStats,
)
from scheduler.request import FinishReason, NewRequest
from worker.schedule_sets import SchedulesRefusedError

PAGE_SIZE = 16
QUEUE_S = 0.001  # what each request is said to have waited


def token_at(prompt: Sequence[int], position: int, vocab_size: int = 256) -> int:
    """What this model says: output token `position` after the prompt."""
    return (7 * sum(prompt) + 3 * position) % (vocab_size - 10) + 10


def output_of(prompt: Sequence[int], count: int, vocab_size: int = 256) -> list[int]:
    return [token_at(prompt, position, vocab_size) for position in range(count)]


def capacity(max_model_len: int = 512, max_slots: int = 8, num_pages: int = 1000, batch_tokens: int = 64):
    return EngineCapacity(num_pages, PAGE_SIZE, max_slots, max_model_len, (ScheduleBucket(0, batch_tokens),))


@dataclass
class _Run:
    request: NewRequest
    steps_waited: int = 0  # in the queue
    prefilled: int = 0
    num_output: int = 0


class FakeInstance:
    """As an Instance. With auto=True it steps by itself while it has work; otherwise tests call step()."""

    def __init__(self, name="fake-0", *, auto=True, step_s=0.001, chunk=64, vocab_size=256, **sizes):
        self.name = name
        self.capacity = capacity(**sizes)
        self.step_s = step_s
        self.chunk = chunk  # prompt tokens per step and request
        self.vocab_size = vocab_size
        self.num_cached = 0  # prompt tokens that each request is said not to have computed
        self.from_store = (0, 0)  # of these, from a KV store's memory and its SSD
        self.fail_on: dict[tuple[int, ...], str] = {}  # prompts that end as FAILED, with what message
        self.submitted: list[NewRequest] = []
        self.cancelled: list[Cancel] = []
        self.prepared: dict[int, Sequence[PipelineSchedule]] = {}  # sets of schedules
        self.used: list[int] = []  # their numbers
        self.refuses = ""  # why sets are refused
        self.ready_to_prepare = asyncio.Event()
        self.ready_to_prepare.set()
        self.submit_calls = 0
        self.num_steps = 0
        self.stalled = False
        self.closed = False
        self._lost: str | None = None
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._outputs: list[OutputBatch] = []
        self._news = asyncio.Event()
        self._work = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._step_on()) if auto else None

    # As an Instance

    async def submit(self, requests):
        self._check()
        self.submit_calls += 1
        self.submitted += requests
        self._waiting += [_Run(request) for request in requests]
        self._work.set()

    async def cancel(self, cancels):
        self._check()
        self.cancelled += cancels
        ends = []
        for cancel in cancels:
            for runs in (self._waiting, self._running):
                for run in [run for run in runs if run.request.request_id == cancel.request_id]:
                    runs.remove(run)
                    ends.append(self._end(run, cancel.reason))
        self._put([], ends, None)

    async def next_outputs(self):
        while not self._outputs:
            self._check()
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs

    async def flush_cache(self):
        self._check()
        return 5

    async def prepare_schedules(self, number, schedules):
        await self.ready_to_prepare.wait()
        self._check()
        if self.refuses:
            raise SchedulesRefusedError(self.refuses)
        self.prepared[number] = schedules

    async def use_schedules(self, number):
        self._check()
        assert number in self.prepared
        self.used.append(number)

    async def drop_schedules(self, number):
        self._check()
        self.prepared.pop(number, None)

    async def close(self):
        self.closed = True
        self._lost = self._lost or "closed"
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._news.set()

    # On command

    def lose(self, reason="the fake instance was lost"):
        self._lost = reason
        self._news.set()

    def step(self, count=1):
        for _ in range(count):
            self._step()

    @property
    def num_held(self) -> int:
        """Requests that still take up room here."""
        return len(self._waiting) + len(self._running)

    # Inside

    def _check(self):
        if self._lost is not None:
            raise InstanceLost(self._lost)

    async def _step_on(self):
        while self._lost is None:
            await self._work.wait()
            await asyncio.sleep(self.step_s)
            if self.num_held == 0:
                self._work.clear()
            elif not self.stalled:
                self._step()

    def _step(self):
        starts = []
        while self._waiting and len(self._running) < self.capacity.max_slots:
            self._running.append(self._waiting.pop(0))
            request_id = self._running[-1].request.request_id
            starts.append(RequestStart(request_id, self.num_cached, QUEUE_S, 0, *self.from_store))
        tokens, ends, num_tokens, num_decodes = [], [], 0, 0
        for run in list(self._running):
            prompt, sampling = run.request.prompt_token_ids, run.request.sampling
            if prompt in self.fail_on:
                self._running.remove(run)
                ends.append(self._end(run, FinishReason.FAILED, self.fail_on[prompt]))
                continue
            if run.prefilled < len(prompt):
                count = min(self.chunk, len(prompt) - run.prefilled)
                run.prefilled += count
                num_tokens += count
                if run.prefilled < len(prompt):
                    continue
            else:
                num_tokens += 1
                num_decodes += 1
            token = token_at(prompt, run.num_output, self.vocab_size)
            run.num_output += 1
            tokens.append((run.request.request_id, token, run.num_output))
            reason = None
            if token in sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif run.num_output >= sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._running.remove(run)
                ends.append(self._end(run, reason))
        stats = StepStats(
            step=self.num_steps,
            num_tokens=num_tokens,
            batch_tokens=self.capacity.max_batch_tokens,
            max_batch_tokens=self.capacity.max_batch_tokens,
            num_decodes=num_decodes,
            num_prompt_tokens=num_tokens - num_decodes,
            num_wasted_tokens=0,
            num_preemptions=0,
            prefix_queries=num_tokens - num_decodes,
            prefix_hits=0,
            late=False,
            plan_s=0.0001,
            idle_s=0.0002,
            run_s=0.001,
        )
        self.num_steps += 1
        self._put(tokens, ends, stats, starts)

    def _end(self, run, reason, error=""):
        cached, of_store = self.num_cached, self.from_store
        return RequestEnd(run.request.request_id, reason, run.num_output, cached, QUEUE_S, 0, error, *of_store)

    def _put(self, tokens, ends, stats, starts=()):
        live = sum(-(-(len(run.request.prompt_token_ids) + run.num_output) // PAGE_SIZE) for run in self._running)
        load = LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=sum(len(run.request.prompt_token_ids) for run in self._waiting),
            live_pages=live,
            cached_pages=0,
            free_pages=self.capacity.num_pages - live,
            total_pages=self.capacity.num_pages,
        )
        ids = tuple(request_id for request_id, _, _ in tokens)
        assert max(Counter(ids).values(), default=1) == 1
        token_ids = np.array([token for _, token, _ in tokens], np.int32)
        positions = np.array([position for _, _, position in tokens], np.int32)
        self._outputs.append(OutputBatch(ids, token_ids, positions, tuple(ends), stats, load, tuple(starts)))
        self._news.set()
