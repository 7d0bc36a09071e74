"""The stubs are what the .proto files say, and the check of that finds what differs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tests" / "check_stubs.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def copy(tmp_path):
    """What the check looks at, in a place where it may be spoilt."""
    for name in ("pyproject.toml", "tests/check_stubs.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    for stubs in ROOT.glob("*/pb"):
        shutil.copytree(stubs, tmp_path / stubs.relative_to(ROOT))
    return tmp_path


def test_the_committed_stubs_are_up_to_date():
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_drift_is_found_and_named_and_mended(copy):
    assert check(copy).returncode == 0
    proto = copy / "proto" / "generation.proto"
    proto.write_text(proto.read_text().replace("uint64 seed = 6;", "uint64 used_seed = 6;"))
    result = check(copy)
    assert result.returncode == 1
    assert "control_plane/pb/generation_pb2.py is out of date" in result.stderr
    assert "--write" in result.stderr
    assert check(copy, "--write").returncode == 0
    assert check(copy).returncode == 0


def test_orphans_are_found(copy):
    (copy / "proto" / "new.proto").write_text('syntax = "proto3";')
    (copy / "control_plane" / "pb" / "old_pb2.py").write_text("")
    result = check(copy)
    assert result.returncode == 1
    assert "proto/new.proto has no owner" in result.stderr
    assert "old_pb2.py belongs to no .proto file" in result.stderr


def test_another_generator_than_the_pinned_one_is_refused(copy):
    pyproject = copy / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"grpcio-tools==', '"grpcio-tools==0.'))
    result = check(copy)
    assert result.returncode == 1
    assert "pyproject.toml pins another" in result.stderr


def test_proto_is_no_package():
    """The import name `proto` belongs to another distribution."""
    assert not list((ROOT / "proto").rglob("*.py"))
