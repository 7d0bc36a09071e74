"""Every metric that there is: its name, what it means, its buckets. Recording is in `metrics`.

To each name the prefix `nanoflow_` is added, and `_total` to counters. All have the labels model_name and instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "nanoflow_"
LABELS = ("model_name", "instance")

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION_S = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FILL = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
PER_TOKENS: tuple[float, ...] = ()  # stands for token_buckets(max_model_len)
PER_ITERATION: tuple[float, ...] = (-1,)  # stands for iteration_buckets(batch_tokens)

GAUGES = {
    "instance_up": "1 while the instance is attached.",
    "num_requests_running": "Requests that hold a slot of the engine.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "num_tokens_waiting": "Prompt tokens of waiting requests.",
    "kv_cache_usage_perc": "Share of KV pages in use by running requests, 0 to 1; cached pages are not in use.",
    "kv_pages_live": "KV pages that running requests refer to.",
    "kv_pages_cached": "KV pages that are only kept for prefix hits to come.",
    "kv_pages_free": "KV pages that hold nothing.",
    "kv_pages": "KV pages in all.",
    "kv_store_breaker_open": "1 while the KV store is not asked, after faults in a row.",
    "dense_batch_fill": "Token rows of the last iteration over those of the batch that ran, 0 to 1.",
    "dense_batch_tokens": "The constant batch size of a full iteration.",
    "dense_batch_tokens_allowed": "Of these, the rows that prefills may fill up to now, to keep to --target-itl-ms.",
}

COUNTERS = {
    "requests_accepted": "Requests that were accepted.",
    "request_retries": "Times that a request was started again because its instance was lost.",
    "instance_losses": "Times that the instance was lost.",
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "prompt_tokens_cached": "Of ended requests' prompt tokens, those found in the prefix cache.",
    "generation_tokens": "Output tokens.",
    "discarded_tokens": "Of the output tokens, those dropped unread when a request was started again.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "kv_store_cpu_hits": "Prompt tokens loaded from the KV store's memory.",
    "kv_store_ssd_hits": "Prompt tokens loaded from the KV store's SSD.",
    "kv_store_faults": "Calls of the scheduler that the KV store did not answer in time, or wrongly.",
    "kv_store_rank_faults": "Calls of the ranks that the KV store did not answer in time, or wrongly.",
    "kv_store_rank_trips": "Times that a rank stopped asking the KV store for a while, after faults in a row.",
    "kv_store_pages_loaded": "KV pages that came from the KV store.",
    "kv_store_pages_load_failed": "KV pages that did not come although the KV store had them, and were computed.",
    "kv_store_pages_skipped": "KV pages that were computed although the KV store had them: loading costs more.",
    "kv_store_pages_stored": "KV pages that the KV store was given, or had already when it was asked to take them.",
    "kv_store_pages_store_failed": "KV pages that the KV store did not take.",
    "kv_store_pages_dropped": "KV pages that were due for the KV store and not given: gone, too many, or breaker open.",
    "num_preemptions": "Times that a running request lost its pages to others.",
    "num_preemptions_moved": "Of these, those whose KV moved to the KV store; that of the others is computed again.",
    "iterations": "Iterations.",
    "iterations_overlapped": "Of these, those that ran by a schedule other than the sequential one.",
    "iterations_unmeasured": "Of these, those unlike all batches that --schedules were measured on.",
    "schedule_swaps": "Times that the instance got other schedules while it served.",
    "late_plans": "Iterations whose plan came after the device had become idle.",
    "wasted_tokens": "Token rows computed for requests that had already ended.",
}

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From acceptance to the first token.", TTFT_S),
    "inter_token_latency_seconds": ("Between two tokens of a request.", TOKEN_GAP_S),
    "request_time_per_output_token_seconds": ("Mean time of a completed request's later tokens.", TOKEN_GAP_S),
    "e2e_request_latency_seconds": ("From acceptance to the end, of completed requests.", LATENCY_S),
    "request_queue_time_seconds": ("From acceptance to the first iteration, of completed requests.", LATENCY_S),
    "request_inference_time_seconds": ("From the first iteration to the end, of completed requests.", LATENCY_S),
    "request_prefill_time_seconds": ("From the first iteration to the first token, completed ones.", LATENCY_S),
    "request_decode_time_seconds": ("From the first token to the last, of completed requests.", LATENCY_S),
    "request_prompt_tokens": ("Prompt tokens of ended requests that had a first token.", PER_TOKENS),
    "request_generation_tokens": ("Output tokens of ended requests that had a first token.", PER_TOKENS),
    "request_params_max_tokens": ("Output tokens that accepted requests allow.", PER_TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens not from the cache, of completed requests.", PER_TOKENS),
    "request_num_preemptions": ("Preemptions of an ended request.", PREEMPTIONS),
    "iteration_tokens_total": ("Token rows of an iteration.", PER_ITERATION),
    "dense_batch_fill_ratio": ("Token rows of an iteration over those of the batch that ran.", FILL),
    "iteration_idle_seconds": ("The device's wait for its next plan, between two iterations.", ITERATION_S),
    "iteration_run_seconds": ("Time of an iteration on the device.", ITERATION_S),
    "plan_seconds": ("Time to make the plan of an iteration.", ITERATION_S),
}


def token_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the largest count."""
    series = (base * 10**power for power in range(10) for base in (1, 2, 5))
    return tuple(float(value) for value in series if value <= largest) or (1.0,)


def iteration_buckets(batch_tokens: int) -> tuple[float, ...]:
    """Powers of two, and finer around the constant batch size."""
    powers = {1.0, *(float(2**power) for power in range(3, 15))}
    return tuple(sorted(powers | {batch_tokens * share for share in (0.5, 0.9, 0.95, 1.0)}))


class Families:
    """All metrics, in one registry."""

    def __init__(self, registry: CollectorRegistry, max_model_len: int, batch_tokens: int) -> None:
        buckets = {PER_TOKENS: token_buckets(max_model_len), PER_ITERATION: iteration_buckets(batch_tokens)}
        self.gauges = {name: Gauge(PREFIX + name, doc, LABELS, registry=registry) for name, doc in GAUGES.items()}
        self.counters = {name: Counter(PREFIX + name, doc, LABELS, registry=registry) for name, doc in COUNTERS.items()}
        self.histograms = {
            name: Histogram(
                PREFIX + name, doc, LABELS, registry=registry, buckets=buckets.get(tuple(bounds), tuple(bounds))
            )
            for name, (doc, bounds) in HISTOGRAMS.items()
        }
        self.requests = Counter(
            PREFIX + "requests", "Accepted requests that have ended.", (*LABELS, "outcome"), registry=registry
        )
        self.request_success = Counter(
            PREFIX + "request_success", "Completed requests.", (*LABELS, "finished_reason"), registry=registry
        )
        self.requests_rejected = Counter(
            PREFIX + "requests_rejected", "Requests that were refused.", ("model_name", "reason"), registry=registry
        )
        self.cache_config_info = Gauge(
            PREFIX + "cache_config_info",
            "1; the labels tell the KV cache's shape.",
            (*LABELS, "block_size", "num_gpu_blocks"),
            registry=registry,
        )
        self.metric_errors = Counter(PREFIX + "metric_errors", "Numbers that could not be recorded.", registry=registry)


class InstanceMetrics:
    """The metrics of one instance. Their labels are bound once, since they are used in every iteration."""

    def __init__(self, families: Families, model_name: str, instance: str) -> None:
        self.labels = (model_name, instance)
        self._gauges = {name: gauge.labels(*self.labels) for name, gauge in families.gauges.items()}
        self._counters = {name: counter.labels(*self.labels) for name, counter in families.counters.items()}
        self._histograms = {name: each.labels(*self.labels) for name, each in families.histograms.items()}

    def set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def inc(self, name: str, value: float = 1) -> None:
        """Raises ValueError when value is negative."""
        self._counters[name].inc(value)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
