"""Pages that are hit, and pages that must not be."""

import pytest
from driver import Driver
from fake_executor import make_capacity, make_prompt, make_request

from scheduler.scheduler import SchedulerConfig

PAGE = 4


def run_one(driver: Driver, request_id: str, prompt: list[int], max_tokens: int = 6, salt: str = "") -> int:
    """Tokens that it took from the cache."""
    driver.add(make_request(request_id, prompt, max_tokens, salt=salt))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()
    return driver.ends[request_id].num_cached_tokens


@pytest.mark.parametrize("length", [n * PAGE + d for n in (1, 2, 3) for d in (-1, 0, 1)])
def test_the_same_prompt_twice(length: int) -> None:
    """All full pages are hit, but at least one token is computed."""
    driver = Driver(make_capacity(page_size=PAGE))
    assert run_one(driver, "first", make_prompt(length), max_tokens=1) == 0
    assert run_one(driver, "second", make_prompt(length)) == (length - 1) // PAGE * PAGE
    assert driver.outputs["second"][:1] == driver.outputs["first"]


def test_the_next_round_of_a_conversation_hits_the_last_output() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    first = make_prompt(10)
    run_one(driver, "round-1", first, max_tokens=11)
    second = first + driver.outputs["round-1"] + make_prompt(7, first=3)
    # KV of the last output token was never computed: 20 tokens are there, which is 5 pages.
    assert run_one(driver, "round-2", second) == 20


def test_prompts_share_their_common_pages_only() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    common = make_prompt(14)
    run_one(driver, "a", [*common, 1, 2, 3])
    assert run_one(driver, "b", [*common, 4, 5, 6]) == 12


def test_a_page_counts_only_after_all_pages_before_it() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    run_one(driver, "a", [1] * 4 + [2] * 4 + [3])
    assert run_one(driver, "b", [2] * 4 + [3]) == 0
    assert run_one(driver, "c", [9] * 4 + [2] * 4 + [3]) == 0


def test_salts_never_share() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    prompt = make_prompt(13)
    run_one(driver, "a", prompt, salt="tenant-a")
    assert run_one(driver, "b", prompt, salt="tenant-b") == 0
    assert run_one(driver, "none", prompt) == 0
    assert run_one(driver, "a-again", prompt, salt="tenant-a") == 12


def test_requests_that_run_together_share_pages_that_are_full() -> None:
    """Not those that are filled in the same iteration, nor those whose step is still in flight."""
    driver = Driver(make_capacity(page_size=PAGE, batch_tokens=64))
    prompt = make_prompt(17)
    driver.add(make_request("a", prompt, max_tokens=20), make_request("same-step", prompt, max_tokens=20))
    driver.step()
    driver.add(make_request("in-flight", prompt, max_tokens=20))
    driver.step()
    driver.step()
    driver.add(make_request("later", prompt, max_tokens=20))
    driver.run()
    driver.check_outputs()
    cached = {request_id: end.num_cached_tokens for request_id, end in driver.ends.items()}
    assert cached == {"a": 0, "same-step": 0, "in-flight": 0, "later": 16}
    driver.check_baseline()


def test_the_least_recently_used_chain_is_given_up_first() -> None:
    driver = Driver(make_capacity(num_pages=12, page_size=PAGE, max_model_len=48))
    a, b, c = (make_prompt(16, first=i) for i in range(3))
    for name, prompt in (("a", a), ("b", b), ("a2", a)):
        run_one(driver, name, prompt, max_tokens=1)
    run_one(driver, "c", c, max_tokens=17)  # needs 8 of 12 pages
    assert run_one(driver, "a3", a, max_tokens=1) >= 8
    assert run_one(driver, "b2", b, max_tokens=1) == 0


def test_a_chain_loses_its_end_first() -> None:
    driver = Driver(make_capacity(num_pages=8, page_size=PAGE, max_model_len=32))
    prompt = make_prompt(25)
    run_one(driver, "a", prompt, max_tokens=1)  # 6 full pages stay
    run_one(driver, "b", make_prompt(13, first=1), max_tokens=1)  # needs 4: 2 free ones and the 2 last cached ones
    assert run_one(driver, "a2", prompt, max_tokens=1) == 16


def test_nothing_is_cached_when_it_is_switched_off() -> None:
    driver = Driver(make_capacity(page_size=PAGE), SchedulerConfig(enable_prefix_caching=False))
    run_one(driver, "a", make_prompt(16))
    assert driver.scheduler.load().cached_pages == 0
    assert run_one(driver, "b", make_prompt(16)) == 0


def test_flush_forgets_everything() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    run_one(driver, "a", make_prompt(16), max_tokens=1)
    assert driver.scheduler.flush_cache() == 4
    driver.scheduler.check_integrity()
    assert driver.scheduler.load().cached_pages == 0
    assert run_one(driver, "b", make_prompt(16)) == 0


def test_a_flush_while_running_harms_nobody() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    driver.add(make_request("a", 16, max_tokens=30))
    for _ in range(30):
        driver.step()
        driver.scheduler.flush_cache()
        driver.scheduler.check_integrity()
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_hits_are_counted_once_per_request() -> None:
    driver = Driver(make_capacity(page_size=PAGE))
    run_one(driver, "a", make_prompt(16))
    run_one(driver, "b", make_prompt(16))
    assert sum(stats.prefix_queries for stats in driver.stats) == 32
    assert sum(stats.prefix_hits for stats in driver.stats) == 12
