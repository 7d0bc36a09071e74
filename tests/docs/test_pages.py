"""The documentation says what the code says: generated pages are up to date, links and names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from control_plane.config import ALL_GROUPS
from control_plane.metric_families import Families
from control_plane.options import options_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


@pytest.mark.parametrize("name", ["configuration", "metrics"])
def test_generated_pages_are_up_to_date(name):
    render = runpy.run_path(str(DOCS / f"make_{name}.py"))["render"]
    assert render() == (DOCS / f"{name}.md").read_text(encoding="utf-8"), f"run docs/make_{name}.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_flags_and_metrics_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:control_plane|worker|scheduler|autosearch|kvstore|deploy|docs|tests|proto)/[\w./]+)`", text
    ):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"`((?:control_plane|worker|scheduler|autosearch)(?:\.[a-z_]+)+)`", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module
    registry = CollectorRegistry()
    Families(registry, 1024, 256)
    metrics = {family.name for family in registry.collect()}
    for metric in re.findall(r"`(nanoflow_\w+)`", text):
        assert metric.removesuffix("_total") in metrics or metric in metrics, metric
    variables = {each.env for each in options_of(*ALL_GROUPS)} | {"NANOFLOW_CONFIG"}
    for variable in re.findall(r"`(NANOFLOW_[A-Z_]+)(?:=[^`]*)?`", text):
        assert variable in variables, variable
