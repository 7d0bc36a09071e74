"""`bench throughput` on a GPU, as a user types it: its fields with a breakdown, and with a time between tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from control_plane.bench import waterfall
from control_plane.main import app

pytestmark = pytest.mark.gpu

# Wide enough for the card's GEMMs to be the limit, not their launches.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
INPUT_LEN, OUTPUT_LEN, BATCH = 300, 20, 512
ENGINE = ["--load-format", "dummy", "--dtype", "float16", "--max-num-batched-tokens", BATCH, "--max-num-seqs", 64]
ENGINE += ["--kv-cache-memory-bytes", 1 << 30]


def bench(folder: Path, num_prompts: int, *flags: object) -> dict[str, Any]:
    """The last line of the command's output."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    pytest.importorskip("pynvml", reason="what reads the GPU's power is absent: pip install nvidia-ml-py")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    work = ["--num-prompts", num_prompts, "--input-len", INPUT_LEN, "--output-len", OUTPUT_LEN]
    words = ["bench", "throughput", str(folder), "--device", "cuda", *ENGINE, *work, *flags]
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    check(figures, num_prompts)
    return figures


def check(figures: dict[str, Any], num_prompts: int) -> None:
    """What any run on a GPU reports."""
    assert figures["device"] == torch.cuda.get_device_name()
    num_tokens = num_prompts * (INPUT_LEN + OUTPUT_LEN)
    assert figures["tokens_per_s"] == pytest.approx(num_tokens / figures["total_s"], rel=1e-2)
    computed = num_prompts * (INPUT_LEN + OUTPUT_LEN - 1)  # the last token of an output is never computed on
    assert figures["mean_batch_tokens"] * figures["num_steps"] == pytest.approx(computed, rel=1e-2)
    assert math.isfinite(figures["idle_share"])
    assert 0 <= figures["idle_share"] < 1
    assert figures["busy_share"] + figures["idle_share"] == pytest.approx(1, abs=1e-4)
    for name in ("gemm_tflops", "share_of_optimum", "memory_bound_step_ms", "watts", "sm_mhz"):
        assert figures[name] > 0, name
    assert figures["joules_per_token"] >= 0  # the counter moves in steps: of a short run it may see nothing
    assert {"weights", "kv_cache", "graphs"} <= figures["memory_bytes"].keys()


def test_a_breakdown_sums_up_to_the_iteration_that_it_takes_apart(tmp_path, monkeypatch):
    run_for = waterfall._run_for
    # A tenth of the time for each part: here the sums count, not how well power has settled.
    monkeypatch.setattr(waterfall, "_run_for", lambda seconds, *others: run_for(seconds / 10, *others))
    figures = bench(tmp_path, 96, "--breakdown")
    assert figures["steady_batch_tokens"] > 0.95 * BATCH
    table, steps, busy = figures["breakdown"], figures["waterfall"], figures["busy_share"]
    assert set(table) == {*waterfall.PARTS, "whole iteration", "the same in the run"}
    assert all(row["ms"] > 0 for row in table.values())
    assert all({"joules", "watts"} <= table[name].keys() for name in waterfall.PARTS)
    in_run = table["the same in the run"]["ms"]
    idle = in_run * figures["idle_share"] / busy
    rows, (*iteration, steady, whole) = figures["snapshot"]["rows"], steps
    assert sum(ms for _, ms, _ in iteration) == pytest.approx(in_run + idle, abs=0.02)  # each is rounded to 0.001
    what, _, after_idle = iteration[-1]
    assert what == "idle until the next iteration"
    assert after_idle == pytest.approx(rows / (in_run + idle) * 1e3, rel=0.02)
    assert [steady[2], whole[2]] == [figures["steady_tokens_per_s"], figures["tokens_per_s"]]
    assert sum(ms for _, ms, _ in steps) == pytest.approx(rows / figures["tokens_per_s"] * 1e3, abs=0.02)
    assert 0 < figures["share_of_gemm_bound"] < 1.5
    bound = figures["tokens_per_s"] / figures["share_of_gemm_bound"]
    assert figures["gemm_bound_tokens_per_s"] == pytest.approx(bound, rel=1e-2)


def test_a_time_between_tokens_caps_the_batches(tmp_path):
    """No iteration is as short as is asked for here: those that take little longer than the shortest will do."""
    figures = bench(tmp_path, 32, "--target-itl-ms", 0.1)
    assert figures["target_itl_ms"] == 0.1
    assert figures["steady_batch_tokens"] < 0.9 * BATCH
