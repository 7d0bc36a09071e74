"""Metrics: what is shown over HTTP, what iterations add, and that no number ever stops serving."""

from __future__ import annotations

import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from fake_instance import capacity
from harness import metric_value
from prometheus_client.parser import text_string_to_metric_families

from control_plane.errors import ListenError
from control_plane.generation import Final
from control_plane.metric_families import COUNTERS, GAUGES, HISTOGRAMS, iteration_buckets, token_buckets
from control_plane.metrics import Metrics
from scheduler.plan import LoadReport, MoveCounts, OutputBatch, StepStats
from scheduler.request import FinishReason

NO_TOKENS = np.empty(0, np.int32)
STATS = StepStats(
    step=3,
    num_tokens=48,
    batch_tokens=64,
    max_batch_tokens=56,
    num_decodes=8,
    num_prompt_tokens=40,
    num_wasted_tokens=2,
    num_preemptions=1,
    prefix_queries=100,
    prefix_hits=60,
    late=True,
    plan_s=0.001,
    idle_s=0.0005,
    run_s=0.02,
)
LOAD = LoadReport(5, 2, 77, live_pages=10, cached_pages=20, free_pages=70, total_pages=100)
BATCH = OutputBatch((), NO_TOKENS, NO_TOKENS, (), STATS, LOAD)
FINAL = Final(FinishReason.STOP, None, 2, 10, 5, 4, 0, queue_s=0.5, ttft_s=1.0, total_s=3.0, num_preemptions=0)


@pytest.fixture
def metrics():
    return Metrics("model", max_model_len=1000, batch_tokens=64)


def test_an_iteration_adds_up(metrics):
    metrics.attached("i", capacity())
    metrics.batch("i", BATCH)
    metrics.batch("i", replace(BATCH, stats=replace(STATS, num_tokens=64, late=False)))
    metrics.batch("i", replace(BATCH, stats=None, load=replace(LOAD, num_running=9)))
    expected = {
        "iterations_total": 2,
        "late_plans_total": 1,
        "wasted_tokens_total": 4,
        "num_preemptions_total": 2,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 120,
        "iteration_tokens_total_sum": 112,
        "dense_batch_fill": 1.0,
        "dense_batch_tokens_allowed": 56,
        "dense_batch_fill_ratio_sum": 1.75,
        "iteration_idle_seconds_sum": 0.001,
        "iteration_run_seconds_sum": 0.04,
        "num_requests_running": 9,
        "num_requests_waiting": 2,
        "num_tokens_waiting": 77,
        "kv_cache_usage_perc": 0.1,
        "kv_pages_live": 10,
        "kv_pages_cached": 20,
        "kv_pages_free": 70,
        "kv_pages": 100,
        "instance_up": 1,
    }
    found = {name: metric_value(metrics, f"nanoflow_{name}", instance="i") for name in expected}
    assert found == pytest.approx(expected)
    metrics.lost("i")
    assert metric_value(metrics, "nanoflow_instance_up") == metric_value(metrics, "nanoflow_num_requests_running") == 0
    assert metric_value(metrics, "nanoflow_instance_losses_total") == 1
    assert metric_value(metrics, "nanoflow_iterations_total") == 2


def test_the_times_of_a_request_are_parts_of_the_whole(metrics):
    metrics.ended("i", FINAL, decode_s=1.6)
    expected = {
        "request_queue_time_seconds_sum": 0.5,
        "request_inference_time_seconds_sum": 2.5,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_sum": 1.6,
        "request_time_per_output_token_seconds_sum": 0.4,
        "e2e_request_latency_seconds_sum": 3.0,
        "request_prompt_tokens_sum": 10,
        "request_prefill_kv_computed_tokens_sum": 6,
        "request_generation_tokens_sum": 5,
        "prompt_tokens_cached_total": 4,
    }
    found = {name: metric_value(metrics, f"nanoflow_{name}") for name in expected}
    assert found == pytest.approx(expected)


def test_a_number_that_cannot_be_recorded_stops_nothing_and_is_counted(metrics, caplog):
    metrics.batch("i", replace(BATCH, stats=replace(STATS, num_wasted_tokens=-5)))
    metrics.batch("i", replace(BATCH, stats=replace(STATS, run_s="fast")))
    metrics.accepted("i", max_tokens=None)
    metrics.batch("i", BATCH)
    assert metric_value(metrics, "nanoflow_metric_errors_total") == 3
    assert len(caplog.records) == 1
    assert metric_value(metrics, "nanoflow_wasted_tokens_total") == 4


def test_buckets():
    assert token_buckets(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert token_buckets(0) == (1,)
    assert {1, 8, 16, 16384, 1024, 1843.2, 1945.6, 2048} <= set(iteration_buckets(2048))


def test_prometheus_reads_what_the_port_shows(metrics):
    metrics.attached("i", capacity())
    metrics.batch("i", BATCH)
    metrics.rejected("overloaded")
    server = metrics.listen("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        with pytest.raises(ListenError, match=str(server.port)):
            metrics.listen("127.0.0.1", server.port)
    finally:
        server.close()
    for name in (*GAUGES, *HISTOGRAMS, *COUNTERS, "requests", "request_success", "requests_rejected"):
        assert f"nanoflow_{name}" in families, name
    for name in (*GAUGES, *HISTOGRAMS, *COUNTERS):
        for sample in families[f"nanoflow_{name}"].samples:
            assert {"model_name", "instance"} <= sample.labels.keys()
    outcomes = {
        sample.labels["outcome"] for sample in families["nanoflow_requests"].samples if "outcome" in sample.labels
    }
    assert outcomes == {"completed", "cancelled", "expired", "failed"}


def test_a_step_that_only_moves_pages_says_nothing_of_fill_and_hits_are_told_by_tier(metrics):
    metrics.attached("i", capacity())
    metrics.batch("i", BATCH)
    metrics.batch("i", replace(BATCH, stats=replace(STATS, num_tokens=0, cpu_hits=32, ssd_hits=16)))
    assert metric_value(metrics, "nanoflow_dense_batch_fill_ratio_count", instance="i") == 1
    assert metric_value(metrics, "nanoflow_dense_batch_fill", instance="i") == pytest.approx(48 / 64)
    assert metric_value(metrics, "nanoflow_kv_store_cpu_hits_total", instance="i") == 32
    assert metric_value(metrics, "nanoflow_kv_store_ssd_hits_total", instance="i") == 16


def test_what_becomes_of_pages_and_of_preempted_requests_is_counted(metrics):
    metrics.attached("i", capacity())
    counts = MoveCounts(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    metrics.batch("i", replace(BATCH, stats=replace(STATS, moves=counts)))
    metrics.batch("i", replace(BATCH, stats=replace(STATS, moves=counts)))
    names = ("loaded", "load_failed", "stored", "store_failed", "dropped", "skipped")
    values = [metric_value(metrics, f"nanoflow_kv_store_pages_{name}_total", instance="i") for name in names]
    assert values == [2, 4, 6, 8, 10, 12]
    assert metric_value(metrics, "nanoflow_num_preemptions_moved_total", instance="i") == 14
    assert metric_value(metrics, "nanoflow_kv_store_faults_total", instance="i") == 16
    assert metric_value(metrics, "nanoflow_kv_store_rank_faults_total", instance="i") == 18
    assert metric_value(metrics, "nanoflow_kv_store_rank_trips_total", instance="i") == 20
    assert metric_value(metrics, "nanoflow_kv_store_breaker_open", instance="i") == 0
    metrics.batch("i", replace(BATCH, load=replace(BATCH.load, store_is_off=True)))
    assert metric_value(metrics, "nanoflow_kv_store_breaker_open", instance="i") == 1
