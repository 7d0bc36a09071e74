"""Watching a layer: that every operation is seen where it runs, and what work it is said to do."""

import json

import numpy as np
import pytest
import torch

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.layer_trace import Peaks, measured_utilisation
from autosearch.operator_costs import layer_costs
from autosearch.operators import Resource, layer_operators
from autosearch.pipeline import nanobatch_only, sequential
from autosearch.workload import Workload
from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.device_batch import BatchLimits, row_of_tokens
from worker.folded_norms import fold_norms
from worker.layer_watch import Seen, Watched, WatchedStreams, watched_layers
from worker.schedule_bench import ScheduleBench
from worker.steady_batch import SteadyMix, fill_pages, steady_plan
from worker.streams import WHOLE, OneStream, Place
from worker.traced_layer import Rows, Where, traced_layer

SPEC = find_model("llama-3-8b").spec
OPERATORS = layer_operators(SPEC)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}
WHERE = Where("tiny", "cpu", 3.0, Peaks(1e15, 5e12))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = WorkerConfig(folder, device="cpu", load_format="dummy", max_slots=200, page_size=16, num_pages=200)
    loaded = load_model(config, lambda what, share: None, [256])
    fill_pages(loaded.cache)
    mix = SteadyMix(256, 20, 24, 32)
    plan = steady_plan(loaded.limits, mix, num_pages=loaded.capacity.num_pages, vocab_size=99)
    yield ScheduleBench(loaded.model, plan)
    torch.set_num_threads(threads)


class FakeClock:
    """Each look is a millisecond later."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


def test_operations_are_told_apart_by_layer_and_order_whatever_their_place():
    clock, moments = FakeClock(), {}
    streams = WatchedStreams(OneStream(), 3, (1, 2), clock, moments)
    for _ in range(4):
        for place in (WHOLE, Place(1, 32), WHOLE):
            with streams.at(place):
                clock()  # the operation
        streams.wait(WHOLE, streams.mark(WHOLE))
    assert list(moments) == [(layer, index) for layer in (1, 2) for index in range(3)]
    assert all(end - begin == 2 for begin, end in moments.values())
    assert min(begin for begin, _ in moments.values()) == 4  # nothing of layer 0 was looked at


def test_the_middle_layer_and_its_neighbours_are_watched():
    assert watched_layers(32) == (15, 16, 17)
    assert watched_layers(2) == (0, 1)
    assert watched_layers(1) == (0,)


@pytest.mark.parametrize("kind", ["sequential", "nano-batches", "overlap", "folded"])
def test_all_operations_of_three_layers_are_seen_and_the_tokens_stay_the_same(bench, kind):
    operators = layer_operators(find_model("llama-3-8b").spec)
    schedule = {
        "sequential": sequential(operators, 256),
        "nano-batches": nanobatch_only(operators, 256, 2),
        "overlap": decode_beside(operators, 256, 128, 0.5),
        "folded": fold_norms(sequential(operators, 256)),
    }[kind]
    expected = bench.tokens(sequential(operators, 256))
    watched = bench.watch(schedule, 0.0)
    size = len(schedule.operations)
    assert [(each.layer, each.index) for each in watched.seen] == [
        (layer, i) for layer in (1, 2, 3) for i in range(size)
    ]
    assert all(each.end_us >= each.begin_us >= 0 for each in watched.seen)
    assert watched.middle == 2
    assert 1e3 * watched.iteration_ms > max(each.end_us for each in watched.seen) / 2
    assert bench.tokens(sequential(operators, 256)) == expected


def seen_in_order(schedule, layers=(15, 16, 17)):
    """Every operation takes 10 us."""
    size = len(schedule.operations)
    return Watched(
        tuple(
            Seen(layer, index, 10.0 * (number * size + index), 10.0 * (number * size + index + 1))
            for number, layer in enumerate(layers)
            for index in range(size)
        ),
        16,
        68.0,
    )


def plan_of(mix):
    limits = BatchLimits(rows=2048, slots=1536, page_size=64, pages_per_slot=128, prefill_tokens=16, decode_target=132)
    return steady_plan(limits, mix, num_pages=20_000, vocab_size=1000)


def test_work_of_a_sequential_layer_is_that_of_the_cost_model():
    plan, schedule = plan_of(SteadyMix(2048, 1024, 768, 512)), sequential(OPERATORS, 2048)
    rows = Rows.of_plan(plan, np.arange(2048, dtype=np.int32))
    trace = traced_layer(SPEC, rows, schedule, seen_in_order(schedule), WHERE)
    contexts = float((plan.starts + 1)[:1024].sum())
    pairs = 2 * 512 * 513 / 2  # two whole prompts, each row reads itself and what is before it
    expected = layer_costs(SPEC, 1, Workload(2048, 1024, contexts, pairs))
    middle = [each for each in trace.operations if each.layer == 0]
    assert {each.operator: each.cost for each in middle} == expected
    assert trace.begin_us == 10.0 * len(OPERATORS)
    assert trace.length_us == 10.0 * len(OPERATORS)
    assert (trace.iteration_ms, trace.watched_iteration_ms) == (3.0, 68.0)


@pytest.mark.parametrize(
    "schedule",
    [nanobatch_only(OPERATORS, 2048, 3), decode_beside(OPERATORS, 2048, 1024, 0.5)],
    ids=["dealt", "decodes first"],
)
def test_cut_into_nano_operations_the_work_of_attention_stays_the_same(schedule):
    plan = plan_of(SteadyMix(2048, 1000, 768, 512))
    whole = sequential(OPERATORS, 2048)
    ends = () if schedule.decodes_first else schedule.boundaries()[:-1]

    def attention(of, dealt):
        rows = Rows.of_plan(plan, row_of_tokens(plan, dealt))
        trace = traced_layer(SPEC, rows, of, seen_in_order(of), WHERE)
        return [
            sum(each.cost.mem_bytes for each in trace.operations if each.operator == name and not each.helps)
            for name in ("decode_attention", "prefill_attention")
        ]

    assert attention(schedule, ends) == pytest.approx(attention(whole, ()))


def test_norms_that_are_folded_into_gemms_move_nothing_of_their_own():
    schedule = fold_norms(sequential(OPERATORS, 2048))
    plan = plan_of(SteadyMix(2048, 1000, 768, 512))
    rows = Rows.of_plan(plan, np.arange(2048, dtype=np.int32))
    trace = traced_layer(SPEC, rows, schedule, seen_in_order(schedule), WHERE)
    assert {each.cost.mem_bytes for each in trace.operations if each.operator.endswith("norm")} == {0.0}
    assert max(measured_utilisation(trace, 50)[Resource.COMPUTE]) > 0
