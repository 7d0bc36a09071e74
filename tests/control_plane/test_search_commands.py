"""The planning commands, as a user types them."""

import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from control_plane.search_commands import register

PROFILE = "a100-80gb-llama-2-70b-tp8"
ON_EIGHT = ["--gpu", "a100-80gb", "--num-gpus", "8"]
SEARCH_70B = ["search", "--model", "llama-2-70b", *ON_EIGHT, "--profile", PROFILE]
app = typer.Typer()
register(app)


def run(*words: str):
    return CliRunner().invoke(app, [str(word) for word in words])


def as_json(*words: str):
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cpu_s() -> float:
    """Of this process and its solvers: on a machine that others use too, more time passes."""
    return sum(os.times()[:4])


def test_cost_model_has_the_papers_table():
    fields = as_json(
        "cost-model", "--model", "llama-2-70b", *ON_EIGHT, "--decode-context-tokens", 1398430, "--prefill-pairs", 349541
    )
    assert round(fields["operators"]["decode_attention"]["mem_gb"], 1) == 462.2
    assert set(fields["operators"]) == {"kqv", "o", "ug", "d", "decode_attention", "prefill_attention", "network"}
    assert set(fields["operators"]["kqv"]) >= {"gflop", "mem_gb", "net_gb", "compute_ms", "mem_ms", "net_ms"}
    assert round(fields["total"]["compute_ms"], 2) == 114.17
    assert round(fields["optimal_tokens_per_s_per_gpu"]) == 1857
    assert round(fields["t_r"], 2) == 0.35
    assert fields["bound"] == "compute"
    assert fields["max_batch_size"] > 2048 > fields["max_batch_size_without_gqa"]
    for name, times in {"d": (30.84, 3.11, 0), "network": (0.01, 4.70, 31.33)}.items():
        row = fields["operators"][name]
        assert tuple(round(row[time], 2) for time in ("compute_ms", "mem_ms", "net_ms")) == times


def test_cost_model_takes_lengths():
    fields = as_json("cost-model", "--model", "llama-3-8b", "--gpu", "h200", "--input-len", 512, "--output-len", 512)
    assert fields["decode_rows"] == 1024
    assert fields["max_requests"] > 1000
    assert fields["operators"]["network"]["net_ms"] == 0


def test_cost_model_prints_a_table():
    result = run("cost-model", "--model", "mixtral-8x7b", *ON_EIGHT)
    assert result.exit_code == 0
    for word in ("ug", "router", "T_R", "optimum", "without GQA"):
        assert word in result.stdout


def test_cost_model_of_a_config_file(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert as_json("cost-model", "--model", tmp_path, "--gpu", "v100")["bound"] in ("compute", "memory")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    out = tmp_path_factory.mktemp("schedules")
    words = [*SEARCH_70B, "--batch-size", 256, "--time-limit", 2, "--collectives", "all_reduce", "--out", out]
    return out, words, as_json(*words)


def test_search_reports_what_it_found(searched):
    out, _, report = searched
    for field in ("predicted_tokens_per_s_per_gpu", "share_of_optimal", "num_nano_operations", "solver", "seconds"):
        assert field in report
    assert report["sequential_tokens_per_s_per_gpu"] > 0
    assert all((out / name).is_file() for name in report["files"])


def test_search_is_cached(searched):
    _, words, first = searched
    again = as_json(*words)
    assert again["cached"] is True
    assert again["predicted_tokens_per_s_per_gpu"] == first["predicted_tokens_per_s_per_gpu"]


def test_search_plans_a_grid(tmp_path):
    report = as_json(
        *["search", "--model", "llama-3-8b", "--gpu", "h200", "--profile", "h200-llama-3-8b", "--out", tmp_path],
        *["--batch-sizes", "128,256", "--decode-shares", "0.5", "--mean-contexts", "512"],
    )
    assert [bucket["batch_tokens"] for bucket in report["buckets"]] == [128, 256]


def test_search_plans_twelve_buckets_in_two_minutes(tmp_path):
    words = ["search", "--model", "llama-3-8b", "--gpu", "h200", "--profile", "h200-llama-3-8b"]
    begin = cpu_s()
    report = as_json(*words, "--out", tmp_path)
    assert cpu_s() - begin < 120
    assert len({(each["batch_tokens"], each["decode_share"], each["mean_context"]) for each in report["buckets"]}) == 12
    for bucket in report["buckets"]:
        assert bucket["plan"].startswith("sequential") or bucket["gain"] > bucket["spread"]
        assert any("sequential" in name for name in bucket["files"])


def test_simulate_plays_and_draws(searched, tmp_path):
    out, _, report = searched
    schedule, png = out / report["files"][0], tmp_path / "gantt.png"
    result = run("simulate", schedule, "--profile", PROFILE, "--png", png)
    assert result.exit_code == 0, result.output
    assert "compute lane" in result.stdout
    assert png.stat().st_size > 10_000
    fields = as_json("simulate", schedule, "--profile", PROFILE)
    assert fields["tokens_per_s_per_gpu"] == pytest.approx(report["predicted_tokens_per_s_per_gpu"])


def test_sweep_marks_the_crossover(tmp_path):
    words = ["--batch-sizes", "128,512,2048", "--time-limit", 1, "--png", tmp_path / "sweep.png"]
    fields = as_json("sweep", "--model", "llama-2-70b", *ON_EIGHT, "--profile", PROFILE, *words)
    assert fields["crossover"] == 2048  # the gain at 512 is below the profile's spread
    assert [point["kept_pipeline"] for point in fields["points"]] == [False, False, True]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


WRONG = {
    "another GPU's profile": ["search", "--model", "llama-3-8b", "--gpu", "h200", "--profile", PROFILE],
    "no multiple of 128": [*SEARCH_70B, "--batch-size", "2000"],
    "empty batch": [*SEARCH_70B, "--batch-size", "0"],
    "unknown solver": [*SEARCH_70B, "--solver", "cplex"],
    "weights that do not fit": ["search", "--model", "llama-3-405b", *ON_EIGHT, "--profile", PROFILE],
    "heads that do not divide": [*SEARCH_70B, "--num-gpus", "7"],
    "unknown model": ["cost-model", "--model", "gpt-5", "--gpu", "h200"],
    "unknown GPU": ["cost-model", "--model", "llama-3-8b", "--gpu", "rtx"],
    "no profile": ["search", "--model", "llama-2-70b", *ON_EIGHT, "--profile", "nowhere.json"],
    "no profile file": ["search", "--model", "llama-2-70b", *ON_EIGHT, "--profile", __file__],
    "negative lengths": ["cost-model", "--model", "llama-3-8b", "--gpu", "h200", "--input-len", "-1"],
    "no schedule": ["simulate", "nowhere.json", "--profile", PROFILE],
    "no numbers": [*SEARCH_70B, "--decode-shares", "half"],
    "unknown overlap": [*SEARCH_70B, "--overlap", "some"],
    "endless context": ["cost-model", "--model", "llama-3-8b", "--gpu", "h200", "--decode-context-tokens", "inf"],
    "no number of pairs": ["cost-model", "--model", "llama-3-8b", "--gpu", "h200", "--prefill-pairs", "nan"],
    "endless lengths": ["cost-model", "--model", "llama-3-8b", "--gpu", "h200", "--input-len", "inf"],
    "endless contexts of a grid": [*SEARCH_70B, "--mean-contexts", "512,inf"],
    "a batch of a grid": [*SEARCH_70B, "--batch-sizes", "512,520"],
    "no time": [*SEARCH_70B, "--batch-size", "256", "--time-limit", "nan"],
    "no folder": [*SEARCH_70B, "--batch-size", "256", "--out", "/proc/nowhere"],
    "no folder for the sweep": ["sweep", *SEARCH_70B[1:], "--png", "/proc/nowhere.png"],
    "no folder for the chart": ["simulate", "SCHEDULE", "--profile", PROFILE, "--png", "/proc/nowhere.png"],
    "no power in the profile": ["simulate", "SCHEDULE", "--profile", PROFILE, "--interference", "power"],
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_ends_in_one_line_and_exit_code_2(case, searched):
    out, _, report = searched
    words = [str(out / report["files"][0]) if word == "SCHEDULE" else word for word in WRONG[case]]
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("nanoflow: ")  # at once: nothing was searched or said before
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_it_runs_as_a_module_without_torch():
    modules = "control_plane.search_commands, autosearch.search, autosearch.planner, autosearch.plot"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
