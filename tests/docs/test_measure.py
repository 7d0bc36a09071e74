"""docs/measure.sh: its commands are ones that exist, what they print is kept, and what fails is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from autosearch.catalog import find_model
from control_plane.main import app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "measure.sh"
PARTS = re.findall(r"^#   ([a-z]+) +[\d.]+ ", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)

RECORDER = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
print("a table")
print(json.dumps({"tokens_per_s": 1}))
print("a warning", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def measure(tmp_path):
    """Runs parts of the script with programs that only record how they are called: what ran, and the result."""
    for name in ("nanoflow", "python", "compute-sanitizer"):
        (tmp_path / name).write_text(RECORDER, encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def run(*parts: str, **more: str) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
        env = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "NANOFLOW": "nanoflow",
            "PYTHON": str(tmp_path / "python"),
            "LENGTHS": "lengths.csv",
            "RECORD": str(tmp_path / "record"),
            **more,
        }
        done = subprocess.run([SCRIPT, str(tmp_path / "out"), *parts], env=env, capture_output=True, text=True)
        record = tmp_path / "record"
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else [], done

    return run


@pytest.mark.parametrize("part", PARTS)
def test_the_commands_of_a_part_exist(measure, part):
    calls, done = measure(part)
    assert done.returncode == 0, done.stderr
    assert calls
    for program, *words in calls:
        if program == "nanoflow":
            command = typer.main.get_command(app)
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            command.make_context("nanoflow", words)  # raises for options and values that do not exist
        else:
            assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []


def test_all_parts_are_told_about():
    cases = set(re.findall(r"^    ([a-z]+)\)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(PARTS) == cases
    assert len(PARTS) > 10


def test_what_a_command_prints_is_kept_and_its_failure_counted(measure, tmp_path):
    _, done = measure("few", STATUS="3")
    assert done.returncode == 3, "three commands failed"
    assert json.loads((tmp_path / "out" / "few-1.json").read_text()) == {"tokens_per_s": 1}
    assert (tmp_path / "out" / "few-1.txt").read_text().splitlines()[:2] == ["a warning", "a table"]
    assert "exit status 3" in done.stdout


def test_its_model_is_llama_3_8b(measure, tmp_path):
    measure("link")
    spec, known = (find_model(name).spec for name in (str(tmp_path / "out" / "model"), "llama-3-8b"))
    assert replace(spec, bos_token_id=known.bos_token_id, eos_token_ids=known.eos_token_ids) == known


def test_what_is_not_a_part_is_named(measure):
    calls, done = measure("nothing")
    assert (calls, done.returncode) == ([], 2)
    assert "no part nothing" in done.stderr
