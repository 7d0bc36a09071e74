"""What the model's operators really read and write, against the graph that schedules are made from."""

from itertools import pairwise

import pytest
import torch

from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, NanoOperation, PipelineSchedule
from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.executor import Worker
from worker.kv_cache import KVCache, KVCacheShape
from worker.models.decoder import Decoder
from worker.models.loading import load_weights
from worker.parallel import SingleRank
from worker.sharding import shard
from worker.weights import DummySource


def operators_of(folder, size):
    """The operators of rank 0, without the other ranks."""
    spec = ModelSpec.from_folder(folder)
    part = shard(spec, size, 0)
    cpu = torch.device("cpu")
    weights = load_weights(spec, part, DummySource(), torch.float32, cpu)
    cache = KVCache(KVCacheShape(spec.num_layers, 2, part.num_kv_heads, 4, spec.head_dim), torch.float32, cpu)
    return spec, Decoder(spec, part, weights, cache, SingleRank(), max_rows=4, max_model_len=8).operators()


def closure(edges, names):
    """All operators that must come before each one."""
    before = {}
    for name in names:
        direct = edges[name]
        before[name] = set(direct).union(*(before[other] for other in direct))
    return before


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_graph_has_the_edges_that_the_buffers_make(family, size, random_model):
    spec, ours = operators_of(random_model(family), size)
    graph = layer_operators(spec, size)
    assert [operator.name for operator in ours] == [operator.name for operator in graph]
    last_writer, readers = {}, {}
    data, order = {}, {}
    for operator in ours:
        written = {last_writer[buffer] for buffer in operator.reads if buffer in last_writer}
        overwritten = {
            other
            for buffer in operator.writes
            for other in (last_writer.get(buffer), *readers.get(buffer, ()))
            if other
        }
        data[operator.name] = written - {operator.name}
        order[operator.name] = data[operator.name] | (overwritten - {operator.name})
        for buffer in operator.reads:
            readers.setdefault(buffer, []).append(operator.name)
        for buffer in operator.writes:
            last_writer[buffer], readers[buffer] = operator.name, []
    names = [operator.name for operator in graph]
    declared = closure({operator.name: operator.inputs for operator in graph}, names)
    assert declared == closure(data, names), "what an operator reads"
    assert declared == closure(order, names), "what it must not overwrite too early"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_rows_of_others_are_read_where_the_graph_says_so(family, random_model):
    spec, ours = operators_of(random_model(family), 1)
    writers = {buffer: operator.name for operator in ours for buffer in operator.writes}
    derived = {operator.name: {writers[buffer] for buffer in operator.reads_earlier_rows} for operator in ours}
    assert derived == {operator.name: set(operator.earlier_rows) for operator in layer_operators(spec)}


def test_a_worker_refuses_a_schedule_in_the_wrong_order(random_model):
    folder = random_model("llama")
    names = [operator.name for operator in layer_operators(ModelSpec.from_folder(folder))]
    for first, second in pairwise(names):
        if {first, second} == {"decode_attention", "prefill_attention"}:
            continue  # neither needs the other
        swapped = [{first: second, second: first}.get(name, name) for name in names]
        schedule = PipelineSchedule("swapped", 16, tuple(NanoOperation(name, 0, 16) for name in swapped))
        with pytest.raises(InvalidScheduleError, match="runs before"):
            Worker(WorkerConfig(folder, schedules=(schedule,)))
