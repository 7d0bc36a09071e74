"""Writes nanoflow.json, the Grafana dashboard, from the list of panels below.

Run it after changing a panel: .venv/bin/python deploy/grafana/make_dashboard.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("nanoflow.json")
DATASOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
WHERE = 'model_name=~"$model_name",instance=~"$instance"'
WIDTH, HEIGHT = 8, 8  # of a panel; Grafana's grid is 24 wide


@dataclass(frozen=True)
class Panel:
    """A graph of one or more queries."""

    title: str
    unit: str  # Grafana's name: s, short, percentunit, reqps, ...
    queries: tuple[tuple[str, str], ...]  # PromQL and legend
    description: str = ""


def rate(metric: str, by: str = "") -> str:
    """Per second, summed over instances; `by` keeps a label."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{WHERE}}}[$__rate_interval]))"


def ratio(part: str, whole: str) -> str:
    """Of two counters' rates."""
    return f"{rate(part)} / {rate(whole)}"


def gauge(metric: str) -> str:
    """Summed over instances."""
    return f"sum({metric}{{{WHERE}}})"


def mean(histogram: str) -> str:
    """Of what a histogram observed."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Median, 90th and 99th percentile."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{{WHERE}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile(0.{p}, {buckets})", f"p{p}") for p in (50, 90, 99))


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A timeseries panel in Grafana's schema."""
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": "ABCDEFGH"[i], "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice of label values, all by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel(
                "Running and waiting",
                "short",
                (
                    (gauge("nanoflow_num_requests_running"), "running"),
                    (gauge("nanoflow_num_requests_waiting"), "waiting"),
                ),
            ),
            Panel(
                "Ended, by outcome",
                "reqps",
                (
                    (rate("nanoflow_requests_total", "outcome"), "{{outcome}}"),
                    (rate("nanoflow_requests_accepted_total"), "accepted"),
                ),
                "An accepted request ends exactly once: accepted = live + the sum of outcomes.",
            ),
            Panel(
                "Refused, by reason",
                "reqps",
                (
                    (
                        'sum by (reason) (rate(nanoflow_requests_rejected_total{model_name=~"$model_name"}'
                        "[$__rate_interval]))",
                        "{{reason}}",
                    ),
                ),
                "Never accepted, so not part of the outcomes.",
            ),
            Panel(
                "Tokens per second",
                "short",
                (
                    (rate("nanoflow_prompt_tokens_total"), "prompt"),
                    (rate("nanoflow_generation_tokens_total"), "output"),
                ),
            ),
            Panel("Prompt lengths", "short", quantiles("nanoflow_request_prompt_tokens")),
            Panel("Output lengths", "short", quantiles("nanoflow_request_generation_tokens")),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", quantiles("nanoflow_time_to_first_token_seconds")),
            Panel("Between tokens", "s", quantiles("nanoflow_inter_token_latency_seconds")),
            Panel("Whole request", "s", quantiles("nanoflow_e2e_request_latency_seconds")),
            Panel(
                "Where a request's time goes (mean)",
                "s",
                (
                    (mean("nanoflow_request_queue_time_seconds"), "queue"),
                    (mean("nanoflow_request_prefill_time_seconds"), "prefill"),
                    (mean("nanoflow_request_decode_time_seconds"), "decode"),
                ),
            ),
        ),
    ),
    (
        "Iterations",
        (
            Panel(
                "Fill of the dense batch",
                "percentunit",
                ((mean("nanoflow_dense_batch_fill_ratio"), "mean"),),
                "Token rows of an iteration over those of the batch that ran. Full batches are what makes it fast.",
            ),
            Panel(
                "Idle gap between iterations",
                "s",
                quantiles("nanoflow_iteration_idle_seconds"),
                "The device's wait for its next plan. Plans are made one iteration ahead so that this is near zero.",
            ),
            Panel(
                "Late plans",
                "percentunit",
                ((ratio("nanoflow_late_plans_total", "nanoflow_iterations_total"), "of iterations"),),
            ),
            Panel("Iteration on the device", "s", quantiles("nanoflow_iteration_run_seconds")),
            Panel("Making a plan", "s", quantiles("nanoflow_plan_seconds")),
            Panel(
                "Wasted tokens",
                "percentunit",
                ((ratio("nanoflow_wasted_tokens_total", "nanoflow_generation_tokens_total"), "of output tokens"),),
                "Computed for requests that had already ended: an end of sequence is seen one iteration late.",
            ),
        ),
    ),
    (
        "KV cache",
        (
            Panel(
                "KV pages",
                "short",
                (
                    (gauge("nanoflow_kv_pages_live"), "live"),
                    (gauge("nanoflow_kv_pages_cached"), "cached"),
                    (gauge("nanoflow_kv_pages_free"), "free"),
                ),
                "Live pages are in use by running requests; cached ones are only kept for prefix hits.",
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                (
                    (
                        ratio("nanoflow_prefix_cache_hits_total", "nanoflow_prefix_cache_queries_total"),
                        "of prompt tokens looked up",
                    ),
                ),
            ),
            Panel(
                "Preemptions per second",
                "short",
                ((rate("nanoflow_num_preemptions_total"), "preemptions"),),
                "A running request lost its pages to others and will be computed again; its output does not change.",
            ),
        ),
    ),
    (
        "Instances",
        (
            Panel("Up", "short", ((f"sum by (server) (nanoflow_instance_up{{{WHERE}}})", "{{server}}"),)),
            Panel("Lost per second", "short", ((rate("nanoflow_instance_losses_total"), "losses"),)),
            Panel(
                "Requests started again per second",
                "short",
                ((rate("nanoflow_request_retries_total"), "retries"),),
                "After a lost instance, requests that had streamed nothing.",
            ),
        ),
    ),
)

VARIABLES = (
    # Import by hand replaces DS_PROMETHEUS (see __inputs); a provisioned dashboard takes it from this variable.
    {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
    variable("model_name", "Model", "label_values(nanoflow_instance_up, model_name)"),
    variable("instance", "Instance", 'label_values(nanoflow_instance_up{model_name=~"$model_name"}, instance)'),
)


def render() -> str:
    """The dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS:
        panels.append(
            {
                "id": 1000 + y,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        first = len(panels)
        for i, panel in enumerate(section):
            panels.append(panel_json(panel, first + i, i % 3 * WIDTH, y + i // 3 * HEIGHT))
        y += (len(section) + 2) // 3 * HEIGHT
    dashboard = {
        "title": "NanoFlow",
        "uid": "nanoflow",
        "tags": ["nanoflow"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "__requires": [{"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"}],
        "templating": {"list": list(VARIABLES)},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
