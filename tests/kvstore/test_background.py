"""Work in the background: bounded, and ended in time."""

from __future__ import annotations

import threading
import time

from kvstore.background import Background


def test_jobs_run_in_order_and_a_failing_one_ends_nothing():
    done: list[int] = []
    background = Background("test", 1, 10)
    background.submit(lambda: done.append(1))
    background.submit(lambda: done.append(1 // 0))
    background.submit(lambda: done.append(2))
    background.finish()
    assert done == [1, 2]
    assert background.close(5.0)


def test_too_many_are_refused_at_once():
    let_go = threading.Event()
    background = Background("test", 1, 2)
    background.submit(let_go.wait)
    deadline = time.monotonic() + 5
    while background.num_waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    began = time.monotonic()
    assert [background.submit(let_go.wait) for _ in range(4)] == [True, True, False, False]
    assert time.monotonic() - began < 1.0
    let_go.set()
    assert background.close(5.0)


def test_closing_does_what_time_allows_and_drops_the_rest():
    done: list[int] = []

    def job() -> None:
        time.sleep(0.1)
        done.append(1)

    background = Background("test", 1, 1000)
    for _ in range(100):
        background.submit(job)
    began = time.monotonic()
    assert background.close(1.0)
    assert time.monotonic() - began < 2.0
    assert 1 <= len(done) <= 15


def test_a_job_that_hangs_is_left_behind():
    let_go = threading.Event()
    background = Background("test", 1, 2)
    background.submit(lambda: let_go.wait(10))
    began = time.monotonic()
    assert not background.close(0.3)
    assert time.monotonic() - began < 2.0
    let_go.set()
