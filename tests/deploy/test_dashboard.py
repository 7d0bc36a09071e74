"""Prometheus and Grafana files: every metric that they ask for exists, with the labels that they use."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from control_plane.config import ServerConfig
from control_plane.metrics import Metrics
from scheduler.plan import EngineCapacity, ScheduleBucket

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/nanoflow.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
FROM_PROMETHEUS = {"server", "instance", "job"}  # labels that prometheus.yml adds


def served() -> dict[str, set[str]]:
    """The labels of every sample that /metrics shows."""
    metrics = Metrics("m", max_model_len=1024, batch_tokens=256)
    metrics.attached("instance-0", EngineCapacity(8, 16, 4, 1024, (ScheduleBucket(0, 256),)))
    metrics.rejected("overloaded")
    assert metrics.errors == 0
    registry: CollectorRegistry = metrics.registry
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SERVED = served()


def parsed(expression: str):
    for variable, value in (("$__rate_interval", "1m"), ("$model_name", ".*"), ("$instance", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return promql_parser.parse(expression)


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found = []
    promql_parser.walk(
        parsed(expression),
        lambda node: found.append(node) if isinstance(node, promql_parser.VectorSelector) else None,
    )
    assert found
    return found


def grouping_labels(expression: str) -> set[str]:
    return {each.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for each in group.split(",")}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_a_panel_is_served(expression):
    for selector in selectors(expression):
        assert selector.name in SERVED
        labels = SERVED[selector.name] | FROM_PROMETHEUS
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels
        assert grouping_labels(expression) <= labels


@pytest.mark.parametrize("query", VARIABLES)
def test_the_choices_come_from_a_metric_that_is_served(query):
    expression, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
    (selector,) = selectors(expression)
    assert label in SERVED[selector.name]


def test_a_metric_that_is_not_served_would_be_found():
    (selector,) = selectors("rate(nanoflow_no_such_total[1m])")
    assert selector.name not in SERVED


def test_the_figures_that_matter_are_shown():
    shown = {selector.name for expression in EXPRESSIONS for selector in selectors(expression)}
    for name in (
        "nanoflow_dense_batch_fill_ratio_sum",
        "nanoflow_late_plans_total",
        "nanoflow_iteration_idle_seconds_bucket",
        "nanoflow_wasted_tokens_total",
        "nanoflow_num_preemptions_total",
        "nanoflow_kv_pages_live",
        "nanoflow_kv_pages_cached",
        "nanoflow_requests_total",
        "nanoflow_requests_accepted_total",
        "nanoflow_time_to_first_token_seconds_bucket",
    ):
        assert name in shown


def test_the_dashboard_is_what_its_panels_say():
    render = runpy.run_path(str(DEPLOY / "grafana/make_dashboard.py"))["render"]
    assert json.loads(render()) == DASHBOARD, "run deploy/grafana/make_dashboard.py"


def test_panels_lie_side_by_side_and_have_the_imported_data_source():
    assert [each["name"] for each in DASHBOARD["__inputs"]] == ["DS_PROMETHEUS"]
    assert {"model_name", "instance"} <= {each["name"] for each in DASHBOARD["templating"]["list"]}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"


def test_prometheus_looks_where_the_server_listens():
    jobs = {job["job_name"]: job for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]}
    server = ServerConfig()
    assert jobs["nanoflow"]["static_configs"] == [{"targets": [f"{server.host}:{server.metrics_port}"]}]
    assert jobs["nanoflow"].get("metrics_path", "/metrics") == "/metrics"
    assert jobs["nanoflow"]["honor_labels"]  # else Prometheus renames our label `instance`


def test_promtool_accepts_prometheus_yml():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    result = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus.yml")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
