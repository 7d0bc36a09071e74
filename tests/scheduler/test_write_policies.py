"""When the store is given which pages; what preempted requests leave there."""

from __future__ import annotations

import random

import pytest
from driver import Driver
from fake_executor import make_capacity, make_prompt, make_request
from fake_store import FakeStore

from scheduler.plan import MoveKind, StoreTier
from scheduler.request import FinishReason
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig, WritePolicy
from scheduler.slot_table import SlotState

PAGE = 4
THROUGH, SELECTIVE, BACK = WritePolicy


def make_driver(policy: WritePolicy, pages_per_step: int = 256, **capacity: int) -> Driver:
    """With an empty store that is waited for."""
    use = StoreConfig(PrefetchPolicy.WAIT, pages_per_step=pages_per_step, write_policy=policy)
    return Driver(make_capacity(page_size=PAGE, **capacity), SchedulerConfig(store=use), FakeStore())


def run_one(driver: Driver, request_id: str, prompt: list[int], max_tokens: int = 2) -> tuple[int, int]:
    """Prompt tokens that were on the GPU, and those that were loaded."""
    driver.add(make_request(request_id, prompt, max_tokens))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    end = driver.ends[request_id]
    return end.num_cached_tokens - end.num_cpu_cached_tokens, end.num_cpu_cached_tokens


def num_in_store(driver: Driver) -> int:
    assert driver.store is not None
    return len(driver.store.pages)


def stores_of(driver: Driver) -> list[bytes]:
    """Digests of all saves so far, in order."""
    return [digest for move in driver.mover.moves if move.kind is MoveKind.STORE for digest in move.digests]


# --- write_through ---


def test_write_through_gives_prompt_pages_at_once_and_decode_pages_as_they_fill() -> None:
    driver = make_driver(THROUGH, batch_tokens=64)
    driver.add(make_request("a", make_prompt(10), max_tokens=11))
    driver.run()
    seen = [(plan.step, [len(move.page_ids) for move in plan.moves]) for plan in driver.plans if plan.moves]
    # Step 0 fills two pages, steps 2, 6 and 10 one each by decoding; when a step has finished the next is planned.
    assert seen == [(2, [2]), (4, [1]), (8, [1]), (11, [1])]


# --- write_through_selective ---


def test_selective_gives_a_page_after_its_second_hit() -> None:
    driver = make_driver(SELECTIVE)
    for name, num_stored in (("first", 0), ("hit once", 0), ("hit twice", 4), ("hit again", 4)):
        run_one(driver, name, make_prompt(17))
        assert num_in_store(driver) == num_stored, name
    assert run_one(driver, "other", make_prompt(17, first=1)) == (0, 0)
    assert num_in_store(driver) == 4
    driver.scheduler.flush_cache()
    assert run_one(driver, "back", make_prompt(17)) == (0, 16)


def test_selective_forgets_hits_with_the_contents_of_a_page() -> None:
    driver = make_driver(SELECTIVE, num_pages=8, max_model_len=32)
    for turn in range(3):  # each pushes the other out
        run_one(driver, f"a{turn}", make_prompt(29))
        run_one(driver, f"b{turn}", make_prompt(29, first=1))
    assert num_in_store(driver) == 0


def test_selective_counts_only_new_requests() -> None:
    """One that is preempted finds its own pages: that is no hit."""
    driver = make_driver(SELECTIVE, pages_per_step=0)
    driver.add(make_request("a", make_prompt(9), max_tokens=30))
    residence = driver.scheduler._residence
    for _ in range(60):
        driver.step()
        for slot in residence.slots.where(SlotState.DECODE).tolist():
            residence.preempt(slot)
    assert driver.num_preemptions > 3
    assert not any(residence.pool.num_hits(page) for page in range(residence.pool.num_pages))


# --- write_back ---


def test_write_back_gives_nothing_while_pages_are_free() -> None:
    driver = make_driver(BACK, num_pages=64)
    for i in range(3):
        run_one(driver, f"r{i}", make_prompt(40, first=i))
    assert not driver.mover.moves
    assert driver.scheduler.load().cached_pages == 30


def test_write_back_gives_the_oldest_before_they_are_given_up() -> None:
    """A conversation that was pushed out of the GPU comes back from the store, wherever it was cut."""
    driver = make_driver(BACK, num_pages=80, max_model_len=60)
    for i in range(36):
        on_gpu, loaded = run_one(driver, f"r{i}", make_prompt(33, first=i % 12))
        assert on_gpu + loaded == (32 if i >= 12 else 0), (i, on_gpu, loaded)
    counts = driver.count_moves()
    assert counts.num_dropped == 0
    assert counts.num_loaded > 0
    assert len(stores_of(driver)) == len(set(stores_of(driver))), "once each"


@pytest.mark.parametrize("seed", range(12))
def test_write_back_saves_or_counts_each_page_that_is_given_up(seed: int) -> None:
    draw = random.Random(seed)
    driver = make_driver(BACK, draw.choice([1, 2, 8]), num_pages=draw.randint(16, 40), max_model_len=60)
    given_up: set[bytes] = set()
    pool = driver.scheduler._residence.pool
    note = pool.on_give_up
    assert note is not None
    pool.on_give_up = lambda digest: (given_up.add(digest), note(digest))[0]
    for i in range(40):
        prompt = make_prompt(draw.randint(0, 30), first=draw.randint(0, 3)) + make_prompt(draw.randint(1, 8), first=i)
        driver.add(make_request(f"r{i}", prompt, draw.randint(1, 20), seed=i))
        driver.mover.delay = draw.choice([0, 0, 3])
        for _ in range(draw.randint(0, 20)):
            driver.step()
    driver.mover.heal()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.store is not None
    assert len(given_up - driver.store.pages.keys()) <= driver.count_moves().num_dropped


def test_written_back_pages_keep_their_place_in_the_order() -> None:
    driver = make_driver(BACK, pages_per_step=2, num_pages=16, max_model_len=60, batch_tokens=16)
    run_one(driver, "old", make_prompt(25), max_tokens=1)
    run_one(driver, "new", make_prompt(25, first=1), max_tokens=1)
    pool = driver.scheduler._residence.pool
    before = [digest for _, digest in pool.oldest_cached(12)]
    run_one(driver, "push", make_prompt(15, first=2), max_tokens=1)
    after = [digest for _, digest in pool.oldest_cached(15)]
    assert len(stores_of(driver)) > 0
    assert after[: len(after) - 3] == before[len(before) - len(after) + 3 :]


def test_a_store_that_takes_nothing_does_not_keep_an_idle_engine_busy() -> None:
    driver = make_driver(BACK, num_pages=16, max_model_len=60)
    driver.mover.num_good = 0
    for i in range(4):
        run_one(driver, f"r{i}", make_prompt(40, first=i))
    assert driver.scheduler.is_idle
    assert driver.count_moves().num_store_failed > 0


def test_the_gpu_loses_pages_between_the_question_and_the_start() -> None:
    """The store was asked only for what the GPU did not have: it is asked again."""
    driver = make_driver(BACK, num_pages=32)
    prompts = [make_prompt(33, first=i) for i in range(4)]
    for i in range(8):
        run_one(driver, f"r{i}", prompts[i % 4])
    store = driver.store
    assert store is not None
    num_asked = len(store.asked)
    store.answer_delay = 2
    driver.add(make_request("back", prompts[3]))
    assert len(store.asked[num_asked]) < 8
    driver.scheduler.flush_cache()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert len(store.asked[num_asked + 1]) == 8


# --- preempted requests ---


# --- a store that is off ---


@pytest.mark.parametrize("policy", WritePolicy)
def test_nothing_is_given_to_a_store_that_is_off_and_what_was_due_is_counted(policy: WritePolicy) -> None:
    driver = make_driver(policy, num_pages=16, max_model_len=60)
    driver.store.is_off = True  # type: ignore[union-attr]
    for turn in range(3):
        run_one(driver, f"a{turn}", make_prompt(17))
    for i in range(4):  # push each other out
        run_one(driver, f"r{i}", make_prompt(40, first=1 + i))
    assert stores_of(driver) == []
    assert driver.scheduler.is_idle
    assert driver.count_moves().num_dropped >= 4
    driver.store.is_off = False  # type: ignore[union-attr]
    for turn in range(3):
        run_one(driver, f"b{turn}", make_prompt(40, first=9))
    run_one(driver, "c", make_prompt(56, first=10))
    assert num_in_store(driver) > 0


def test_the_preempted_do_not_wait_for_a_store_that_is_off() -> None:
    driver = crowded(BACK)
    driver.store.is_off = True  # type: ignore[union-attr]
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.num_preemptions > 4
    assert driver.count_moves().num_requests_moved == 0
    assert driver.mover.moves == []


def mislead(driver: Driver) -> None:
    """Let the forecast believe that outputs are short."""
    for _ in range(500):
        driver.scheduler._lengths.record(1)


def crowded(policy: WritePolicy, page_s: float = 1e-6, delay: int = 1) -> Driver:
    """Eight requests in pages for one and a half."""
    driver = make_driver(policy, num_pages=30, max_model_len=80)
    mislead(driver)
    driver.mover.page_s, driver.mover.delay = page_s, delay
    driver.add(*(make_request(f"r{i}", make_prompt(14, first=i), max_tokens=64) for i in range(8)))
    return driver


def num_prefilled(driver: Driver) -> int:
    return sum(stats.num_prompt_tokens for stats in driver.stats)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("delay", [0, 1, 5])
def test_preempted_requests_come_back_from_the_store(policy: WritePolicy, delay: int) -> None:
    driver = crowded(policy, delay=delay)
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert all(len(driver.outputs[f"r{i}"]) == 64 for i in range(8))
    counts = driver.count_moves()
    assert driver.num_preemptions > 4
    assert counts.num_requests_moved > driver.num_preemptions // 2
    assert counts.num_loaded > 0
    alone = Driver(make_capacity(30, PAGE, 8, 80))
    mislead(alone)
    alone.add(*(make_request(f"r{i}", make_prompt(14, first=i), max_tokens=64) for i in range(8)))
    alone.run()
    assert num_prefilled(driver) < num_prefilled(alone)


def test_where_moving_is_dearer_they_are_computed_again() -> None:
    driver = crowded(BACK, page_s=1.0)
    costs = driver.scheduler._transfer.costs  # type: ignore[union-attr]
    costs.loaded([StoreTier.CPU] * 4, 4, 4.0)
    costs.saved(4, 4.0)
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    counts = driver.count_moves()
    assert driver.num_preemptions > 4
    assert counts.num_requests_moved == counts.num_loaded == 0


def test_pages_of_the_preempted_are_kept_until_they_are_saved() -> None:
    driver = make_driver(BACK, num_pages=40, max_model_len=80)
    driver.add(make_request("a", make_prompt(30), max_tokens=8))
    for _ in range(5):
        driver.step()
    slot = driver.scheduler._requests["a"].slot
    driver.scheduler._residence.preempt(slot)
    driver.mover.delay = 3
    driver.step()
    driver.step()
    (move,) = [move for move in driver.mover.moves if move.kind is MoveKind.STORE]
    assert len(move.page_ids) >= 7
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert num_in_store(driver) >= 7
    assert driver.count_moves().num_requests_moved == 1
    assert driver.ends["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", range(10))
@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("num_good", [0, 2, 1000])
def test_an_end_at_every_moment_of_an_evacuation(num_steps: int, delay: int, num_good: int) -> None:
    driver = make_driver(BACK, pages_per_step=3, num_pages=24, max_model_len=80, max_slots=2)
    driver.add(make_request("a", make_prompt(30), max_tokens=20))
    for _ in range(5):
        driver.step()
    driver.scheduler._residence.preempt(driver.scheduler._requests["a"].slot)
    driver.mover.delay, driver.mover.num_good = delay, num_good
    driver.add(*(make_request(f"n{i}", make_prompt(20, first=i), max_tokens=9) for i in range(3)))
    for _ in range(num_steps):
        driver.step()
    driver.cancel("a")
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert all(driver.ends[f"n{i}"].finish_reason is FinishReason.LENGTH for i in range(3))


def test_nobody_else_is_preempted_for_pages_that_are_being_evacuated() -> None:
    """Without a store the pages of one are enough; with one they come a little later."""
    driver = make_driver(BACK, num_pages=12, max_slots=4, max_model_len=48, batch_tokens=32)
    mislead(driver)
    driver.mover.delay = 3
    driver.add(*(make_request(f"r{i}", make_prompt(8, first=i), max_tokens=8) for i in range(4)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.num_preemptions == 1
    assert driver.count_moves().num_requests_moved == 1


@pytest.mark.parametrize("num_good", [0, 1])
@pytest.mark.parametrize("known_pages", [1, 1000])
def test_pages_that_two_saves_have_wait_for_a_third_only_after_both(num_good: int, known_pages: int) -> None:
    """Pages are on their way by policy when their request is preempted; that save fails, and then they miss."""
    use = StoreConfig(PrefetchPolicy.BEST_EFFORT, pages_per_step=3, backlog_pages=4, known_pages=known_pages)
    capacity = make_capacity(num_pages=17, page_size=1, max_slots=3, max_model_len=40, batch_tokens=6)
    driver = Driver(capacity, SchedulerConfig(max_passes=0, lookahead=1, store=use), FakeStore())
    driver.mover.delay, driver.mover.num_good = 9, num_good
    driver.add(make_request("a", make_prompt(11), max_tokens=4))
    driver.add(*(make_request(f"b{i}", make_prompt(5), max_tokens=7) for i in range(3)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    first, second = driver.mover.moves[:2]
    assert set(first.digests) < set(second.digests)
    driver.mover.heal()
    run_one(driver, "c", make_prompt(11))
    assert driver.store is not None
    assert driver.store.pages.keys() >= set(second.digests)
