"""Nobody waits for ever, and nobody waits for a big neighbour."""

from driver import Driver
from fake_executor import make_capacity, make_prompt, make_request

from scheduler.scheduler import SchedulerConfig


def steps_until(driver: Driver, request_id: str, num_tokens: int = 1, max_steps: int = 500) -> int:
    """Iterations until it has so many tokens."""
    for num_steps in range(max_steps):
        if len(driver.outputs[request_id]) >= num_tokens:
            return num_steps
        driver.step()
    raise AssertionError(f"{request_id} has {len(driver.outputs[request_id])} tokens after {max_steps} steps")


def started(driver: Driver) -> list[str]:
    """Ids in the order in which they were started."""
    return [start.request_id for plan in driver.plans for start in plan.slot_starts]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = Driver(make_capacity(600, 4, 8, 2000, batch_tokens=16))
    driver.add(make_request("long", make_prompt(1600), max_tokens=2))
    for _ in range(3):
        driver.step()
    driver.add(make_request("short", make_prompt(20, first=1), max_tokens=4))
    assert steps_until(driver, "short") <= 5  # alone: 2 iterations and the one in flight
    assert not driver.outputs["long"]
    driver.run()
    driver.check_outputs()


def test_a_long_prompt_gets_its_share_among_short_ones() -> None:
    driver = Driver(make_capacity(600, 4, 16, 500, batch_tokens=16), SchedulerConfig(oldest_prefill_share=0.25))
    driver.add(make_request("long", make_prompt(200), max_tokens=2))
    num_steps = 0
    while not driver.outputs["long"]:
        for i in range(2):
            driver.add(make_request(f"s{num_steps}-{i}", make_prompt(14, first=2 * num_steps + i), max_tokens=1))
        driver.step()
        num_steps += 1
        assert num_steps < 200 // 4 + 5
    assert num_steps > 200 // 16 + 5, "the short ones got nothing"


def test_equal_prompts_are_prefilled_one_after_the_other() -> None:
    """Sharing tokens evenly would end all of them late."""
    driver = Driver(make_capacity(600, 4, 8, 500, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(64, first=i), max_tokens=2) for i in range(3)))
    assert steps_until(driver, "r0") <= 4 + 1
    assert steps_until(driver, "r1") <= 4 + 1


def test_all_run_soon_after_the_last_prefill_chunk() -> None:
    """A "batch is full" flag once stayed on: slots and pages were free, yet a fourth request waited."""
    driver = Driver(make_capacity(600, 4, max_slots=4, max_model_len=200, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(50, first=i), max_tokens=100) for i in range(4)))
    for _ in range(4 * 50 // 16 + 4):
        driver.step()
    assert driver.scheduler.load().num_running == 4
    assert driver.scheduler.load().num_waiting == 0
    assert driver.plans[-1].num_decodes == 4


def test_small_ones_pass_a_big_one_but_only_so_often() -> None:
    """One that needs 80 % of the pages while half of them is used, then many small ones."""
    config = SchedulerConfig(max_passes=6)
    driver = Driver(make_capacity(50, 4, 8, 200, batch_tokens=32), config)
    driver.add(make_request("running", make_prompt(20), max_tokens=80))
    driver.step()
    driver.add(make_request("big", make_prompt(120, first=1), max_tokens=40))
    for i in range(40):
        driver.add(make_request(f"small{i}", make_prompt(4, first=i), max_tokens=4))
    steps_until(driver, "small0")
    assert not driver.outputs["big"]
    steps_until(driver, "big", max_steps=200)
    num_passed = started(driver).index("big") - 1
    assert 1 <= num_passed <= config.max_passes
    driver.run()
    driver.check_outputs()


def test_a_big_one_is_started_in_bounded_time_under_a_steady_stream() -> None:
    driver = Driver(make_capacity(50, 4, 8, 200, batch_tokens=32), SchedulerConfig(max_passes=6))
    num_steps = 0
    while not driver.outputs["big"]:
        driver.add(make_request(f"small{num_steps}", make_prompt(8, first=num_steps), max_tokens=20))
        if num_steps == 5:
            driver.add(make_request("big", make_prompt(150, first=1), max_tokens=40))
        driver.step()
        num_steps += 1
        assert num_steps < 150
    driver.run()
    driver.check_outputs()


def test_order_of_arrival_where_all_are_equal() -> None:
    driver = Driver(make_capacity(100, 4, max_slots=2, max_model_len=64, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(6, first=i), max_tokens=8) for i in range(10)))
    driver.run()
    assert started(driver) == [f"r{i}" for i in range(10)]
