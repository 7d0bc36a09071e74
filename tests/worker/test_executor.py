"""The worker's limits and faults, and the executor that runs it in a thread."""

import json
import os
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scheduler.plan import IterationPlan, SlotStart, StepResult
from scheduler.ports import ExecutorError
from worker.config import WorkerConfig
from worker.executor import CapacityError, LocalExecutor, Worker
from worker.sharding import ShardingError


def config(folder, **changes):
    defaults = {"max_batch_tokens": 32, "max_slots": 8, "page_size": 8, "num_pages": 32, "num_threads": 1}
    return WorkerConfig(folder, **{**defaults, **changes})


def loaded(folder, **changes):
    worker = Worker(config(folder, **changes))
    worker.load()
    return worker


class TestLimits:
    def test_the_longest_request_is_fitted_to_model_and_pages(self, random_model):
        folder = random_model("llama")  # made for 256 tokens
        assert Worker(config(folder, num_pages=64)).capacity.max_model_len == 256
        assert Worker(config(folder, num_pages=5)).capacity.max_model_len == 40
        assert Worker(config(folder, max_model_len=100)).capacity.max_model_len == 100

    def test_memory_decides_the_pages_unless_all_slots_are_full_before(self, random_model):
        folder = random_model("llama")  # 2 layers, 4 KV heads of 8: 512 bytes of K and V per token
        page = 8 * 2 * 2 * 4 * 8 * 4
        worker = Worker(config(folder, num_pages=None, kv_cache_bytes=10 * page + page // 2))
        assert worker.capacity.num_pages == 10
        worker = Worker(config(folder, num_pages=None, max_slots=2))
        assert worker.capacity.num_pages == 2 * 256 // 8

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_model_len": 257}, "context of 256"),
            ({"max_model_len": 100, "num_pages": 4}, "KV cache of 32 tokens"),
            ({"num_pages": None, "kv_cache_bytes": 100}, "does not hold one page"),
            ({"num_pages": 0}, "at least 1"),
            ({"num_pages": 1, "page_size": 1}, "needs two at least"),
            ({"page_size": 0}, "at least 1"),
            ({"max_slots": 0}, "at least 1"),
            ({"max_batch_tokens": 0}, "at least 1"),
            ({"nano_batches": 0}, "at least 1"),
            ({"dtype": "float16"}, "float32"),
            ({"device": "cuda"}, "cuda"),
        ],
    )
    def test_limits_that_leave_no_room_are_refused(self, changes, message, random_model):
        with pytest.raises(CapacityError, match=message):
            Worker(config(random_model("llama"), **changes))

    def test_ranks_that_cannot_share_the_model_are_refused(self, random_model):
        with pytest.raises(ShardingError, match="3 does not divide the model's 8 attention heads"):
            Worker(config(random_model("llama"), tensor_parallel_size=3))

    def test_a_request_may_fill_the_whole_context(self, random_model, reference, planner, ask):
        folder = random_model("llama")
        one = ask(list(range(90)), 256 - 90)
        planner(loaded(folder)).run([one])
        expected = reference(folder)(one.prompt + one.output)[89:-1].argmax(-1).tolist()
        assert one.output == expected


class TestFaults:
    @pytest.fixture
    def poisoned(self, random_model, tmp_path):
        """A model in which token 13 is not a number."""
        source = random_model("llama")
        tensors = load_file(source / "model.safetensors")
        tensors["model.embed_tokens.weight"][13] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        return tmp_path

    def test_a_fault_is_its_row_s_alone(self, poisoned, random_model, planner, ask):
        prompts = [list(range(1, 12)), [4, 13, *range(20, 40)], list(range(50, 64))]

        def sound(planner_of):
            asks = [ask(prompts[0], 20), ask(prompts[2], 20, temperature=0.7, seed=3)]
            return planner_of.run(asks, slots=[0, 2])

        expected = sound(planner(loaded(random_model("llama"))))
        worker = loaded(poisoned, num_pages=16)
        plans = planner(worker)
        faulty = ask(prompts[1], 20)
        outputs = plans.run([ask(prompts[0], 20), faulty, ask(prompts[2], 20, temperature=0.7, seed=3)])
        assert [outputs[0], outputs[2]] == expected
        assert set(plans.faults) == {1}
        assert "finite" in plans.faults[1]

    def test_what_a_fault_leaves_in_all_pages_harms_no_later_request(self, poisoned, random_model, planner, ask):
        """Requests of about one length are computed together, padded to the longest of them."""
        prompts = [list(range(20, 20 + n)) for n in (11, 12, 14, 13)]

        def sound(worker):
            return planner(worker).run([ask(prompt, 20) for prompt in prompts])

        expected = sound(loaded(random_model("llama"), num_pages=20))
        assert not any(13 in output for output in expected)
        worker = loaded(poisoned, num_pages=20)
        faulty = planner(worker)
        faulty.run([ask([4, 13, *[5] * 138], 20)])  # fills all 20 pages
        assert faulty.faults
        assert sound(worker) == expected

    def test_a_plan_that_samples_nothing(self, random_model):
        worker = loaded(random_model("llama"))
        start = SlotStart(0, "a", np.arange(20, dtype=np.int32), 0, 0.0, 0, 1.0, 0)
        one = np.array([0], np.int32)
        count = np.array([12], np.int32)
        plan = IterationPlan(
            0, 2, (start,), one, one, one, slots=one, starts=one, counts=count, num_decodes=0, samples=np.array([False])
        )
        result = worker.execute(plan)
        assert result.sampled.shape == (0,)
        assert result.faults == ()

    def test_times_are_measured(self, random_model, planner, ask):
        worker = loaded(random_model("llama"))
        results = []
        execute = worker.execute

        def slow_planner(plan):
            time.sleep(0.02)
            results.append(execute(plan))
            return results[-1]

        worker.execute = slow_planner
        planner(worker).run([ask([1, 2, 3], 4)])
        assert results[0].idle_s == 0
        assert all(result.idle_s >= 0.02 for result in results[1:])
        assert all(0 < result.run_s < 5 for result in results)


def plan_of(step):
    nothing = np.empty(0, np.int32)
    return IterationPlan(
        step, 0, (), nothing, nothing, nothing, nothing, nothing, nothing, num_decodes=0, samples=np.empty(0, bool)
    )


class NoSchedules:
    def use(self, number):
        raise KeyError(f"no set {number}")


class SlowWorker:
    """A stand-in whose steps wait for a signal."""

    capacity = object()

    def __init__(self):
        self.schedules = NoSchedules()
        self.go = threading.Semaphore(0)
        self.seen = []
        self.closed = 0

    def execute(self, plan):
        assert self.go.acquire(timeout=10)
        self.seen.append((plan.step, threading.current_thread().name))
        if plan.step == 13:
            raise ValueError("the device caught fire")
        return StepResult(plan.step, np.empty(0, np.int32), (), 0.0, 0.0)

    def close(self):
        self.closed += 1


class TestLocalExecutor:
    @pytest.fixture
    def worker(self):
        return SlowWorker()

    @pytest.fixture
    def executor(self, worker):
        executor = LocalExecutor(worker)
        yield executor
        for _ in range(20):
            worker.go.release()
        executor.close()

    def test_submit_returns_at_once_and_plans_run_in_order(self, worker, executor):
        steps = [executor.submit(plan_of(step)) for step in range(4)]
        assert not steps[0].done()
        with pytest.raises(ExecutorError, match=r"within 0\.01 s"):
            steps[0].result(0.01)
        for _ in steps:
            worker.go.release()
        assert [step.result(5).step for step in steps] == [0, 1, 2, 3]
        assert steps[0].done()
        assert [step for step, _ in worker.seen] == [0, 1, 2, 3]
        assert len({name for _, name in worker.seen} - {threading.current_thread().name}) == 1

    def test_a_failed_step_loses_the_executor(self, worker, executor):
        failed, later = executor.submit(plan_of(13)), executor.submit(plan_of(14))
        worker.go.release()
        worker.go.release()
        with pytest.raises(ExecutorError, match="caught fire"):
            failed.result(5)
        with pytest.raises(ExecutorError, match="earlier step failed"):
            later.result(5)
        with pytest.raises(ExecutorError, match="earlier step failed"):
            executor.submit(plan_of(15)).result(5)
        assert [step for step, _ in worker.seen] == [13]

    def test_a_set_of_schedules_that_was_never_ready_loses_the_executor(self, worker, executor):
        executor.use_schedules(9)
        with pytest.raises(ExecutorError, match="earlier step failed: 'no set 9'"):
            executor.submit(plan_of(0)).result(5)
        assert worker.seen == []

    def test_closing_drops_what_has_not_begun(self, worker, executor):
        running, waiting = executor.submit(plan_of(0)), executor.submit(plan_of(1))
        threading.Timer(0.1, worker.go.release).start()
        executor.close()
        assert running.result(5).step == 0
        with pytest.raises(ExecutorError, match="closed"):
            waiting.result(5)
        with pytest.raises(ExecutorError, match="closed"):
            executor.submit(plan_of(2))
        executor.close()
        assert worker.closed >= 1

    def test_it_gives_the_worker_s_tokens(self, random_model, planner, ask):
        folder = random_model("llama")
        expected = planner(loaded(folder)).run([ask([5, 6, 7], 10)])
        worker = loaded(folder)
        executor = LocalExecutor(worker)

        class Through:
            capacity = executor.capacity

            def execute(self, plan):
                return executor.submit(plan).result(30)

        assert planner(Through()).run([ask([5, 6, 7], 10)]) == expected
        executor.close()


def test_threads_of_a_rank_are_set(random_model):
    before = torch.get_num_threads()
    try:
        loaded(random_model("llama"), num_threads=2)
        assert torch.get_num_threads() == 2
        loaded(random_model("llama"), num_threads=None)
        assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)


def test_config_errors_come_before_anything_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="BertModel"):
        Worker(config(tmp_path))
