"""Whatever happens, each request's output is what it yields alone, and nothing is left behind."""

from driver import Driver
from fake_executor import VOCAB, make_capacity, make_prompt, make_request
from fake_store import FakeStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.request import FinishReason
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig, WritePolicy
from scheduler.slot_table import SlotState

STOPS = tuple(range(0, VOCAB, 9))  # about every ninth token ends a request


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancels, deadlines, faults, flushes and preemptions, with little of everything."""

    @initialize(
        page_size=st.integers(1, 5),
        num_tokens=st.integers(16, 100),
        max_slots=st.integers(1, 6),
        batch_tokens=st.integers(1, 20),
        caching=st.booleans(),
        max_passes=st.integers(0, 4),
        lookahead=st.integers(1, 4),
        share=st.sampled_from([0.0, 0.25, 1.0]),
        misled=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_tokens: int,
        max_slots: int,
        batch_tokens: int,
        caching: bool,
        max_passes: int,
        lookahead: int,
        share: float,
        misled: bool,
    ) -> None:
        capacity = make_capacity(-(-num_tokens // page_size), page_size, max_slots, 40, batch_tokens)
        self.driver = Driver(capacity, SchedulerConfig(caching, 1000, max_passes, lookahead, share))
        for _ in range(100 if misled else 0):  # outputs were short so far: the forecast will be wrong
            self.driver.scheduler._lengths.record(1)
        self.num_added = 0

    @rule(
        num_requests=st.integers(1, 4),
        shared=st.integers(0, 16),
        own=st.integers(0, 10),
        first=st.integers(0, 2),
        max_tokens=st.integers(1, 24),
        stops=st.booleans(),
        salt=st.sampled_from(["", "", "a"]),
        seed=st.integers(0, 2),
        timeout_s=st.sampled_from([None, None, None, 9.0]),
    )
    def add(
        self,
        num_requests: int,
        shared: int,
        own: int,
        first: int,
        max_tokens: int,
        stops: bool,
        salt: str,
        seed: int,
        timeout_s: float | None,
    ) -> None:
        prompt = make_prompt(shared) + make_prompt(own, first=first) or [1]
        stop = STOPS if stops else ()
        for _ in range(num_requests):
            request_id = f"r{self.num_added}"
            self.driver.add(make_request(request_id, prompt, max_tokens, stop, salt, timeout_s, seed + self.num_added))
            self.num_added += 1

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()
        self.driver.check_outputs()

    @rule()
    def land(self) -> None:
        self.driver.land()

    @precondition(lambda self: self.driver.live)
    @rule(pick=st.integers(0, 100), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def cancel(self, pick: int, reason: FinishReason) -> None:
        live = self.driver.live
        self.driver.cancel(live[pick % len(live)], reason)

    @precondition(lambda self: self.driver.live)
    @rule(pick=st.integers(0, 100), really=st.sampled_from([False, False, False, True]))
    def fault(self, pick: int, really: bool) -> None:
        live = self.driver.live
        if really:
            self.driver.executor.model.faulty.add(live[pick % len(live)])

    @rule()
    def flush(self) -> None:
        self.driver.scheduler.flush_cache()
        self.driver.scheduler.check_integrity()

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule(pick=st.integers(0, 100))
    def preempt(self, pick: int) -> None:
        residence = self.driver.scheduler._residence
        state = residence.slots.state
        slots = ((state == SlotState.PREFILL) | (state == SlotState.DECODE)).nonzero()[0].tolist()
        if slots:
            residence.preempt(slots[pick % len(slots)])
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_outputs()
            self.driver.check_baseline()


class StoreMachine(SchedulerMachine):
    """The same with a KV store that is slow, fails, lies, forgets, hangs and comes back."""

    @initialize(
        page_size=st.integers(1, 4),
        num_tokens=st.integers(16, 100),
        max_slots=st.integers(1, 6),
        batch_tokens=st.integers(1, 20),
        max_passes=st.integers(0, 4),
        lookahead=st.integers(1, 4),
        policy=st.sampled_from(PrefetchPolicy),
        pages_per_step=st.sampled_from([0, 1, 3, 100, 100]),
        backlog_pages=st.sampled_from([4, 1000, 1000]),
        known_pages=st.sampled_from([1, 1000]),
        write_policy=st.sampled_from(WritePolicy),
        misled=st.booleans(),
        target_itl_s=st.sampled_from([None, None, 0.001]),
    )
    def start(
        self,
        page_size: int,
        num_tokens: int,
        max_slots: int,
        batch_tokens: int,
        max_passes: int,
        lookahead: int,
        policy: PrefetchPolicy,
        pages_per_step: int,
        backlog_pages: int,
        known_pages: int,
        write_policy: WritePolicy,
        misled: bool,
        target_itl_s: float | None,
    ) -> None:
        capacity = make_capacity(-(-num_tokens // page_size), page_size, max_slots, 40, batch_tokens)
        sizes = pages_per_step, backlog_pages, known_pages
        store = StoreConfig(policy, 0.5, 2.0, 2.0, *sizes, write_policy=write_policy, move_timeout_s=1e9)
        config = SchedulerConfig(True, 1000, max_passes, lookahead, target_itl_s=target_itl_s, store=store)
        self.driver = Driver(capacity, config, FakeStore())
        self.num_added = 0
        self.add(3, 16, 8, 0, 8, False, "", 0, None)  # what the store begins with
        self.driver.run()
        self.driver.scheduler.flush_cache()
        for _ in range(500 if misled else 0):
            self.driver.scheduler._lengths.record(1)

    @precondition(lambda self: self.driver.ends)
    @rule(pick=st.integers(0, 100), num_new=st.integers(1, 5), max_tokens=st.integers(1, 8), flush=st.booleans())
    def next_round(self, pick: int, num_new: int, max_tokens: int, flush: bool) -> None:
        """A conversation goes on: prompt and output of a request that has ended, and some more."""
        ended = list(self.driver.ends)
        before = self.driver.requests[ended[pick % len(ended)]]
        history = [*before.prompt_token_ids, *self.driver.outputs[before.request_id]]
        prompt = history[:30] + make_prompt(num_new, first=self.num_added)
        if flush:
            self.flush()
        self.driver.add(make_request(f"r{self.num_added}", prompt, max_tokens, salt=before.cache_salt))
        self.num_added += 1

    @rule(delay=st.sampled_from([0, 0, 0, 1, 3, 9, None]), num_good=st.sampled_from([1000, 1000, 1000, 2, 1, 0]))
    def copy_otherwise(self, delay: int | None, num_good: int) -> None:
        self.driver.mover.delay, self.driver.mover.num_good = delay, num_good

    @rule(delay=st.sampled_from([0, 0, 0, 1, 4, None]), num_lies=st.sampled_from([0, 0, 0, 1, 5]))
    def answer_otherwise(self, delay: int | None, num_lies: int) -> None:
        self.store.answer_delay, self.store.num_lies = delay, num_lies

    @rule(is_off=st.booleans())
    def use_otherwise(self, is_off: bool) -> None:
        self.store.is_off = is_off

    @rule(page_s=st.sampled_from([0.0, 1e-6, 1e-6, 1.0]))
    def costs_otherwise(self, page_s: float) -> None:
        self.driver.mover.page_s = page_s

    @rule(share=st.sampled_from([1, 3, 9]), offset=st.integers(0, 9))
    def evict(self, share: int, offset: int) -> None:
        for digest in list(self.store.pages)[offset::share]:
            del self.store.pages[digest]

    @rule(share=st.sampled_from([2, 3, 1]))
    def demote(self, share: int) -> None:
        self.store.on_ssd.update(list(self.store.pages)[::share])

    @rule()
    def end_what_hangs(self) -> None:
        for copy in self.driver.mover.copies.values():
            copy.steps_left = 0

    @property
    def store(self) -> FakeStore:
        assert self.driver.store is not None
        return self.driver.store

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            for _ in range(60):  # hanging moves and all
                self.driver.step()
                self.driver.now += 0.1
            self.driver.mover.heal()
        super().teardown()


StoreMachine.TestCase.settings = SchedulerMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestStoreMachine = StoreMachine.TestCase
