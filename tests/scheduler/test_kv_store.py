"""With a KV store: what it holds is not computed, what it does to us changes speed only."""

import random

import numpy as np
import pytest
from driver import Driver
from fake_executor import make_capacity, make_prompt, make_request
from fake_store import FakeStore

from scheduler.plan import IterationPlan, KVMoveResult, MoveCounts, MoveKind, StepResult, StoreTier
from scheduler.ports import ExecutorError
from scheduler.request import FinishReason
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig

PAGE = 4
WAIT = StoreConfig(PrefetchPolicy.WAIT, max_wait_s=2.0, load_timeout_s=3.0)


def make_driver(store_config: StoreConfig = WAIT, **capacity: int) -> Driver:
    """With an empty store."""
    return Driver(make_capacity(page_size=PAGE, **capacity), SchedulerConfig(store=store_config), FakeStore())


def run_one(driver: Driver, request_id: str, prompt: list[int], max_tokens: int = 6, salt: str = "") -> tuple[int, ...]:
    """Tokens that it did not compute: from the GPU, from CPU and from SSD."""
    driver.add(make_request(request_id, prompt, max_tokens, salt=salt))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    end = driver.ends[request_id]
    assert end.finish_reason is FinishReason.LENGTH
    from_store = end.num_cpu_cached_tokens + end.num_ssd_cached_tokens
    return end.num_cached_tokens - from_store, end.num_cpu_cached_tokens, end.num_ssd_cached_tokens


def num_computed(driver: Driver) -> int:
    """Prompt tokens that were computed so far."""
    return sum(stats.num_prompt_tokens for stats in driver.stats)


def store_of(driver: Driver) -> FakeStore:
    assert driver.store is not None
    return driver.store


# --- what comes from where ---


@pytest.mark.parametrize("length", [n * PAGE + d for n in (1, 2, 5) for d in (-1, 0, 1)])
def test_a_prompt_comes_back_from_the_store(length: int) -> None:
    """All full pages, but at least one token is computed."""
    driver = make_driver()
    assert run_one(driver, "first", make_prompt(length)) == (0, 0, 0)
    driver.scheduler.flush_cache()
    before = num_computed(driver)
    cached = (length - 1) // PAGE * PAGE
    assert run_one(driver, "second", make_prompt(length)) == (0, cached, 0)
    assert num_computed(driver) - before == length - cached
    assert driver.outputs["first"] == driver.outputs["second"]


def test_the_next_round_of_a_conversation_gets_the_last_output_too() -> None:
    driver = make_driver()
    first = make_prompt(10)
    run_one(driver, "round-1", first, max_tokens=11)
    driver.scheduler.flush_cache()
    second = first + driver.outputs["round-1"] + make_prompt(7, first=3)
    assert run_one(driver, "round-2", second) == (0, 20, 0)


def test_gpu_cpu_and_ssd_are_told_apart() -> None:
    driver = make_driver()
    prompt = make_prompt(29)
    run_one(driver, "long", prompt)
    store = store_of(driver)
    chain = store.asked[0]
    assert len(chain) == 7
    store.on_ssd.update(chain[3:5])
    driver.scheduler.flush_cache()
    run_one(driver, "short", prompt[:9], max_tokens=1)  # two pages are on the GPU again
    assert run_one(driver, "again", prompt) == (8, 12, 8)
    stats = driver.stats
    assert sum(each.prefix_hits for each in stats) == 8
    assert (sum(each.cpu_hits for each in stats), sum(each.ssd_hits for each in stats)) == (12 + 8, 8)
    assert sum(each.prefix_queries for each in stats) == 29 + 9 + 29


def test_loaded_pages_are_hits_for_others() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    assert run_one(driver, "b", make_prompt(17)) == (0, 16, 0)
    assert run_one(driver, "c", make_prompt(17)) == (16, 0, 0)


def test_salts_never_share() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17), salt="tenant-a")
    driver.scheduler.flush_cache()
    assert run_one(driver, "b", make_prompt(17), salt="tenant-b") == (0, 0, 0)


def test_others_run_while_one_loads() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    driver.mover.delay = 30
    driver.add(make_request("loads", make_prompt(17)), make_request("other", make_prompt(9, first=2), max_tokens=8))
    for _ in range(14):
        driver.step()
    assert "other" in driver.ends
    assert "loads" not in driver.starts
    assert driver.scheduler.load().num_running == 1
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.ends["loads"].num_cpu_cached_tokens == 16


def test_a_preempted_request_asks_again() -> None:
    driver = make_driver()
    driver.add(make_request("a", make_prompt(17), max_tokens=12))
    for _ in range(12):
        driver.step()
    slot = driver.scheduler._requests["a"].slot
    driver.scheduler._residence.preempt(slot)
    driver.land()
    driver.scheduler.flush_cache()
    before = num_computed(driver)
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert num_computed(driver) - before <= PAGE
    assert driver.ends["a"].num_cached_tokens == 0, "counted at its first start"


# --- each page once ---


def loads_of(driver: Driver) -> list[tuple[bytes, ...]]:
    """Digests of all loads so far."""
    return [move.digests for move in driver.mover.moves if move.kind is MoveKind.LOAD]


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_requests_with_one_prefix_that_come_at_once_load_it_once(policy: PrefetchPolicy) -> None:
    driver = make_driver(StoreConfig(policy))
    run_one(driver, "first", make_prompt(30))
    driver.scheduler.flush_cache()
    driver.mover.delay = 4
    prompts = [make_prompt(30), make_prompt(30), make_prompt(18) + make_prompt(9, first=5)]
    if policy is PrefetchPolicy.BEST_EFFORT:  # let the answers come while all slots are taken
        driver.add(*(make_request(f"busy-{i}", make_prompt(3, first=i), max_tokens=2) for i in range(8)))
    driver.add(*(make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    (load,) = loads_of(driver)
    assert len(load) == 7
    cached = [(end.num_cached_tokens, end.num_cpu_cached_tokens) for name, end in driver.ends.items() if name[0] == "r"]
    assert sorted(cached) == [(16, 0), (28, 0), (28, 28)]


def test_who_needs_more_than_the_load_that_it_waits_for_brings_loads_the_rest() -> None:
    driver = make_driver()
    run_one(driver, "first", make_prompt(30))
    driver.scheduler.flush_cache()
    driver.mover.delay = 4
    driver.add(make_request("short", make_prompt(14)), make_request("long", make_prompt(30)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert [len(load) for load in loads_of(driver)] == [3, 4]
    end = driver.ends["long"]
    assert (end.num_cached_tokens, end.num_cpu_cached_tokens) == (28, 16)


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_load_that_fails_lets_the_one_that_waits_for_it_go_on(num_good: int) -> None:
    driver = make_driver()
    run_one(driver, "first", make_prompt(30))
    driver.scheduler.flush_cache()
    driver.mover.delay, driver.mover.num_good = 3, num_good
    driver.add(make_request("a", make_prompt(30)), make_request("b", make_prompt(30)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.ends["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("gone", ["cancel", "stay"])
def test_who_waits_for_a_load_that_hangs_waits_as_long_as_the_load_may_take(gone: str) -> None:
    driver = make_driver()
    run_one(driver, "first", make_prompt(30))
    driver.scheduler.flush_cache()
    driver.mover.delay = None
    driver.add(make_request("a", make_prompt(30)))
    driver.step()
    if gone == "cancel":
        driver.cancel("a")
    driver.add(make_request("b", make_prompt(30)))
    for _ in range(20):
        driver.step()
    assert "b" not in driver.starts
    assert len(loads_of(driver)) == 1
    driver.now += 3.0  # WAIT.load_timeout_s
    driver.mover.delay = 0
    for _ in range(20):
        driver.step()
    assert driver.ends["b"].num_cpu_cached_tokens == 28, "it loads for itself"
    driver.mover.heal()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


# --- moves that never end ---


def test_a_move_that_never_ends_costs_the_executor_and_no_page_is_used_again_before() -> None:
    driver = make_driver(StoreConfig(PrefetchPolicy.WAIT, load_timeout_s=3.0, move_timeout_s=60.0))
    run_one(driver, "first", make_prompt(17))
    driver.scheduler.flush_cache()
    driver.mover.delay = None
    driver.add(make_request("a", make_prompt(17)))
    driver.step()
    driver.step()
    held = set(driver.mover.pages_of(MoveKind.LOAD))
    driver.now += 59.0
    for i in range(30):
        driver.add(make_request(f"r{i}", make_prompt(20, first=i), max_tokens=2))
        driver.step()
    used = {page for plan in driver.plans[-25:] for page in plan.page_ids.tolist()}
    assert len(used) > 40
    assert not used & held
    driver.now += 2.0
    with pytest.raises(ExecutorError, match="has not ended within 60 s"):
        driver.step()


def test_many_moves_one_after_the_other_may_take_long_together() -> None:
    driver = make_driver(StoreConfig(pages_per_step=1, move_timeout_s=10.0), batch_tokens=64)
    driver.mover.delay = None
    driver.add(make_request("a", make_prompt(41), max_tokens=1))
    for _ in range(12):
        driver.step()
    assert len(driver.mover.copies) == 8
    while driver.mover.copies:
        next(iter(driver.mover.copies.values())).steps_left = 0
        driver.now += 9.0
        driver.step()
        driver.step()
    driver.mover.heal()
    driver.run()


# --- what is stored ---


def test_each_page_is_stored_once() -> None:
    driver = make_driver()
    for name in "abc":
        run_one(driver, name, make_prompt(17), max_tokens=4)
    stored = [digest for move in driver.mover.moves if move.kind is MoveKind.STORE for digest in move.digests]
    assert len(stored) == len(set(stored)) == 5  # 17 + 4 tokens, the last one's KV is never computed
    assert driver.count_moves() == MoveCounts(num_stored=5)


def test_at_most_so_many_pages_an_iteration_and_the_rest_later() -> None:
    driver = make_driver(StoreConfig(pages_per_step=2), batch_tokens=64, num_pages=256)
    run_one(driver, "a", make_prompt(41))
    sizes = [len(move.page_ids) for plan in driver.plans for move in plan.moves]
    assert sum(sizes) == 11
    assert max(sizes) == 2
    assert all(len(plan.moves) <= 1 for plan in driver.plans)


def test_what_exceeds_the_backlog_is_dropped_and_counted() -> None:
    driver = make_driver(StoreConfig(pages_per_step=1, backlog_pages=3), batch_tokens=64)
    run_one(driver, "a", make_prompt(41), max_tokens=1)
    assert driver.count_moves() == MoveCounts(num_stored=3, num_dropped=7)


def test_nothing_is_stored_where_none_may() -> None:
    driver = make_driver(StoreConfig(pages_per_step=0))
    run_one(driver, "a", make_prompt(41))
    assert not driver.mover.moves
    assert driver.count_moves() == MoveCounts()


def test_a_page_that_is_needed_before_its_turn_is_dropped() -> None:
    driver = make_driver(StoreConfig(pages_per_step=1), num_pages=10, max_model_len=40, batch_tokens=40)
    for i in range(4):
        run_one(driver, f"r{i}", make_prompt(37, first=i), max_tokens=1)
    counts = driver.count_moves()
    assert counts.num_stored + counts.num_dropped == 4 * 9
    assert counts.num_stored > 0


def test_a_store_on_its_way_keeps_its_pages() -> None:
    """They hold at most an eighth of all pages, and those of preempted requests a quarter, so that a hanging store
    does not take the GPU's memory."""
    driver = make_driver(num_pages=64, max_model_len=128)
    driver.mover.delay = None
    for i in range(12):
        driver.add(make_request(f"r{i}", make_prompt(30, first=i), max_tokens=30))
    for _ in range(600):
        driver.step()
        driver.now += 0.01
    assert len(driver.ends) == 12
    assert driver.num_preemptions > 0
    assert 8 < driver.scheduler.load().live_pages <= 8 + 16
    driver.mover.heal()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_a_store_that_was_restarted_gets_again_what_the_gpu_holds() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    store_of(driver).pages.clear()
    assert run_one(driver, "b", make_prompt(17)) == (16, 0, 0)
    driver.scheduler.flush_cache()
    assert run_one(driver, "c", make_prompt(17)) == (0, 16, 0)


# --- loads that cost more than they save ---


def test_what_costs_more_to_load_than_to_compute_is_computed() -> None:
    """A page of four tokens takes 4 ms in the fake executor when alone."""
    driver = make_driver()
    driver.mover.page_s = 0.1
    run_one(driver, "a", make_prompt(30))
    driver.scheduler.flush_cache()
    assert run_one(driver, "b", make_prompt(30)) == (0, 28, 0), "only so it is measured"
    driver.scheduler.flush_cache()
    assert run_one(driver, "c", make_prompt(30)) == (0, 0, 0)
    assert driver.count_moves().num_skipped == 7
    driver.mover.page_s = 1e-6
    for i in range(40):
        driver.scheduler.flush_cache()
        run_one(driver, f"r{i}", make_prompt(30))
    assert driver.ends["r39"].num_cpu_cached_tokens == 28, "it is tried again from time to time"


def test_each_tier_has_its_own_cost() -> None:
    driver = make_driver()
    driver.mover.page_s = 1e-6
    run_one(driver, "a", make_prompt(30))
    store = store_of(driver)
    driver.scheduler.flush_cache()
    run_one(driver, "cpu", make_prompt(30))
    store.on_ssd.update(store.asked[0][3:])
    driver.scheduler.flush_cache()
    driver.mover.page_s = 1.0
    assert run_one(driver, "ssd", make_prompt(30)) == (0, 12, 16), "only so it is measured"
    driver.scheduler.flush_cache()
    driver.mover.page_s = 1e-6
    assert run_one(driver, "again", make_prompt(30)) == (0, 12, 0)


# --- faults: speed only ---


@pytest.mark.parametrize("num_good", range(5))
def test_pages_that_do_not_come_are_computed(num_good: int) -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    driver.mover.num_good = num_good
    before = num_computed(driver)
    assert run_one(driver, "b", make_prompt(17)) == (0, num_good * PAGE, 0)
    assert num_computed(driver) - before == 17 - num_good * PAGE
    counts = driver.count_moves()
    assert (counts.num_loaded, counts.num_load_failed) == (num_good, 4 - num_good)
    assert run_one(driver, "c", make_prompt(17)) == (16, 0, 0)


def test_a_store_that_lies() -> None:
    driver = make_driver()
    store_of(driver).num_lies = 3
    assert run_one(driver, "a", make_prompt(17)) == (0, 0, 0)
    assert driver.count_moves().num_load_failed == 3
    driver.scheduler.flush_cache()
    assert run_one(driver, "b", make_prompt(17)) == (0, 16, 0), "it got them although it had said it has them"


def test_evicted_between_answer_and_load() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    store = store_of(driver)
    driver.add(make_request("b", make_prompt(17)))
    driver.step()  # the load is planned
    assert driver.mover.copies
    del store.pages[store.asked[0][2]]
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.ends["b"].num_cpu_cached_tokens == 8


@pytest.mark.parametrize(
    ("config", "waited_s"), [(WAIT, 2.0), (StoreConfig(PrefetchPolicy.TIMEOUT, timeout_s=0.5), 0.5)]
)
def test_a_store_that_never_answers_is_waited_for_so_long(config: StoreConfig, waited_s: float) -> None:
    driver = make_driver(config)
    store_of(driver).answer_delay = None
    for name in "ab":
        began_s = driver.now
        assert run_one(driver, name, make_prompt(17, first=ord(name))) == (0, 0, 0)
        assert driver.ends[name].queue_s == pytest.approx(waited_s, abs=0.11)
        assert driver.now - began_s < waited_s + 0.2
    assert store_of(driver).released == {0, 1}


def test_best_effort_does_not_wait_but_takes_what_is_there() -> None:
    driver = make_driver(StoreConfig(PrefetchPolicy.BEST_EFFORT), max_slots=1)
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    store_of(driver).answer_delay = 2
    driver.add(make_request("at-once", make_prompt(17), max_tokens=8))
    driver.step()
    assert driver.scheduler._requests["at-once"].queue_s == 0.0
    driver.scheduler.flush_cache()
    driver.add(make_request("queues", [*make_prompt(9), 3, 1], max_tokens=2))
    for _ in range(3):
        driver.step()
        driver.scheduler.flush_cache()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.ends["at-once"].num_cached_tokens == 0
    assert driver.ends["queues"].num_cached_tokens == 8


def test_who_waits_for_the_store_lets_others_pass() -> None:
    """However many wait, and although they came first."""
    driver = make_driver()
    store_of(driver).answer_delay = None
    driver.add(*(make_request(f"waits-{i}", make_prompt(17, first=i)) for i in range(20)))
    driver.add(make_request("short", make_prompt(3)))  # not a full page: nothing to ask
    for _ in range(12):
        driver.step()
    assert "short" in driver.ends
    assert len(driver.live) == 20
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_an_overdue_load_is_given_up_and_its_pages_stay_its_own() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    driver.mover.delay = None
    driver.add(make_request("b", make_prompt(17)))
    driver.step()
    driver.now += 3.0
    for _ in range(20):
        driver.step()
    assert driver.ends["b"].finish_reason is FinishReason.LENGTH
    assert driver.ends["b"].num_cached_tokens == 0
    assert driver.ends["b"].num_preemptions == 0
    assert driver.scheduler.load().live_pages >= 4
    assert len(store_of(driver).released) == 1, "the load still needs what the store keeps for it"
    driver.mover.heal()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


@pytest.mark.parametrize("num_good", [0, 2, 4])
@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("how", ["cancel", "expire", "withdraw"])
def test_an_end_at_every_moment_of_a_load(how: str, num_steps: int, num_good: int) -> None:
    """Others take slots and pages at once; nonsense that comes late must not reach them."""
    driver = make_driver(num_pages=14, max_model_len=32, max_slots=2, batch_tokens=8)
    run_one(driver, "a", make_prompt(17), max_tokens=1)
    driver.scheduler.flush_cache()
    driver.mover.delay, driver.mover.num_good = 4, num_good
    driver.add(make_request("b", make_prompt(17), timeout_s=9.0))
    for _ in range(num_steps):
        driver.step()
    if how == "cancel":
        driver.cancel("b")
    driver.now += {"cancel": 0.0, "expire": 9.0, "withdraw": 3.0}[how]
    driver.add(*(make_request(f"next-{i}", make_prompt(20, first=i), max_tokens=10) for i in range(4)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    reasons = {"cancel": FinishReason.CANCELLED, "expire": FinishReason.EXPIRED}
    assert driver.ends["b"].finish_reason is reasons.get(how, FinishReason.LENGTH)
    assert all(driver.ends[f"next-{i}"].finish_reason is FinishReason.LENGTH for i in range(4))


def test_what_a_cancelled_load_brings_is_kept() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    driver.scheduler.flush_cache()
    driver.mover.delay = 2
    driver.add(make_request("b", make_prompt(17)))
    driver.step()
    driver.cancel("b")
    driver.run()
    assert run_one(driver, "c", make_prompt(17)) == (16, 0, 0)


def test_all_pages_on_their_way_to_the_store_while_a_prompt_needs_them() -> None:
    """Nothing can be computed and nobody can be preempted: it waits for the move's end, and goes on."""
    driver = make_driver(num_pages=8, max_model_len=32, batch_tokens=32)
    driver.scheduler._transfer.saves._max_storing = 8  # type: ignore[union-attr]
    driver.mover.delay = 6
    run_one(driver, "a", make_prompt(31), max_tokens=1)
    driver.add(make_request("b", make_prompt(29), max_tokens=1))
    driver.run()
    assert run_one(driver, "c", make_prompt(29, first=3), max_tokens=3) == (0, 0, 0)


def test_a_load_waits_until_there_are_pages_for_all_of_it() -> None:
    """The forecast knows nothing of pages that moves hold."""
    driver = make_driver(num_pages=8, max_model_len=32, batch_tokens=32)
    driver.scheduler._transfer.saves._max_storing = 8  # type: ignore[union-attr]
    run_one(driver, "a", make_prompt(29), max_tokens=1)
    driver.mover.delay = None
    driver.add(make_request("hangs", make_prompt(13, first=2), max_tokens=1))
    for _ in range(4):
        driver.step()
    driver.scheduler.flush_cache()
    assert driver.scheduler.load().live_pages == 3
    driver.add(make_request("loads", make_prompt(29), max_tokens=2))
    for _ in range(3):
        driver.step()
        assert driver.scheduler.load().num_waiting == 1
    driver.mover.heal()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.ends["loads"].num_cpu_cached_tokens == 28


def test_who_loads_counts_among_those_that_the_latency_cap_allows() -> None:
    config = SchedulerConfig(target_itl_s=1.0, store=WAIT)
    driver = Driver(make_capacity(page_size=PAGE), config, FakeStore())
    run_one(driver, "a", make_prompt(17), max_tokens=1)
    driver.scheduler.flush_cache()
    driver.scheduler._cap._sizes = (1, 1)  # type: ignore[union-attr]
    driver.mover.delay = 5
    driver.add(make_request("loads", make_prompt(17)))
    driver.step()
    driver.add(make_request("next", make_prompt(3)))
    driver.step()
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 1)


def test_steps_that_only_move_pages_teach_the_latency_cap_nothing() -> None:
    config = SchedulerConfig(target_itl_s=1.0, store=WAIT)
    driver = Driver(make_capacity(page_size=PAGE), config, FakeStore())
    cap = driver.scheduler._cap
    assert cap is not None
    learned: list[int] = []
    record = cap.record
    cap.record = lambda size, step_s: (learned.append(size), record(size, step_s))[1]  # type: ignore[method-assign]
    driver.mover.delay = 5
    run_one(driver, "a", make_prompt(17))
    assert len(learned) == sum(len(plan.slots) > 0 for plan in driver.plans) < len(driver.plans)


def test_faults_and_a_store_that_is_off_are_told() -> None:
    driver = make_driver()
    run_one(driver, "a", make_prompt(17))
    assert driver.count_moves().num_faults == 0
    assert not driver.scheduler.load().store_is_off
    store_of(driver).num_rank_faults = 2
    run_one(driver, "b", make_prompt(29, first=1))
    assert driver.count_moves().num_rank_faults == 2
    store_of(driver).num_faults, store_of(driver).is_off = 3, True
    run_one(driver, "c", make_prompt(17))
    assert driver.count_moves().num_faults == 3
    assert driver.scheduler.load().store_is_off


# --- borders ---


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_result_of_no_move_is_refused(number: int) -> None:
    scheduler = Scheduler(SchedulerConfig(), make_capacity(), FakeStore() if number else None)
    scheduler.add(make_request("a", 5), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = StepResult(plan.step, np.zeros(1, np.int32), (), 0.0, 0.0, (KVMoveResult(number, 0),))
    with pytest.raises(ExecutorError, match="move"):
        scheduler.finish(plan, result, 0.0)


def test_more_pages_than_the_move_had_are_refused() -> None:
    driver = make_driver()
    driver.add(make_request("a", 9))
    while not driver.mover.moves:
        driver.step()
    plan = driver.plans[-1]
    driver._flight = None
    sampled = np.zeros(int(plan.samples.sum()), np.int32)
    with pytest.raises(ExecutorError, match="move 0"):
        driver.scheduler.finish(plan, StepResult(plan.step, sampled, (), 0.0, 0.0, (KVMoveResult(0, 3),)), 0.0)


def test_a_store_without_prefix_caching_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        Scheduler(SchedulerConfig(enable_prefix_caching=False), make_capacity(), FakeStore())


def test_tiers_are_what_the_store_side_calls_them() -> None:
    assert [(tier.name, tier.value) for tier in StoreTier] == [("CPU", 1), ("SSD", 2)]


# --- nothing changes without one ---


def _facts(plan: IterationPlan) -> tuple[object, ...]:
    starts = [(s.slot, s.request_id, s.token_ids.tolist(), s.num_cached, s.seed) for s in plan.slot_starts]
    arrays = plan.page_slots, plan.page_indexes, plan.page_ids, plan.slots, plan.starts, plan.counts, plan.samples
    return plan.step, plan.bucket, plan.num_decodes, starts, [array.tolist() for array in arrays]


@pytest.mark.parametrize("seed", range(20))
def test_a_store_that_holds_and_gets_nothing_changes_no_plan(seed: int) -> None:
    """Nor does having none: both give the plans of the GPU alone."""
    draw = random.Random(seed)
    capacity = make_capacity(draw.randint(10, 40), draw.randint(1, 5), draw.randint(1, 6), 40, draw.randint(1, 20))
    without = Driver(capacity, SchedulerConfig())
    beside = Driver(capacity, SchedulerConfig(store=StoreConfig(pages_per_step=0)), FakeStore())
    for i in range(25):
        prompt = make_prompt(draw.randint(0, 16)) + make_prompt(draw.randint(1, 8), first=draw.randint(0, 2))
        request = make_request(f"r{i}", prompt, draw.randint(1, 20), seed=i)
        num_steps, cancelled = draw.randint(0, 4), draw.random() < 0.1
        for driver in (without, beside):
            driver.add(request)
            for _ in range(num_steps):
                driver.step()
            if cancelled:
                driver.cancel(request.request_id)
    for driver in (without, beside):
        driver.run()
        driver.check_outputs()
        driver.check_baseline()
    assert [_facts(plan) for plan in without.plans] == [_facts(plan) for plan in beside.plans]
    assert not any(plan.moves for plan in without.plans)
