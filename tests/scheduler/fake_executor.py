"""An executor without a model: each sampled token is a fixed function of all tokens before it.

It reads them the way a model does, through the page table out of simulated KV pages, which hold token id and
position. So a wrong page, KV that was never written, a wrong range or a page given away too early changes the
tokens or raises. Page table, tokens and rows are applied when a step *runs*, which may be after the next plan
was made.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
from fake_store import FakeMover, FakeStore

from scheduler.plan import EngineCapacity, IterationPlan, MoveKind, ScheduleBucket, SlotFault, StepResult
from scheduler.ports import ExecutorError
from scheduler.request import NewRequest, SamplingParams

VOCAB = 97


def next_token(tokens: list[int], seed: int) -> int:
    """The token that follows; depends on every token, on the order, and on (seed, position) as noise does."""
    state = 1 + seed
    for token in tokens:
        state = (state * 1_000_003 + token + 17) % 2_147_483_647
    return (state * 48_271 + len(tokens)) % 2_147_483_647 % VOCAB


def expected_output(request: NewRequest, max_model_len: int) -> list[int]:
    """What a request yields alone."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    limit = min(len(tokens) + request.sampling.max_tokens, max_model_len)
    while len(tokens) < limit:
        token = next_token(tokens, request.sampling.seed)
        tokens.append(token)
        output.append(token)
        if token in request.sampling.stop_token_ids:
            break
    return output


def make_capacity(
    num_pages: int = 64, page_size: int = 4, max_slots: int = 8, max_model_len: int = 128, batch_tokens: int = 16
) -> EngineCapacity:
    """With two buckets where the batch allows it."""
    sizes = sorted({max(1, batch_tokens // 2), batch_tokens})
    buckets = tuple(ScheduleBucket(id=i, batch_tokens=size) for i, size in enumerate(sizes))
    return EngineCapacity(num_pages, page_size, max_slots, min(max_model_len, num_pages * page_size), buckets)


def make_prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that differ from the first one on when `first` differs."""
    return [(first + 7 * i + i * i) % VOCAB for i in range(length)]


def make_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int = 8,
    stop: tuple[int, ...] = (),
    salt: str = "",
    timeout_s: float | None = None,
    seed: int = 0,
) -> NewRequest:
    """A request with these tokens as prompt, or with so many."""
    tokens = tuple(make_prompt(prompt) if isinstance(prompt, int) else prompt)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop, seed=seed)
    return NewRequest(request_id, tokens, sampling, cache_salt=salt, timeout_s=timeout_s)


@dataclass
class _Slot:
    request_id: str
    known: list[int]  # tokens of the sequence, as far as sent or sampled
    table: dict[int, int] = field(default_factory=dict)  # page index: page
    seed: int = 0


class FakeModel:
    """One rank: slots, page table and KV pages; runs plans one after the other."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        shape = (capacity.num_pages, capacity.page_size)
        self.kv_token = np.full(shape, -1)
        self.kv_position = np.full(shape, -1)
        self.kv_salt = np.full(shape, "", object)
        self.slots: dict[int, _Slot] = {}
        self.next_step = 0
        self.faulty: set[str] = set()  # request ids whose rows fail
        self.salts: dict[str, str] = {}  # of request ids, where KV must not be shared with others

    @property
    def kv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All that its pages hold."""
        return self.kv_token, self.kv_position, self.kv_salt

    def run(self, plan: IterationPlan) -> StepResult:
        """Execute one plan; asserts that it is one that a model could execute."""
        assert plan.step == self.next_step, f"step {plan.step} where {self.next_step} is due"
        self.next_step += 1
        self._check_shape(plan)
        for start in plan.slot_starts:
            assert 0 <= start.num_cached < len(start.token_ids)
            self.slots[start.slot] = _Slot(start.request_id, start.token_ids.tolist(), seed=start.seed)
        for slot, index, page in zip(plan.page_slots.tolist(), plan.page_indexes.tolist(), plan.page_ids.tolist()):
            assert 0 <= page < self.capacity.num_pages
            self.slots[slot].table[index] = page
        self._write_kv(plan)
        sampled = [self._sample(row, plan) for row in np.flatnonzero(plan.samples).tolist()]
        faulty = [slot for slot in plan.slots.tolist() if self.slots[slot].request_id in self.faulty]
        faults = tuple(SlotFault(slot, "its logits are not finite") for slot in faulty)
        return StepResult(plan.step, np.array(sampled, np.int32), faults, idle_s=0.0, run_s=0.001)

    def _check_shape(self, plan: IterationPlan) -> None:
        buckets = {bucket.id: bucket.batch_tokens for bucket in self.capacity.buckets}
        assert plan.num_tokens <= buckets[plan.bucket]
        assert all(size < plan.num_tokens or size >= buckets[plan.bucket] for size in buckets.values())
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot has two rows"
        assert (plan.counts > 0).all()
        assert (plan.counts[: plan.num_decodes] == 1).all()
        assert plan.samples[: plan.num_decodes].all()

    def _write_kv(self, plan: IterationPlan) -> None:
        for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist()):
            for position in range(start, start + count):
                place = self._place(slot, position)
                self.kv_token[place] = self.slots[slot].known[position]
                self.kv_position[place] = position
                self.kv_salt[place] = self._salt(slot)
        for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist()):
            seen = self._read_kv(slot, start + count)
            assert seen == self.slots[slot].known[: start + count], f"slot {slot} reads another's KV"

    def _read_kv(self, slot: int, end: int) -> list[int]:
        """Tokens [0, end) as attention sees them."""
        seen = []
        for position in range(end):
            place = self._place(slot, position)
            assert self.kv_position[place] == position, f"slot {slot}: KV of position {position} is not there"
            assert self.kv_salt[place] == self._salt(slot), f"slot {slot} reads KV of another salt"
            seen.append(int(self.kv_token[place]))
        return seen

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self.slots[slot].table[position // self.capacity.page_size], position % self.capacity.page_size

    def _salt(self, slot: int) -> str:
        return self.salts.get(self.slots[slot].request_id, "")

    def _sample(self, row: int, plan: IterationPlan) -> int:
        slot, end = int(plan.slots[row]), int(plan.starts[row] + plan.counts[row])
        assert len(self.slots[slot].known) == end, f"slot {slot}: token {end} is sampled twice or too early"
        token = next_token(self._read_kv(slot, end), self.slots[slot].seed)
        if self.slots[slot].request_id in self.faulty:
            token = -1  # undefined, says the border
        self.slots[slot].known.append(token)
        return token


class FakePending:
    """Runs its plan, and all before it, when the result is asked for."""

    def __init__(self, executor: FakeExecutor, plan: IterationPlan) -> None:
        self._executor, self._plan = executor, plan

    def done(self) -> bool:
        """Never by itself: the executor is always a step behind, as a busy one is."""
        return False

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Run what is due."""
        return self._executor.finish(self._plan.step)


class FakeExecutor:
    """In the caller's thread, as late as possible.

    Refuses a plan that gives a slot, or writes a page, that another request's rows in flight may still touch.
    """

    def __init__(self, capacity: EngineCapacity, store: FakeStore | None = None) -> None:
        self.model = FakeModel(capacity)
        self.mover = None if store is None else FakeMover(store, self.model.kv)
        self._queued: list[IterationPlan] = []
        self._results: dict[int, StepResult] = {}
        self._tables: dict[int, dict[int, int]] = {}  # as of the last plan handed over
        self._touched: dict[int, dict[int, set[int]]] = {}  # step in flight: slot: pages

    @property
    def capacity(self) -> EngineCapacity:
        """As given."""
        return self.model.capacity

    def submit(self, plan: IterationPlan) -> FakePending:
        """Keep the plan until its result is asked for."""
        assert plan.num_tokens or self.mover is not None, "a plan without rows or moves"
        if self.mover is not None:
            in_flight = [pages for step in self._touched.values() for pages in step.values()]
            self.mover.start(plan, set().union(*in_flight))
        self._check_reuse(plan)
        self._queued.append(plan)
        return FakePending(self, plan)

    def finish(self, step: int) -> StepResult:
        """The result of a step, running it and all before it."""
        while self._queued and self._queued[0].step <= step:
            plan = self._queued.pop(0)
            result = self.model.run(plan)
            moves = () if self.mover is None else self.mover.advance()
            self._results[plan.step] = replace(result, moves=moves)
            del self._touched[plan.step]
        return self._results.pop(step)

    def close(self) -> None:
        """Nothing to free."""

    def _check_reuse(self, plan: IterationPlan) -> None:
        for start in plan.slot_starts:
            assert not any(start.slot in touched for touched in self._touched.values()), "a slot is reused too early"
            self._tables[start.slot] = {}
        for slot, index, page in zip(plan.page_slots.tolist(), plan.page_indexes.tolist(), plan.page_ids.tolist()):
            self._tables[slot][index] = page
        page_size = self.capacity.page_size
        for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist()):
            written = {self._tables[slot][i] for i in range(start // page_size, (start + count - 1) // page_size + 1)}
            for touched in self._touched.values():
                for other, pages in touched.items():
                    assert other == slot or not written & pages, "a page is reused too early"
            if self.mover is not None:
                assert not written & self.mover.pages_of(MoveKind.STORE), "a page is written while it is stored"
        self._touched[plan.step] = {slot: set(self._tables[slot].values()) for slot in plan.slots.tolist()}
        if self.mover is not None:
            touched = set().union(*self._touched[plan.step].values())
            assert not touched & self.mover.pages_of(MoveKind.LOAD), "a row touches a page that loads"


class ThreadedPending:
    """A step in the worker thread's queue."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.outcome: StepResult | Exception | None = None

    def done(self) -> bool:
        """Whether the thread is through with it."""
        return self.event.is_set()

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the thread."""
        if not self.event.wait(timeout_s):
            raise ExecutorError(f"no result within {timeout_s} s")
        if isinstance(self.outcome, StepResult):
            return self.outcome
        raise ExecutorError(str(self.outcome))


class ThreadedExecutor:
    """A fake device: a thread that needs step_s for a step, and may hang or die at a given one."""

    def __init__(self, capacity: EngineCapacity, step_s: float = 0.0, store: FakeStore | None = None) -> None:
        self.model = FakeModel(capacity)
        self.mover = None if store is None else FakeMover(store, self.model.kv)
        self.step_s = step_s
        self.hang_at: int | None = None
        self.die_at: int | None = None
        self.max_queued = 0
        self._condition = threading.Condition()
        self._queue: list[tuple[IterationPlan, ThreadedPending]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> EngineCapacity:
        """As given."""
        return self.model.capacity

    def submit(self, plan: IterationPlan) -> ThreadedPending:
        """Queue the plan for the thread."""
        pending = ThreadedPending()
        with self._condition:
            self._queue.append((plan, pending))
            self.max_queued = max(self.max_queued, len(self._queue))
            self._condition.notify()
        return pending

    def close(self) -> None:
        """Stop the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                plan, pending = self._queue[0]
            if plan.step == self.hang_at:
                return
            time.sleep(self.step_s)
            try:
                pending.outcome = RuntimeError("the rank died") if plan.step == self.die_at else self._compute(plan)
            except Exception as error:  # shown by result()
                pending.outcome = error
            with self._condition:
                self._queue.pop(0)
            pending.event.set()

    def _compute(self, plan: IterationPlan) -> StepResult:
        if self.mover is not None:
            self.mover.start(plan, set())
        result = self.model.run(plan)
        return result if self.mover is None else replace(result, moves=self.mover.advance())
