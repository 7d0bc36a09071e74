"""An engine without a model, for `bench offload`: the scheduler's own code over a device that only counts time.

Plans are made by the real scheduler one iteration ahead, moves go through the real store, and what a request says is
settled beforehand. A page's bytes are its digest, so a load that brought another page would show. Time is simulated:
an iteration takes as long as `Timing` says. Knows nothing of conversations.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from control_plane.bench.offload_local_store import LocalStore
from kvstore.keys import KVKey
from scheduler.plan import (
    EngineCapacity,
    IterationPlan,
    KVMove,
    KVMoveResult,
    MoveKind,
    OutputBatch,
    PrefixAnswer,
    ScheduleBucket,
    StepResult,
)
from scheduler.ports import PrefixStore
from scheduler.request import NewRequest
from scheduler.scheduler import Scheduler

_SSD_WAIT_S = 10.0  # of real time
_ANSWER_WAIT_S = 30.0  # of real time
_EMPTY_STEP_S = 1e-3  # as executors do: a plan without rows waits so long for moves to end


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take, in seconds, in the manner of LLaMA-3-8B on one H200 (docs/results.md)."""

    step_s: float = 4.4e-3  # of an iteration, whatever it holds
    token_s: float = 3e-5  # of each row
    load_page_s: float = 1.9e-4  # of each page from the store: 64 tokens, 8 MiB, at 44 GB/s


class Punctual:
    """A store whose answers are there at once: simulated time must not depend on threads."""

    def __init__(self, inner: PrefixStore) -> None:
        self._inner = inner
        self._answers: list[PrefixAnswer] = []

    @property
    def num_faults(self) -> int:
        """As in PrefixStore."""
        return self._inner.num_faults

    @property
    def is_off(self) -> bool:
        """As in PrefixStore."""
        return self._inner.is_off

    def ask(self, ticket: int, digests: Sequence[bytes]) -> None:
        """Ask, and wait for the answer. Raises TimeoutError if it does not come."""
        self._inner.ask(ticket, digests)
        deadline = time.monotonic() + _ANSWER_WAIT_S
        while not (found := self._inner.take_answers()):
            if time.monotonic() > deadline:
                raise TimeoutError("the store in this process does not answer")
            time.sleep(2e-5)
        self._answers += found

    def take_answers(self) -> list[PrefixAnswer]:
        """Since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def release(self, ticket: int) -> None:
        """As in PrefixStore."""
        self._inner.release(ticket)


@dataclass(slots=True)
class Traffic:
    """Pages moved, and of these the ones that need not have been."""

    num_loaded: int = 0
    num_load_failed: int = 0
    num_loaded_twice: int = 0  # while another load was bringing the same page
    num_stored: int = 0
    num_store_failed: int = 0
    num_stored_twice: int = 0  # given to a store that had the page already


class FakeDevice:
    """Runs plans: samples what was settled, and carries moves out."""

    def __init__(self, timing: Timing, page_size: int, store: LocalStore | None) -> None:
        self.traffic = Traffic()
        self._timing, self._page_size, self._store = timing, page_size, store
        self._answers: dict[str, tuple[int, Sequence[int]]] = {}  # by request: prompt length, output tokens
        self._slots: dict[int, str] = {}
        self._moves: list[tuple[float, float, KVMove]] = []  # on the way: when they are due, how long they take
        self._run_s = 0.0  # of the step that runs
        self._copying_until_s = 0.0
        self._loading: Counter[bytes] = Counter()

    def settle(self, request: NewRequest, output: Sequence[int]) -> None:
        """What the request will be answered."""
        self._answers[request.request_id] = len(request.prompt_token_ids), output

    def start(self, plan: IterationPlan, now: float) -> float:
        """Begin with a plan's moves; when it will have ended."""
        for move in plan.moves:
            if move.kind is MoveKind.LOAD:
                run_s = self._timing.load_page_s * len(move.page_ids)
                self._copying_until_s = max(now, self._copying_until_s) + run_s
                self.traffic.num_loaded_twice += sum(digest in self._loading for digest in move.digests)
                self._loading.update(move.digests)
                self._moves.append((self._copying_until_s, run_s, move))
            else:
                self._moves.append((now, 0.0, move))
        if len(plan.slots):
            self._run_s = self._timing.step_s + self._timing.token_s * plan.num_tokens
        else:
            self._run_s = _EMPTY_STEP_S
        return now + self._run_s

    def finish(self, plan: IterationPlan, now: float) -> StepResult:
        """What came of a plan that ends now."""
        for start in plan.slot_starts:
            self._slots[start.slot] = start.request_id
        rows = np.flatnonzero(plan.samples)
        ends = (plan.starts + plan.counts)[rows].tolist()
        sampled = [self._sample(slot, end) for slot, end in zip(plan.slots[rows].tolist(), ends)]
        due = [each for each in self._moves if each[0] <= now]
        self._moves = [each for each in self._moves if each[0] > now]
        results = tuple(KVMoveResult(move.number, self._carry_out(move), run_s) for _, run_s, move in due)
        return StepResult(plan.step, np.array(sampled, np.int32), (), idle_s=0.0, run_s=self._run_s, moves=results)

    def _sample(self, slot: int, end: int) -> int:
        prompt_len, output = self._answers[self._slots[slot]]
        return output[min(end - prompt_len, len(output) - 1)]  # beyond its end: a token computed in vain

    def _carry_out(self, move: KVMove) -> int:
        assert self._store is not None, "a move without a store"
        if move.kind is MoveKind.STORE:
            return self._save(self._store, move)
        self._loading -= Counter(move.digests)
        num_pages = self._load(self._store, move)
        self.traffic.num_loaded += num_pages
        self.traffic.num_load_failed += len(move.page_ids) - num_pages
        return num_pages

    def _load(self, store: LocalStore, move: KVMove) -> int:
        lease = store.acquire([KVKey(digest) for digest in move.digests], _SSD_WAIT_S)
        if lease is None:
            return 0
        with lease:
            into = bytearray(store.payload_bytes)
            for number in range(len(lease.blocks)):
                if not lease.copy(number, memoryview(into)):
                    return number
                assert into == _contents(move.digests[number], store), "a page of other contents"
            return len(lease.blocks)

    def _save(self, store: LocalStore, move: KVMove) -> int:
        counters = store.service.counters
        num_there = counters["puts_not_needed"]
        lease = store.reserve([KVKey(digest) for digest in move.digests], store.payload_bytes)
        num_there = counters["puts_not_needed"] - num_there
        num_new = 0
        if lease is not None:
            with lease:
                for number in lease.wanted:
                    lease.write(number, _contents(move.digests[number], store))
                num_new = lease.commit()
        store.settle()
        self.traffic.num_stored += num_new
        self.traffic.num_stored_twice += num_there
        self.traffic.num_store_failed += len(move.digests) - num_new - num_there
        return num_new + num_there


def _contents(digest: bytes, store: LocalStore) -> bytes:
    return digest.ljust(store.payload_bytes, b"\0")


class FakeEngine:
    """A scheduler one iteration ahead of its device. Whoever has the clock calls `wake` and `step_ended`."""

    def __init__(self, scheduler: Scheduler, device: FakeDevice) -> None:
        self.scheduler, self.device = scheduler, device
        self._running: IterationPlan | None = None
        self._queued: IterationPlan | None = None

    def submit(self, request: NewRequest, output: Sequence[int], now: float) -> None:
        """Hand in a request that will be answered so."""
        self.device.settle(request, output)
        self.scheduler.add(request, now)

    def wake(self, now: float) -> float | None:
        """Start if it is idle; when the step that this starts will have ended."""
        return self._start(self.scheduler.plan(now), now) if self._running is None else None

    def step_ended(self, now: float) -> tuple[OutputBatch, float | None]:
        """What the step gave that ends now, and when the next one will have ended."""
        plan = self._running
        assert plan is not None, "no step runs"
        batch = self.scheduler.finish(plan, self.device.finish(plan, now), now)
        following = self._queued if self._queued is not None else self.scheduler.plan(now)
        self._running = self._queued = None
        return batch, self._start(following, now)

    def _start(self, plan: IterationPlan | None, now: float) -> float | None:
        if plan is None:
            return None
        self._running = plan
        end_s = self.device.start(plan, now)
        self._queued = self.scheduler.plan(now)
        return end_s


def capacity_of(
    num_pages: int, page_size: int, max_slots: int, max_model_len: int, sizes: Sequence[int]
) -> EngineCapacity:
    """sizes: token rows of the buckets."""
    buckets = tuple(ScheduleBucket(number, size) for number, size in enumerate(sizes))
    return EngineCapacity(num_pages, page_size, max_slots, min(max_model_len, num_pages * page_size), buckets)
