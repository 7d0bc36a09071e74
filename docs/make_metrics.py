"""Writes docs/metrics.md from the metrics that /metrics serves.

Run it after changing a metric: .venv/bin/python docs/make_metrics.py
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from control_plane.metric_families import Families

TARGET = Path(__file__).with_name("metrics.md")

INTRODUCTION = """\
# Metrics

<!-- Made by docs/make_metrics.py from control_plane/metric_families.py; a test fails where they differ. -->

Served for Prometheus at `/metrics` on `--metrics-port`. Names, meanings and buckets are vLLM's where it has the same
thing, with `nanoflow_` in front. All have the label `model_name`, and all that an engine instance is behind have
`instance`: `instance-0` is the first engine instance of a server, `instance-1` the one that replaced it, and so on.
[deploy/prometheus.yml](../deploy/prometheus.yml) adds `server`.
"""


def render() -> str:
    """The whole page."""
    registry = CollectorRegistry()
    Families(registry, max_model_len=1024, batch_tokens=256)
    families = list(registry.collect())
    parts = [INTRODUCTION]
    for kind, title in (("gauge", "Gauges"), ("counter", "Counters"), ("histogram", "Histograms")):
        rows = "\n".join(_row(family) for family in families if family.type == kind)
        parts.append(f"## {title}\n\n| metric | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(family: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    return f"| `{family.name}{suffix}` | {family.documentation} |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
