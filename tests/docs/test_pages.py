"""The documentation says what the code says: generated pages are up to date, links and names exist."""

from __future__ import annotations

import re
import runpy
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from prometheus_client import CollectorRegistry

from control_plane.config import ALL_GROUPS
from control_plane.metric_families import Families
from control_plane.options import options_of
from control_plane.pb import generation_pb2 as pb
from control_plane.pb import generation_pb2_grpc as rpc

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


def test_figures_of_the_throughput_benchmark_that_are_explained_exist():
    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    names = re.findall(r"`([a-z_]+)`", page.split("## What a machine can do")[1].split("\n## ")[0])
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "control_plane" / "bench").glob("*.py"))
    assert len(names) > 15
    assert [name for name in names if f'"{name}"' not in source] == []


class Echo(rpc.GenerationServicer):
    """Answers with the prompt itself."""

    def Generate(self, request, context):
        yield pb.GenerateResponse(delta=pb.Delta(text=request.text))
        yield pb.GenerateResponse(final=pb.Final(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=7))


def snippet(language: str, word: str) -> str:
    """The first block of the README in a language that has a word in it."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if word in block)


def test_the_readmes_grpcurl_request_is_one():
    command = shlex.split(snippet("sh", "grpcurl"))
    request = json_format.Parse(command[command.index("-d") + 1], pb.GenerateRequest())
    assert request.stopping.max_tokens == 64
    service, method = command[-1].split("/")
    assert method in pb.DESCRIPTOR.services_by_name[service.removeprefix("nanoflow.v1.")].methods_by_name


def test_the_readmes_python_client_works(capsys):
    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_GenerationServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        exec(snippet("python", "GenerationStub").replace("127.0.0.1:50051", f"127.0.0.1:{port}"), {})
    finally:
        server.stop(None).wait()
    out = capsys.readouterr().out
    assert out.startswith("Once upon a time")
    assert "FINISH_REASON_LENGTH" in out
