"""What the scheduler promises for single requests, and what a full batch looks like."""

import numpy as np
import pytest
from driver import Driver
from fake_executor import VOCAB, expected_output, make_capacity, make_prompt, make_request

from scheduler.plan import StepResult
from scheduler.ports import ExecutorError
from scheduler.request import FinishReason
from scheduler.scheduler import Scheduler, SchedulerConfig


@pytest.mark.parametrize("batch_tokens", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_every_prompt_length_around_every_chunk_edge(batch_tokens: int, page_size: int) -> None:
    driver = Driver(make_capacity(100, page_size, 4, 60, batch_tokens))
    for length in range(1, 3 * batch_tokens + 2):
        driver.add(make_request(f"r{length}", make_prompt(length, first=length), max_tokens=5))
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_prefill_fills_the_batch_to_the_last_token() -> None:
    driver = Driver(make_capacity(200, 4, 8, 128, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(30 + i, first=i), max_tokens=40) for i in range(8)))
    while driver.scheduler.load().num_waiting:
        driver.step()
        assert driver.plans[-1].num_tokens == 16
    driver.run()
    driver.check_outputs()


def test_the_smallest_bucket_that_holds_the_rows_is_used() -> None:
    driver = Driver(make_capacity(batch_tokens=16))
    driver.add(make_request("small", 8, max_tokens=2))
    driver.step()
    driver.add(make_request("big", make_prompt(16, first=1), max_tokens=2))
    driver.step()
    assert [plan.bucket for plan in driver.plans] == [0, 1]
    driver.run()


def test_rows_are_decodes_first_and_all_of_them() -> None:
    """Under steady arrivals of long prompts, running requests still get a token in every iteration."""
    driver = Driver(make_capacity(400, 4, 12, 200, batch_tokens=16))
    driver.add(*(make_request(f"d{i}", make_prompt(2, first=i), max_tokens=100) for i in range(4)))
    for _ in range(4):
        driver.step()
    for i in range(60):
        driver.add(make_request(f"p{i}", make_prompt(80, first=i), max_tokens=1))
        driver.step()
        assert driver.plans[-1].num_decodes >= 4
        assert driver.plans[-1].num_tokens == 16
    assert all(len(driver.outputs[f"d{i}"]) >= 60 for i in range(4))


@pytest.mark.parametrize("batch_tokens", [1, 2, 3])
def test_more_requests_than_rows(batch_tokens: int) -> None:
    driver = Driver(make_capacity(200, 4, max_slots=8, max_model_len=100, batch_tokens=batch_tokens))
    driver.add(*(make_request(f"r{i}", make_prompt(3, first=i), max_tokens=30) for i in range(8)))
    driver.run()
    driver.check_outputs()
    assert max(plan.num_decodes for plan in driver.plans) == batch_tokens


@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_output"), [(39, 50, 1), (38, 50, 2), (5, 1, 1), (1, 39, 39)])
def test_a_request_ends_at_its_limit_and_no_row_is_wasted(prompt_len: int, max_tokens: int, num_output: int) -> None:
    driver = Driver(make_capacity(10, 4, 4, max_model_len=40, batch_tokens=16))
    driver.add(make_request("r", prompt_len, max_tokens))
    driver.run()
    assert driver.ends["r"].finish_reason is FinishReason.LENGTH
    assert driver.ends["r"].num_output_tokens == num_output == len(driver.outputs["r"])
    assert sum(stats.num_wasted_tokens for stats in driver.stats) == 0
    driver.check_outputs()


def test_any_of_several_stop_ids_ends_it_with_one_wasted_token() -> None:
    request = make_request("r", 5, max_tokens=30)
    expected = expected_output(request, 128)
    stop = expected[4]
    assert stop not in expected[:4]
    unused = tuple(range(VOCAB, VOCAB + 40))
    driver = Driver(make_capacity())
    driver.add(make_request("plain", make_prompt(6, first=3), max_tokens=30))
    driver.add(make_request("r", 5, max_tokens=30, stop=(*unused, stop)))
    driver.run()
    assert driver.outputs["r"] == expected[:5]
    assert driver.ends["r"].finish_reason is FinishReason.STOP
    assert len(driver.outputs["plain"]) == 30
    assert sum(stats.num_wasted_tokens for stats in driver.stats) == 1


def test_under_one_percent_of_the_tokens_are_wasted() -> None:
    """At mean outputs over 100 tokens, each ended by a stop token that is seen one iteration late."""
    rng = np.random.default_rng(0)
    driver = Driver(make_capacity(4000, 4, 32, 400, batch_tokens=64))
    for i in range(60):
        stop_at = int(rng.integers(60, 180))
        prompt = make_prompt(int(rng.integers(1, 60)), first=i)
        output = expected_output(make_request("x", prompt, 300), 400)
        stop = next(token for token in output[stop_at:] if token not in output[:stop_at])
        driver.add(make_request(f"r{i}", prompt, 300, stop=(stop,)))
    driver.run()
    driver.check_outputs()
    generated = sum(len(output) for output in driver.outputs.values())
    wasted = sum(stats.num_wasted_tokens for stats in driver.stats)
    assert generated / 60 > 100
    assert 0 < wasted < 0.01 * generated


def test_stats_account_for_every_row() -> None:
    driver = Driver(make_capacity())
    driver.add(*(make_request(f"r{i}", make_prompt(10 + i, first=i), max_tokens=6) for i in range(3)))
    driver.run()
    assert sum(stats.num_prompt_tokens for stats in driver.stats) == 10 + 11 + 12
    assert sum(stats.num_decodes for stats in driver.stats) == 3 * 5  # the first token comes with the prompt
    for stats in driver.stats:
        assert stats.num_tokens == stats.num_decodes + stats.num_prompt_tokens <= stats.batch_tokens
        assert not stats.late
    assert sum(stats.prefix_queries for stats in driver.stats) == 33


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "what"),
    [
        ([], 4, "no tokens"),
        ([1], 0, "max_tokens"),
        (make_prompt(40), 4, "at most 39"),
        (make_prompt(400), 4, "at most 39"),
        ([1, -1], 4, "out of range"),
        ([1, 2**31], 4, "out of range"),
    ],
)
def test_a_request_that_can_never_run_fails_alone(prompt: list[int], max_tokens: int, what: str) -> None:
    driver = Driver(make_capacity(10, 4, 4, max_model_len=40))
    driver.add(make_request("good", 5), make_request("bad", prompt, max_tokens))
    assert driver.ends["bad"].finish_reason is FinishReason.FAILED
    assert what in driver.ends["bad"].error
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_what_exceeds_all_pages_is_refused_and_what_just_fits_runs() -> None:
    capacity = make_capacity(num_pages=5, page_size=4, max_model_len=20)
    larger = type(capacity)(5, 4, 4, 64, capacity.buckets)  # an executor that did not fit its length to its pages
    driver = Driver(larger)
    driver.add(make_request("fits", 11, max_tokens=10), make_request("not", 11, max_tokens=11))
    assert driver.ends["not"].finish_reason is FinishReason.FAILED
    driver.run()
    assert len(driver.outputs["fits"]) == 10
    driver.check_outputs()


def test_a_second_request_with_a_live_id_fails_and_the_id_is_free_after_its_end() -> None:
    scheduler = Scheduler(SchedulerConfig(), make_capacity())
    scheduler.add(make_request("r", 5), 0.0)
    scheduler.add(make_request("r", 7), 0.0)
    refused = scheduler.take_ends()
    assert refused is not None
    assert [end.finish_reason for end in refused.ends] == [FinishReason.FAILED]
    assert refused.stats is None
    scheduler.check_integrity()
    assert scheduler.load().num_waiting == 1
    driver = Driver(make_capacity())
    driver.add(make_request("r", 5))
    driver.run()
    driver.ends.clear()
    driver.outputs.clear()
    driver.add(make_request("r", 9))
    driver.run()
    driver.check_outputs()


def test_a_full_queue_refuses() -> None:
    driver = Driver(make_capacity(), SchedulerConfig(max_waiting=2))
    driver.add(*(make_request(f"r{i}", 5) for i in range(3)))
    assert "queue is full" in driver.ends["r2"].error
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("num_steps", range(12))
def test_a_cancel_at_any_stage_frees_its_pages_within_two_iterations(num_steps: int) -> None:
    """Queued, in each chunk of its prefill, decoding: one end, pages back, neighbours unharmed."""
    driver = Driver(make_capacity(64, 4, 4, 128, batch_tokens=8), SchedulerConfig(enable_prefix_caching=False))
    driver.add(make_request("victim", make_prompt(40, first=1), max_tokens=20))
    for _ in range(num_steps):
        driver.step()
    driver.cancel("victim")
    assert driver.ends["victim"].finish_reason is FinishReason.CANCELLED
    driver.cancel("victim")  # once more: ignored
    driver.add(make_request("next", make_prompt(4, first=2), max_tokens=30))
    for _ in range(2):
        driver.step()
    assert driver.scheduler.load().live_pages <= 2  # those of the neighbour
    driver.run()
    driver.check_outputs()
    driver.check_baseline()


def test_pages_that_are_still_in_flight_are_waited_for() -> None:
    """All pages belong to a cancelled request whose step is running: the next one starts only after it."""
    driver = Driver(make_capacity(10, 4, 4, 40, batch_tokens=64), SchedulerConfig(enable_prefix_caching=False))
    driver.add(make_request("big", make_prompt(39), max_tokens=1))
    driver.step()
    driver.cancel("big")
    driver.add(make_request("next", make_prompt(4, first=2), max_tokens=3))
    driver.run()
    driver.check_outputs()
    assert len(driver.outputs["next"]) == 3


def test_an_unknown_cancel_is_ignored() -> None:
    driver = Driver(make_capacity())
    driver.cancel("nobody")
    assert not driver.ends
    assert not driver.step()


def test_deadlines_end_queued_and_running_requests() -> None:
    driver = Driver(make_capacity(64, 4, max_slots=1, max_model_len=128, batch_tokens=8))
    driver.add(make_request("running", 4, max_tokens=100, timeout_s=10.0))
    driver.add(make_request("queued", 4, max_tokens=100, timeout_s=5.0))
    driver.add(make_request("patient", 4, max_tokens=3))
    for _ in range(6):
        driver.step()
    driver.now = 5.0
    driver.step()
    assert driver.ends["queued"].finish_reason is FinishReason.EXPIRED
    assert driver.ends["queued"].queue_s == 5.0
    assert "running" not in driver.ends
    driver.now = 10.0
    driver.step()
    assert driver.ends["running"].finish_reason is FinishReason.EXPIRED
    assert driver.ends["running"].num_output_tokens == len(driver.outputs["running"]) > 3
    driver.run()
    assert driver.ends["patient"].finish_reason is FinishReason.LENGTH
    driver.check_outputs()
    driver.check_baseline()


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    driver = Driver(make_capacity())
    for i in range(1500):
        driver.add(make_request(f"r{i}", 1, max_tokens=1, timeout_s=1e9))
        driver.step()
    driver.run()
    assert len(driver.scheduler._deadlines) < 1100


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_faulty_row_ends_its_request_alone(num_steps: int) -> None:
    driver = Driver(make_capacity(64, 4, 4, 128, batch_tokens=8))
    names = ["a", "b", "c"]
    driver.add(*(make_request(name, make_prompt(9, first=i), max_tokens=12) for i, name in enumerate(names)))
    for _ in range(num_steps):
        driver.step()
    driver.executor.model.faulty.add("b")
    driver.run()
    assert driver.ends["b"].finish_reason is FinishReason.FAILED
    assert driver.ends["b"].error == "its logits are not finite"
    assert [driver.ends[name].finish_reason for name in "ac"] == [FinishReason.LENGTH] * 2
    driver.check_outputs()
    driver.check_baseline()


def test_pages_of_a_faulty_row_are_never_hit() -> None:
    driver = Driver(make_capacity(64, 4, 4, 128, batch_tokens=8))
    prompt = make_prompt(20)
    driver.executor.model.faulty.add("bad")
    driver.add(make_request("bad", prompt))
    driver.run()
    driver.add(make_request("good", prompt))
    driver.run()
    assert driver.ends["good"].num_cached_tokens == 0


@pytest.mark.parametrize("change", ["step", "rows"])
def test_a_result_of_another_step_loses_the_executor(change: str) -> None:
    scheduler = Scheduler(SchedulerConfig(), make_capacity())
    scheduler.add(make_request("r", 3), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    sampled = np.zeros(1 if change == "step" else 2, np.int32)
    result = StepResult(plan.step + (change == "step"), sampled, (), 0.0, 0.0)
    with pytest.raises(ExecutorError, match="not its own"):
        scheduler.finish(plan, result, 0.0)


def test_load_tells_who_runs_and_who_waits() -> None:
    driver = Driver(make_capacity(64, 4, max_slots=2, max_model_len=128, batch_tokens=16))
    driver.add(*(make_request(f"r{i}", make_prompt(6 + i, first=i), max_tokens=9) for i in range(4)))
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 4, 6 + 7 + 8 + 9)
    driver.step()
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (2, 2, 8 + 9)
    assert (load.live_pages, load.free_pages, load.total_pages) == (4, 60, 64)
    driver.run()
    driver.check_baseline()
    assert driver.scheduler.load().cached_pages > 0
