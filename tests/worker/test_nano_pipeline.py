"""Schedules in any valid order give the tokens of the sequential one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosearch.operators import layer_operators
from autosearch.pipeline import NanoOperation, PipelineSchedule, sequential
from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.executor import Worker
from worker.models.layer_operator import LayerOperator
from worker.nano_pipeline import NanoPipeline

BATCH = 32


def requests(ask):
    """Prompts whose chunks straddle every boundary of a batch of 32 rows."""
    draw = np.random.default_rng(6)
    return [ask(draw.integers(0, 101, n).tolist(), 12) for n in (3, 15, 16, 17, 31, 70, 1)]


def load(folder, **changes):
    worker = Worker(
        WorkerConfig(folder, max_batch_tokens=BATCH, max_slots=8, page_size=8, num_pages=128, num_threads=1, **changes)
    )
    worker.load()
    return worker


@pytest.fixture(scope="module")
def expected(random_model, planner, ask):
    """Outputs of the sequential schedule, by model family."""
    return {family: planner(load(random_model(family))).run(requests(ask)) for family in ("llama", "qwen2", "mixtral")}


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("nano_batches", [2, 3, 4])
def test_nano_batches_give_the_tokens_of_the_sequential_schedule(
    family, nano_batches, random_model, planner, ask, expected
):
    worker = load(random_model(family), nano_batches=nano_batches)
    assert planner(worker).run(requests(ask)) == expected[family]


def random_schedule(operators, cuts, choose):
    """Ranges of its own for every operator, in a random order that is valid."""
    waiting = [
        NanoOperation(operator.name, start, end)
        for operator in operators
        for start, end in zip([0, *cuts[operator.name]], [*cuts[operator.name], BATCH])
    ]
    known = {operator.name: operator for operator in operators}
    covered = {operator.name: np.zeros(BATCH, bool) for operator in operators}
    issued = []
    while waiting:
        ready = [
            op
            for op in waiting
            if all(covered[name][op.start : op.end].all() for name in known[op.operator].inputs)
            and all(covered[name][: op.end].all() for name in known[op.operator].earlier_rows)
        ]
        op = choose(ready)
        waiting.remove(op)
        covered[op.operator][op.start : op.end] = True
        issued.append(op)
    return PipelineSchedule("random", BATCH, tuple(issued))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_valid_schedule_gives_the_same_tokens(data, random_model, planner, ask, expected):
    folder = random_model("llama")
    operators = layer_operators(ModelSpec.from_folder(folder))
    cut = st.lists(st.integers(1, BATCH - 1), max_size=3, unique=True).map(sorted)
    cuts = {operator.name: data.draw(cut) for operator in operators}
    schedule = random_schedule(operators, cuts, lambda ready: data.draw(st.sampled_from(ready)))
    schedule.validate(operators)
    worker = load(folder, schedules=(schedule,))
    assert planner(worker).run(requests(ask)) == expected["llama"]


def test_ranges_are_clipped_to_the_rows_there_are():
    calls = []

    def operator(name):
        return LayerOperator(name, lambda layer, rows: calls.append((layer, name, rows)), (), ())

    operations = (NanoOperation("a", 0, 4), NanoOperation("a", 4, 10), NanoOperation("b", 0, 10))
    pipeline = NanoPipeline(PipelineSchedule("s", 10, operations), {name: operator(name) for name in "ab"})
    pipeline.run(5, 2, lambda start, stop: (start, stop))
    assert calls == [(layer, *call) for layer in (0, 1) for call in (("a", (0, 4)), ("a", (4, 5)), ("b", (0, 5)))]
    calls.clear()
    pipeline.run(3, 1, lambda start, stop: (start, stop))
    assert calls == [(0, "a", (0, 3)), (0, "b", (0, 3))]


@pytest.mark.parametrize(("most", "sizes"), [(100, [12, 25, 50, 100]), (2, [1, 2]), (1, [1])])
def test_buckets_are_ascending_and_end_at_the_dense_batch(most, sizes, random_model):
    buckets = Worker(WorkerConfig(random_model("llama"), max_batch_tokens=most)).capacity.buckets
    assert [bucket.batch_tokens for bucket in buckets] == sizes
    assert [bucket.id for bucket in buckets] == list(range(len(sizes)))


def test_the_dense_batch_is_what_memory_keeps_full_for_the_lengths_that_are_expected(random_model):
    """1,024 tokens of KV hold 34 requests of 20 + 20 tokens at their mean length of 30: two rows each."""
    config = WorkerConfig(random_model("llama"), max_batch_tokens=100, page_size=16, num_pages=64)
    lengths = {"expected_input_len": 20, "expected_output_len": 20}
    assert Worker(replace(config, **lengths)).capacity.max_batch_tokens == 68
    assert Worker(replace(config, max_batch_tokens=50, **lengths)).capacity.max_batch_tokens == 50


def test_sizes_of_schedules_are_buckets_too(random_model):
    folder = random_model("llama")
    operators = layer_operators(ModelSpec.from_folder(folder))
    worker = Worker(WorkerConfig(folder, schedules=tuple(sequential(operators, size) for size in (48, 5))))
    assert [bucket.batch_tokens for bucket in worker.capacity.buckets] == [5, 32, 48, 64, 128, 256]
