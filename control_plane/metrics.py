"""Prometheus metrics of the front end and its engines, and their HTTP port.

Names, meanings and buckets are vLLM's where it has the same thing, under `nanoflow_`; labels are `model_name` and
`instance`. The rules of counting:

- *accepted* counts requests that got an id; each ends once and is then counted in `requests_total` by outcome
  (completed, cancelled, expired, failed), so accepted = live + the sum of outcomes, per instance too: a request
  stays counted for the instance that was chosen first. Rejected ones were never accepted; they are counted apart.
- `prompt_tokens_total` and `time_to_first_token_seconds` count a request when its first token is read, or at its
  end when nobody has read; a token that is lost with its instance before is not its first.
  `generation_tokens_total` counts every token as it comes. `request_prompt_tokens` and `request_generation_tokens`
  observe, at its end, every request that had a first token, whatever its outcome. Once all have ended, the sums of
  the histograms are the counters; only `discarded_tokens_total`, output dropped when an instance was lost and the
  request started again, is part of the generation counter alone.

Nothing here ever raises into serving: what cannot be recorded is logged and counted. Knows nothing of requests'
content or of transport.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from threading import Thread
from typing import Concatenate, ParamSpec
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from control_plane.errors import ListenError
from control_plane.generation import Final
from control_plane.metric_families import GAUGES, Families, InstanceMetrics
from scheduler.plan import EngineCapacity, LoadReport, OutputBatch, StepStats
from scheduler.request import FinishReason

log = logging.getLogger(__name__)

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
OUTCOMES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "expired",
    FinishReason.FAILED: "failed",
}

P = ParamSpec("P")


def _never_raises(
    method: Callable[Concatenate[Metrics, P], None],
) -> Callable[Concatenate[Metrics, P], None]:
    """Log and count whatever goes wrong in recording a number."""

    @functools.wraps(method)
    def recorded(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            if self.errors == 0:  # once is enough to find it; it may come back in every iteration
                log.exception("a metric could not be recorded in %s", method.__name__)
            self.errors += 1
            self._families.metric_errors.inc()

    return recorded


class Metrics:
    """All metrics of one front end, in a registry of their own."""

    def __init__(self, model_name: str, max_model_len: int, batch_tokens: int) -> None:
        """The two sizes are those of the engine; they set the buckets of token counts."""
        self.registry = CollectorRegistry()
        self.errors = 0
        self._model_name = model_name
        self._families = Families(self.registry, max_model_len, batch_tokens)
        self._by_instance: dict[str, InstanceMetrics] = {}

    def listen(self, host: str, port: int) -> MetricsServer:
        """Answer HTTP GET /metrics on a port, 0 for a free one. Raises ListenError."""
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ListenError(f"metrics cannot listen on {host}:{port}: {reason}; choose another port") from None
        return MetricsServer(server, thread)

    @_never_raises
    def attached(self, instance: str, capacity: EngineCapacity) -> None:
        """An instance has come."""
        metrics = self._of(instance)
        metrics.set("instance_up", 1)
        metrics.set("kv_pages", capacity.num_pages)
        metrics.set("dense_batch_tokens", capacity.max_batch_tokens)
        metrics.set("dense_batch_tokens_allowed", capacity.max_batch_tokens)
        shape = (str(capacity.page_size), str(capacity.num_pages))
        self._families.cache_config_info.labels(*metrics.labels, *shape).set(1)

    @_never_raises
    def lost(self, instance: str) -> None:
        """An instance has gone; its gauges say that nothing runs there."""
        metrics = self._of(instance)
        metrics.inc("instance_losses")
        for name in GAUGES:
            metrics.set(name, 0)

    @_never_raises
    def schedules_swapped(self, instance: str) -> None:
        """The instance has other schedules from now on."""
        self._of(instance).inc("schedule_swaps")

    @_never_raises
    def rejected(self, reason: str) -> None:
        """A request was refused; reason is the error kind's label."""
        self._families.requests_rejected.labels(self._model_name, reason).inc()

    @_never_raises
    def accepted(self, instance: str, max_tokens: int) -> None:
        metrics = self._of(instance)
        metrics.inc("requests_accepted")
        metrics.observe("request_params_max_tokens", max_tokens)

    @_never_raises
    def first_token(self, instance: str, num_prompt_tokens: int, ttft_s: float) -> None:
        """A request's first token: once, of the attempt whose output was read, or of the last one."""
        metrics = self._of(instance)
        metrics.inc("prompt_tokens", num_prompt_tokens)
        metrics.observe("time_to_first_token_seconds", ttft_s)

    @_never_raises
    def tokens(self, instance: str, count: int, gaps_s: list[float]) -> None:
        """The tokens of one batch, and for each but a request's first the time since the one before."""
        metrics = self._of(instance)
        metrics.inc("generation_tokens", count)
        for gap_s in gaps_s:
            metrics.observe("inter_token_latency_seconds", gap_s)

    @_never_raises
    def retried(self, instance: str, num_discarded_tokens: int) -> None:
        """A request starts again because its instance was lost."""
        metrics = self._of(instance)
        metrics.inc("request_retries")
        metrics.inc("discarded_tokens", num_discarded_tokens)

    @_never_raises
    def ended(self, instance: str, final: Final, decode_s: float | None) -> None:
        """A request has ended; decode_s is the time from its first token to its last, None when it had none."""
        metrics = self._of(instance)
        self._families.requests.labels(*metrics.labels, OUTCOMES[final.finish_reason]).inc()
        metrics.observe("request_num_preemptions", final.num_preemptions)
        if final.finish_reason in COMPLETED:
            self._families.request_success.labels(*metrics.labels, final.finish_reason.value).inc()
            metrics.observe("e2e_request_latency_seconds", final.total_s)
            metrics.observe("request_queue_time_seconds", final.queue_s)
            metrics.observe("request_inference_time_seconds", max(final.total_s - final.queue_s, 0.0))
        if final.ttft_s is None or decode_s is None:
            return
        metrics.observe("request_prompt_tokens", final.num_prompt_tokens)
        metrics.observe("request_generation_tokens", final.num_output_tokens)
        metrics.inc("prompt_tokens_cached", final.num_cached_tokens)
        if final.finish_reason in COMPLETED:
            metrics.observe("request_prefill_time_seconds", max(final.ttft_s - final.queue_s, 0.0))
            metrics.observe("request_prefill_kv_computed_tokens", final.num_prompt_tokens - final.num_cached_tokens)
            metrics.observe("request_decode_time_seconds", decode_s)
            if final.num_output_tokens > 1:
                per_token_s = decode_s / (final.num_output_tokens - 1)
                metrics.observe("request_time_per_output_token_seconds", per_token_s)

    @_never_raises
    def batch(self, instance: str, batch: OutputBatch) -> None:
        """What one iteration did, and the engine's state after it."""
        metrics = self._of(instance)
        _set_load(metrics, batch.load)
        if batch.stats is not None:
            _count_step(metrics, batch.stats)

    def _of(self, instance: str) -> InstanceMetrics:
        found = self._by_instance.get(instance)
        if found is None:
            found = self._by_instance[instance] = InstanceMetrics(self._families, self._model_name, instance)
            for outcome in dict.fromkeys(OUTCOMES.values()):  # all of them are shown from the start, at 0
                self._families.requests.labels(*found.labels, outcome)
        return found


class MetricsServer:
    """The HTTP port of /metrics, with a thread of its own."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _set_load(metrics: InstanceMetrics, load: LoadReport) -> None:
    metrics.set("num_requests_running", load.num_running)
    metrics.set("num_requests_waiting", load.num_waiting)
    metrics.set("num_tokens_waiting", load.num_waiting_tokens)
    metrics.set("kv_cache_usage_perc", load.live_pages / max(load.total_pages, 1))
    metrics.set("kv_pages_live", load.live_pages)
    metrics.set("kv_pages_cached", load.cached_pages)
    metrics.set("kv_pages_free", load.free_pages)
    metrics.set("kv_pages", load.total_pages)
    metrics.set("kv_store_breaker_open", int(load.store_is_off))


def _count_step(metrics: InstanceMetrics, stats: StepStats) -> None:
    metrics.set("dense_batch_tokens_allowed", stats.max_batch_tokens)
    if stats.num_tokens:  # else it only moved pages, which says nothing of how full batches are
        fill = stats.num_tokens / max(stats.batch_tokens, 1)
        metrics.set("dense_batch_fill", fill)
        metrics.observe("dense_batch_fill_ratio", fill)
        metrics.observe("iteration_tokens_total", stats.num_tokens)
    metrics.inc("iterations")
    metrics.inc("iterations_overlapped", int(stats.overlapped))
    metrics.inc("iterations_unmeasured", int(stats.unmeasured))
    metrics.inc("late_plans", int(stats.late))
    metrics.inc("wasted_tokens", stats.num_wasted_tokens)
    metrics.inc("num_preemptions", stats.num_preemptions)
    metrics.inc("prefix_cache_queries", stats.prefix_queries)
    metrics.inc("prefix_cache_hits", stats.prefix_hits)
    metrics.inc("kv_store_cpu_hits", stats.cpu_hits)
    metrics.inc("kv_store_ssd_hits", stats.ssd_hits)
    metrics.inc("kv_store_faults", stats.moves.num_faults)
    metrics.inc("kv_store_rank_faults", stats.moves.num_rank_faults)
    metrics.inc("kv_store_rank_trips", stats.moves.num_rank_trips)
    metrics.inc("kv_store_pages_loaded", stats.moves.num_loaded)
    metrics.inc("kv_store_pages_load_failed", stats.moves.num_load_failed)
    metrics.inc("kv_store_pages_skipped", stats.moves.num_skipped)
    metrics.inc("kv_store_pages_stored", stats.moves.num_stored)
    metrics.inc("kv_store_pages_store_failed", stats.moves.num_store_failed)
    metrics.inc("kv_store_pages_dropped", stats.moves.num_dropped)
    metrics.inc("num_preemptions_moved", stats.moves.num_requests_moved)
    metrics.observe("iteration_idle_seconds", stats.idle_s)
    metrics.observe("iteration_run_seconds", stats.run_s)
    metrics.observe("plan_seconds", stats.plan_s)
