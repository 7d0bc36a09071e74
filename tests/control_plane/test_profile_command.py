"""`nanoflow profile`, on a CPU and on a device that a formula stands in for, and a search with what it wrote."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from autosearch.catalog import find_model
from autosearch.operators import layer_operators
from autosearch.profile_table import MeasuredOn, ProfileTable
from control_plane import main, profile_command, search_commands
from control_plane.profile_command import gpu_name, model_name
from worker.profile_points import Scope

torch.set_num_threads(1)
app = typer.Typer()
profile_command.register(app)
search_commands.register(app)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def last_line(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_a_dry_run_writes_a_profile_within_its_time(stories_folder, tmp_path):
    output = tmp_path / "profile.json"
    lengths = ["--mean-context", 40, "--prompt-len", 30]
    result = run("profile", stories_folder, "--output", output, "--device", "cpu", "--max-seconds", 8, *lengths)
    line = last_line(result)
    table = ProfileTable.from_file(output)
    assert line["bytes"] == output.stat().st_size
    assert line["fingerprint"] == table.fingerprint
    assert 0 < line["load_s"] < line["seconds"] < 30
    assert line["gpu"] == table.measured_on.gpu == "cpu"
    assert line["num_bursts"] == len(table.isolated) > 0
    assert table.workload.mean_context == 40
    assert table.measured_on.versions["torch"] == torch.__version__
    assert "beside each other" in result.stderr


def test_a_search_runs_with_what_was_written(stories_folder, tmp_path, monkeypatch):
    path = Path(__file__).parents[1] / "worker" / "profiled_device.py"
    spec = importlib.util.spec_from_file_location("profiled_device", path)
    formula = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formula)
    llama = find_model("llama-3-8b").spec

    def opened(model, load_format, dtype, device, sizes, mix, line):
        scope = Scope(layer_operators(llama), formula.NUM_SMS, sizes)
        on = MeasuredOn("h200", 1, formula.NUM_SMS, power_limit_w=700, versions={"torch": "2.11"})
        return formula.FormulaDevice(noise=0.002), on, scope, llama

    monkeypatch.setattr(profile_command, "_open", opened)
    output = tmp_path / "h200.json"
    line = last_line(run("profile", stories_folder, "--output", output, "--load-format", "dummy"))
    assert line["name"] == "h200-llama-3-8b"
    assert line["num_sustained"] <= 150 + 4
    assert line["num_skipped_points"] == line["num_skipped_bursts"] == 0
    assert line["sum_of_operators_us"] == pytest.approx(2300, rel=0.1)
    assert line["static_watts"] == 180
    assert line["around_layers_us"] == 1600
    on = ["--model", "llama-3-8b", "--gpu", "h200", "--batch-size", 2048, "--input-len", 512, "--output-len", 512]
    report = last_line(run("search", *on, "--profile", output, "--out", tmp_path / "plans", "--json"))
    assert report["predicted_tokens_per_s_per_gpu"] > report["sequential_tokens_per_s_per_gpu"]
    assert list((tmp_path / "plans").glob("*.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device"),
        (["--load-format", "gguf"], "--load-format"),
        (["--decode-share", "1"], "--decode-share"),
        (["--batch-sizes", "12,x"], "numbers"),
        (["--device", "cpu", "--mean-context", "5000"], "lower"),
        (["--output", "/no/such/folder/x.json"], "no folder"),
    ],
)
def test_what_a_user_can_mend_ends_in_one_line(stories_folder, tmp_path, monkeypatch, capsys, words, message):
    words = ["profile", str(stories_folder), "--output", str(tmp_path / "x.json"), *words]
    monkeypatch.setattr(sys, "argv", ["nanoflow", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("nanoflow: ")
    assert message in line


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_gpus_have_the_catalogs_names(device, name):
    assert gpu_name(device) == name


def test_a_known_models_profile_serves_everywhere(stories_folder):
    llama = replace(find_model("llama-3-8b").spec, bos_token_id=128000, eos_token_ids=(128001,), max_position=8000)
    assert model_name(llama, stories_folder) == "llama-3-8b"
    assert model_name(find_model(str(stories_folder)).spec, stories_folder) == str(stories_folder.resolve())
