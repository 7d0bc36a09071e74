"""The figures of a benchmark run, from a run that the test plays."""

from __future__ import annotations

import numpy as np
import pytest

from autosearch.catalog import find_model
from control_plane.bench import gpu_meter
from control_plane.bench.gpu_meter import GpuMeter, memory_bound_step_s, parameters
from control_plane.bench.record import Record
from scheduler.plan import LoadReport, OutputBatch, RequestEnd, StepStats


def stats(step: int, tokens: int, decodes: int) -> StepStats:
    return StepStats(
        step=step,
        num_tokens=tokens,
        batch_tokens=16,
        max_batch_tokens=16,
        num_decodes=decodes,
        num_prompt_tokens=tokens - decodes,
        num_wasted_tokens=0,
        num_preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        late=step == 1,
        plan_s=0.001,
        idle_s=0.01,
        run_s=0.09,
        overlapped=step == 2,
        unmeasured=step >= 2,
    )


LOAD = LoadReport(0, 0, 0, 0, 0, 0, 0)


def batch(step: int, tokens: int, decodes: int, ids: tuple[str, ...], ends: tuple[str, ...] = ()) -> OutputBatch:
    count = len(ids)
    ended = tuple(RequestEnd(name, "length", 2, 0, 0.0, 0) for name in ends)
    return OutputBatch(
        ids, np.zeros(count, np.int32), np.ones(count, np.int32), ended, stats(step, tokens, decodes), LOAD
    )


def test_figures_count_whole_run_steady_middle_and_each_requests_pace():
    times = iter([1.0, 2.0, 3.0, 4.0])
    record = Record(2, clock=lambda: next(times))
    record(batch(0, 12, 0, ("a", "b")))
    record(batch(1, 10, 2, ("a",)))
    record(batch(2, 2, 2, ("a", "b")))
    assert not record.done.is_set()
    record(batch(3, 2, 2, ("a",), ("a", "b")))
    assert record.done.is_set()
    figures = record.figures(0.0, 20, 6)
    assert figures["total_s"] == 4.0
    assert figures["tokens_per_s"] == pytest.approx(26 / 4)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 4)
    assert figures["mean_batch_tokens"] == pytest.approx(26 / 4)
    assert figures["decode_step_ms"] == pytest.approx(100)  # run and idle of the steps without prefill
    # a: 4 tokens in 3 s; b: 2 tokens in 2 s.
    assert figures["mean_tpot_ms"] == pytest.approx((1.0 + 2.0) / 2 * 1e3)
    assert figures["idle_share"] == pytest.approx(0.1)
    assert figures["late_plans"] == 1
    assert (figures["overlapped_time"], figures["unmeasured_time"]) == (0.25, 0.5)


def test_a_request_that_fails_is_kept_and_a_dead_loop_ends_the_wait():
    record = Record(2)
    failed = RequestEnd("a", "failed", 0, 0, 0.0, 0, error="not finite")
    record(OutputBatch((), np.zeros(0, np.int32), np.zeros(0, np.int32), (failed,), None, LOAD))
    assert record.failures == ["not finite"]
    record.fail(ValueError("gone"))
    assert record.done.is_set()
    assert record.failures[1] == "ValueError: gone"


def test_parameters_and_the_memory_bound_of_llama_3_8b():
    spec = find_model("llama-3-8b").spec
    assert parameters(spec) == pytest.approx(8.03e9, rel=1e-3)
    weights = 8.03e9 - spec.vocab_size * spec.hidden_size
    assert memory_bound_step_s(spec, 0, 0, 2) == pytest.approx(weights * 2 / 4.3e12, rel=1e-3)
    # 64 requests of 576 tokens: 131,072 bytes of KV per token.
    assert memory_bound_step_s(spec, 64, 576, 2) - memory_bound_step_s(spec, 0, 0, 2) == pytest.approx(
        64 * 576 * 131_072 / 4.3e12
    )


def test_a_card_that_does_not_tell_its_watts_ends_a_run_before_it_begins(monkeypatch):
    class Card:
        reading = 100.0

        def joules(self) -> float:
            return 5.0

        def watts(self) -> float:
            if self.reading is None:
                raise OSError("not supported")
            return self.reading

        def sm_mhz(self) -> float:
            return 1500.0

    monkeypatch.setattr(gpu_meter, "NvmlCard", Card)
    meter = GpuMeter()
    meter.start()
    assert meter.stop(10) == {"watts": 100.0, "sm_mhz": 1500, "joules": 0.0, "joules_per_token": 0.0}
    monkeypatch.setattr(Card, "reading", None)
    with pytest.raises(OSError, match="not supported"):
        GpuMeter().start()
