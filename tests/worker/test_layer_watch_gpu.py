"""Watching a layer on a real GPU: stamps within a captured iteration, on the whole device and on parts of it."""

from __future__ import annotations

import pytest
import torch

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import sequential
from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.schedule_bench import ScheduleBench
from worker.steady_batch import SteadyMix, fill_pages, steady_plan

pytestmark = pytest.mark.gpu


def test_every_operation_is_seen_within_the_captured_iteration(random_model):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    shapes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 512}
    folder = random_model(**shapes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024)
    config = WorkerConfig(folder, device="cuda", max_batch_tokens=512, max_slots=512, page_size=64, num_pages=4000)
    loaded = load_model(config, lambda what, share: None, (512,))
    fill_pages(loaded.cache)
    plan = steady_plan(loaded.limits, SteadyMix(512, 256, 300, 200), num_pages=4000, vocab_size=512)
    bench, operators = ScheduleBench(loaded.model, plan), layer_operators(loaded.spec)
    plain = sequential(operators, 512)
    for schedule in (plain, decode_beside(operators, 512, 256, 0.5)):
        expected = bench.tokens(schedule)
        watched = bench.watch(schedule, 0.05)
        by_layer = {layer: [each for each in watched.seen if each.layer == layer] for layer in (1, 2, 3)}
        assert [len(seen) for seen in by_layer.values()] == [len(schedule.operations)] * 3
        assert all(each.begin_us <= each.end_us < 1e3 * watched.iteration_ms for each in watched.seen)
        for before, after in ((1, 2), (2, 3)):
            assert by_layer[after][0].begin_us >= max(each.end_us for each in by_layer[before])
        if schedule is plain:
            ends = [each.end_us for each in watched.seen]
            assert ends == sorted(ends)
        else:  # attention of the first rows runs beside the others' projections
            attention = next(each for each in by_layer[2] if schedule.operations[each.index].lane == 1)
            beside = next(each for each in by_layer[2] if schedule.operations[each.index].operator == "o")
            assert attention.begin_us < beside.end_us
            assert beside.begin_us < attention.end_us
        assert bench.tokens(schedule) == expected
    reading = bench.run(plain, 0.05, 0.2)
    assert 0 < reading.ms < 1e3
