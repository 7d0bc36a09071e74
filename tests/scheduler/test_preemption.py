"""When pages run out: outputs stay what they are."""

import pytest
from driver import Driver
from fake_executor import make_capacity, make_prompt, make_request

from scheduler.request import FinishReason
from scheduler.scheduler import SchedulerConfig
from scheduler.slot_table import SlotState


def mislead(driver: Driver) -> None:
    """Let the forecast believe that outputs are short."""
    for _ in range(500):
        driver.scheduler._lengths.record(1)


@pytest.mark.parametrize("caching", [True, False])
def test_pages_for_one_and_a_half_requests(caching: bool) -> None:
    """Recompute-preemption once cut answers short: each must have exactly its 64 tokens."""
    driver = Driver(make_capacity(30, 4, 8, 80, batch_tokens=16), SchedulerConfig(enable_prefix_caching=caching))
    mislead(driver)
    driver.add(*(make_request(f"r{i}", make_prompt(14, first=i), max_tokens=64) for i in range(8)))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert all(len(driver.outputs[f"r{i}"]) == 64 for i in range(8))
    assert driver.num_preemptions > 0
    assert driver.num_preemptions == sum(end.num_preemptions for end in driver.ends.values())


def test_a_right_forecast_needs_no_preemption() -> None:
    driver = Driver(make_capacity(30, 4, 8, 80, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(14, first=i), max_tokens=64) for i in range(8)))
    driver.run()
    driver.check_outputs()
    assert driver.num_preemptions == 0


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("num_steps", range(16))
@pytest.mark.parametrize("landed", [True, False])
def test_forced_preemption_at_every_step(victim: str, num_steps: int, landed: bool) -> None:
    """In each chunk of the prefill and at each token, with and without an iteration in flight."""
    driver = Driver(make_capacity(40, 4, 4, 64, batch_tokens=5))
    driver.add(make_request("a", make_prompt(13), max_tokens=9), make_request("b", make_prompt(11, first=1), 9))
    for _ in range(num_steps):
        driver.step()
    if landed:
        driver.land()
    slots = driver.scheduler._residence.slots
    for slot in slots.live().tolist():
        if slots.ids[slot] == victim and slots.state[slot] != SlotState.DRAIN:
            driver.scheduler._residence.preempt(slot)
            driver.scheduler.check_integrity()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert all(driver.ends[name].finish_reason is FinishReason.LENGTH for name in "ab")


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_in_every_iteration_that_has_a_token(caching: bool) -> None:
    driver = Driver(make_capacity(40, 4, 4, 64, batch_tokens=16), SchedulerConfig(enable_prefix_caching=caching))
    driver.add(make_request("a", make_prompt(6), max_tokens=20))
    for _ in range(400):
        if not driver.step():
            break
        slots = driver.scheduler._residence.slots
        for slot in slots.where(SlotState.DECODE).tolist():
            driver.scheduler._residence.preempt(slot)
    driver.run()
    driver.check_outputs()
    assert driver.ends["a"].num_preemptions >= 10


@pytest.mark.parametrize("when", ["cancel", "expire", "stop", "fault"])
def test_an_end_while_a_preempted_request_is_still_in_flight(when: str) -> None:
    driver = Driver(make_capacity(40, 4, 4, 64, batch_tokens=16))
    plain = make_request("a", make_prompt(6), max_tokens=20)
    driver.add(make_request("x", make_prompt(6), max_tokens=20))
    driver.run()
    stop = (driver.outputs["x"][2],) if when == "stop" else ()
    driver.add(make_request("a", list(plain.prompt_token_ids), 20, stop=stop, timeout_s=5.0))
    for _ in range(3):
        driver.step()
    slot = driver.scheduler._requests["a"].slot
    driver.scheduler._residence.preempt(slot)  # the third token is in flight
    assert driver.scheduler._slots.state[slot] == SlotState.PREEMPTED
    if when == "cancel":
        driver.cancel("a")
    if when == "expire":
        driver.now = 5.0
    if when == "fault":
        driver.executor.model.faulty.add("a")
    driver.run()
    reasons = {"cancel": FinishReason.CANCELLED, "expire": FinishReason.EXPIRED, "stop": FinishReason.STOP}
    assert driver.ends["a"].finish_reason is reasons.get(when, FinishReason.FAILED)
    assert len(driver.outputs["a"]) == (3 if when == "stop" else 2)
    driver.check_outputs()
    driver.check_baseline()


def test_an_end_tells_of_a_preemption_whose_start_nobody_was_told_of() -> None:
    """Preempted, placed again, and preempted once more before the result that would tell of it."""
    driver = Driver(make_capacity(16, 1, 1, 40, batch_tokens=1), SchedulerConfig(enable_prefix_caching=False))
    driver.add(make_request("r", make_prompt(3), max_tokens=1))
    for _ in range(2):
        for _ in range(2):
            driver.step()
        driver.scheduler._residence.preempt(0)
    assert driver.starts["r"].num_preemptions == 0
    driver.cancel("r")
    assert driver.ends["r"].num_preemptions == 2
    driver.run()
    driver.check_baseline()


def test_the_latest_arrival_goes_first_and_the_oldest_never() -> None:
    driver = Driver(make_capacity(20, 4, 8, 80, batch_tokens=16))
    mislead(driver)
    driver.add(*(make_request(f"r{i}", make_prompt(8, first=i), max_tokens=60) for i in range(6)))
    driver.run()
    driver.check_outputs()
    assert driver.ends["r0"].num_preemptions == 0
    assert next(iter(driver.ends)) == "r0"
    assert driver.num_preemptions > 0


def test_no_preemption_when_a_request_that_ends_gives_enough_pages() -> None:
    """Two decodes need a page, none is left, but the last token of a third is on its way: they sit out once."""
    driver = Driver(make_capacity(9, 4, 4, 36, batch_tokens=32))
    mislead(driver)
    driver.add(make_request("ends", make_prompt(8), max_tokens=5))
    driver.add(*(make_request(name, make_prompt(8, first=i), max_tokens=8) for i, name in enumerate("ab", start=1)))
    driver.run()
    driver.check_outputs()
    assert driver.num_preemptions == 0


def test_no_more_preemptions_than_needed() -> None:
    """Four decodes need a page at once; the pages of one of them are enough for the others."""
    driver = Driver(make_capacity(12, 4, 4, 48, batch_tokens=32))
    mislead(driver)
    driver.add(*(make_request(f"r{i}", make_prompt(8, first=i), max_tokens=8) for i in range(4)))
    driver.run()
    driver.check_outputs()
    assert driver.num_preemptions == 1


def test_prompts_that_hold_all_pages_do_not_block_each_other() -> None:
    """Two half prefilled prompts, no page left, nothing in flight: the later one must give way."""
    driver = Driver(make_capacity(10, 4, 4, 40, batch_tokens=8))
    driver.add(make_request("a", make_prompt(37), max_tokens=1), make_request("b", make_prompt(33, first=1), 1))
    residence = driver.scheduler._residence
    for request in list(driver.scheduler._requests.values()):  # as if the forecast had let both in
        residence.place(request, [])
        slot, pages = request.slot, residence.add_pages(request.slot, 5)
        residence.slots.computed[slot] = 20
        assert len(pages) == 5
    assert residence.pool.num_available == 0
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    assert residence.slots.ids[plan.slots].tolist() == ["a"]
    assert driver.scheduler._requests["b"].num_preemptions == 1
    driver.scheduler.check_integrity()


def test_hundreds_of_mixed_requests_with_tiny_kv() -> None:
    """Long prompts beside short decodes, a small batch, preemption all the time."""
    driver = Driver(make_capacity(40, 4, 16, 120, batch_tokens=12))
    mislead(driver)
    for i in range(300):
        length = 60 + i % 40 if i % 10 == 0 else 1 + i % 7
        driver.add(make_request(f"r{i}", make_prompt(length, first=i), max_tokens=10 + i % 40, seed=i))
        driver.step()
        if i % 20 == 0:
            mislead(driver)
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    assert driver.num_preemptions > 10
