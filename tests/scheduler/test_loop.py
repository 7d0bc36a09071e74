"""The one-ahead loop in a thread of its own, with an executor that runs in another."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import pytest
from fake_executor import ThreadedExecutor, expected_output, make_capacity, make_prompt, make_request
from fake_store import FakeStore

from scheduler.loop import EngineLoop
from scheduler.plan import Cancel, OutputBatch, RequestEnd
from scheduler.ports import ExecutorError
from scheduler.request import FinishReason
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig


class Engine:
    """A loop, its executor, and what came out."""

    def __init__(
        self, step_s: float = 0.0, step_timeout_s: float = 10.0, max_slots: int = 8, store: FakeStore | None = None
    ) -> None:
        self.executor = ThreadedExecutor(make_capacity(max_slots=max_slots), step_s, store)
        config = SchedulerConfig(store=StoreConfig(PrefetchPolicy.WAIT, max_wait_s=0.5))
        scheduler = Scheduler(config, self.executor.capacity, store)
        self.loop = EngineLoop(scheduler, self.executor, self._emit, step_timeout_s)
        self.batches: list[OutputBatch] = []
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestEnd] = {}
        self.error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.loop.stop()
        self._thread.join(timeout=10)
        self.executor.close()
        assert not self._thread.is_alive()

    def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Until something that outputs change is so."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "nothing came"

    def join(self) -> None:
        """Until the loop has returned by itself."""
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def _emit(self, batch: OutputBatch) -> None:
        with self._changed:
            self.batches.append(batch)
            for request_id, token in zip(batch.request_ids, batch.token_ids.tolist(), strict=True):
                self.outputs[request_id].append(token)
            self.ends |= {end.request_id: end for end in batch.ends}
            self._changed.notify()

    def _run(self) -> None:
        try:
            self.loop.run()
        except ExecutorError as error:
            self.error = error


@contextmanager
def engine(
    step_s: float = 0.0, step_timeout_s: float = 10.0, max_slots: int = 8, store: FakeStore | None = None
) -> Iterator[Engine]:
    with Engine(step_s, step_timeout_s, max_slots, store) as running:
        yield running


def test_requests_from_several_threads_all_end_with_their_own_output() -> None:
    with engine() as running:
        requests = [make_request(f"r{i}", make_prompt(3 + i, first=i), max_tokens=10) for i in range(24)]
        threads = [threading.Thread(target=running.loop.submit, args=(requests[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        running.wait(lambda: len(running.ends) == 24)
        for request in requests:
            assert running.outputs[request.request_id] == expected_output(request, 128)
    assert running.error is None


def test_the_queue_goes_on_when_the_only_slot_becomes_free() -> None:
    """Between the two requests nothing is in flight and nobody calls: the loop must not fall asleep."""
    with engine(max_slots=1) as running:
        running.loop.submit([make_request("first", 5, max_tokens=1), make_request("second", 5, max_tokens=1)])
        running.wait(lambda: len(running.ends) == 2)


def test_it_plans_at_most_one_step_ahead() -> None:
    with engine(step_s=0.002) as running:
        running.loop.submit([make_request("r", 5, max_tokens=30)])
        running.wait(lambda: "r" in running.ends)
    assert running.executor.max_queued == 2  # the one that runs and the next one
    steps = [batch.stats.step for batch in running.batches if batch.stats is not None]
    assert steps == list(range(len(steps)))


def test_no_plan_is_late_while_the_executor_is_slower_than_planning() -> None:
    with engine(step_s=0.02) as running:
        running.loop.submit([make_request("r", 5, max_tokens=20)])
        running.wait(lambda: "r" in running.ends)
    late = [batch.stats.late for batch in running.batches if batch.stats is not None]
    assert len(late) == 20
    assert sum(late) <= 2  # a shared machine may take a pause


def test_a_late_plan_is_told() -> None:
    """With a consumer that blocks the loop, the executor has to wait."""
    with engine(step_s=0.001) as running:
        emit = running.loop._emit

        def slow(batch: OutputBatch) -> None:
            time.sleep(0.02)
            emit(batch)

        running.loop._emit = slow  # type: ignore[method-assign]
        running.loop.submit([make_request("r", 5, max_tokens=10)])
        running.wait(lambda: "r" in running.ends)
    late = [batch.stats.late for batch in running.batches if batch.stats is not None]
    assert not late[0], "the first step after idling is never late"
    assert sum(late[2:]) >= len(late) - 4


def test_it_sleeps_while_idle_and_wakes_up() -> None:
    with engine() as running:
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert not running.batches
        for name in ("a", "b"):
            running.loop.submit([make_request(name, 5, max_tokens=3)])
            running.wait(lambda name=name: name in running.ends)  # type: ignore[misc]
            time.sleep(0.02)


def test_refusals_and_cancels_are_told_without_a_step() -> None:
    with engine() as running:
        running.loop.submit([make_request("bad", [])])
        running.wait(lambda: "bad" in running.ends)
        assert running.ends["bad"].finish_reason is FinishReason.FAILED
        running.loop.cancel([Cancel("nobody")])
        request = make_request("gone", 5)
        running.loop.submit([request])
        running.loop.cancel([Cancel("gone")])
        running.wait(lambda: "gone" in running.ends)
    assert next(batch.stats for batch in running.batches if not batch.request_ids) is None
    assert running.error is None


def test_a_bad_request_harms_no_other() -> None:
    with engine(step_s=0.001) as running:
        good = make_request("good", 5, max_tokens=20)
        running.loop.submit([good, make_request("too-long", 500), make_request("odd", [2**40]), good])
        running.wait(lambda: len(running.outputs["good"]) == 20)
        assert running.outputs["good"] == expected_output(good, 128)
        running.wait(lambda: running.ends.keys() >= {"too-long", "odd"})
    assert running.error is None


def test_a_cancel_while_running_ends_it_soon() -> None:
    with engine(step_s=0.002) as running:
        running.loop.submit([make_request("r", 5, max_tokens=100)])
        running.wait(lambda: len(running.outputs["r"]) >= 3)
        running.loop.cancel([Cancel("r", FinishReason.STOP)])
        running.wait(lambda: "r" in running.ends)
        running.wait(lambda: running.batches[-1].load.live_pages == 0)
        assert running.ends["r"].finish_reason is FinishReason.STOP
        assert len(running.outputs["r"]) < 50


def test_a_deadline_passes_while_running() -> None:
    with engine(step_s=0.01) as running:
        running.loop.submit([make_request("r", 5, max_tokens=100, timeout_s=0.1)])
        running.wait(lambda: "r" in running.ends)
        assert running.ends["r"].finish_reason is FinishReason.EXPIRED


def test_a_silent_executor_is_lost_after_the_timeout() -> None:
    with engine(step_timeout_s=0.2) as running:
        running.executor.hang_at = 3
        started = time.monotonic()
        running.loop.submit([make_request("r", 5, max_tokens=50)])
        running.join()
        assert time.monotonic() - started < 3
    assert isinstance(running.error, ExecutorError)
    assert "r" not in running.ends
    assert len(running.outputs["r"]) == 3


def test_a_dead_executor_is_lost_at_once() -> None:
    with engine() as running:
        running.executor.die_at = 3
        running.loop.submit([make_request("r", 5, max_tokens=50)])
        running.join()
    with pytest.raises(ExecutorError, match="the rank died"):
        raise running.error or AssertionError("no error")


def test_flush_and_load_from_another_thread() -> None:
    with engine() as running:
        running.loop.submit([make_request("r", 9, max_tokens=3)])
        running.wait(lambda: "r" in running.ends)
        assert running.loop.load().cached_pages == 2
        assert running.loop.flush_cache() == 2
        assert running.loop.load().cached_pages == 0


def test_stop_returns_after_the_step_in_flight() -> None:
    with engine(step_s=0.02) as running:
        running.loop.submit([make_request("r", 5, max_tokens=100)])
        running.wait(lambda: len(running.outputs["r"]) >= 2)
    assert "r" not in running.ends
    assert running.error is None


def test_pages_go_to_the_store_after_the_last_request_and_come_back() -> None:
    """Nobody calls in between: the loop must not fall asleep before the pages are stored, and sleep afterwards."""
    store = FakeStore()
    with engine(step_s=0.01, store=store) as running:
        first = make_request("first", 17, max_tokens=1)
        running.loop.submit([first])
        running.wait(lambda: sum(batch.stats.moves.num_stored for batch in running.batches if batch.stats) == 4)
        num_batches = len(running.batches)
        time.sleep(0.1)
        assert len(running.batches) == num_batches
        assert running.loop.flush_cache() == 4
        second = make_request("second", 17, max_tokens=5)
        running.loop.submit([second])
        running.wait(lambda: "second" in running.ends)
        assert running.outputs["second"] == expected_output(second, 128)
    assert running.ends["second"].num_cpu_cached_tokens == 16
    assert not any(batch.stats.late for batch in running.batches[:3] if batch.stats is not None)


def test_it_naps_while_the_store_does_not_answer() -> None:
    store = FakeStore(answer_delay=None)
    with engine(step_s=0.001, store=store) as running:
        started, cpu_s = time.monotonic(), time.process_time()
        running.loop.submit([make_request("r", 17, max_tokens=3)])
        running.wait(lambda: "r" in running.ends)
        assert time.monotonic() - started > 0.5
        assert time.process_time() - cpu_s < 0.3
        assert running.ends["r"].queue_s == pytest.approx(0.5, abs=0.3)
    assert running.error is None


def test_while_it_runs_no_garbage_is_sought_in_what_was_there_before() -> None:
    """A full collection of a process that has loaded a model takes several steps' time."""
    with Engine() as engine:
        engine.loop.submit([make_request("a", make_prompt(5), max_tokens=3)])
        engine.wait(lambda: "a" in engine.ends)
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
