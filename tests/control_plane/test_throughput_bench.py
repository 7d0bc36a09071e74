"""`bench throughput` with a tiny dummy model."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from control_plane.bench.throughput import Mode, Synchronous, run
from control_plane.bench.workload import Workload
from control_plane.config import EngineConfig
from control_plane.engine import single_rank_config
from control_plane.main import user_errors
from control_plane.options import ConfigError
from scheduler.plan import KVMoveResult, StepResult
from worker.cuda_executor import CudaExecutor
from worker.power_meter import MeterError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 211,
    "max_position_embeddings": 128,
}


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    threads = torch.get_num_threads()
    yield EngineConfig(model=tmp_path, load_format="dummy", max_num_batched_tokens=32, max_num_seqs=4, num_threads=1)
    torch.set_num_threads(threads)


def test_a_run_counts_every_token_and_ends_in_one_json_line(engine, capsys):
    result = run(engine, Workload(num_prompts=6, input_len=10, output_len=7))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    # total_s is rounded to a tenth of a millisecond, of a run that may take a few hundredths of a second.
    assert result["tokens_per_s"] == pytest.approx(6 * (10 + 7) / result["total_s"], rel=1e-2)
    # The last token of an output is never computed on.
    assert result["mean_batch_tokens"] * result["num_steps"] == pytest.approx(6 * (10 + 7 - 1), rel=1e-3)


def test_the_work_is_the_same_each_time_and_within_the_vocabulary():
    work = Workload(num_prompts=3, input_len=50, output_len=2)
    assert work.requests(211) == work.requests(211)
    drawn = [token for request in work.requests(211) for token in request.prompt_token_ids]
    assert min(drawn) >= 100
    assert max(drawn) <= 210
    assert len(set(drawn)) > 20


@pytest.mark.parametrize(("input_len", "output_len"), [(100, 29), (0, 5), (5, 0)])
def test_work_that_does_not_fit_is_refused(engine, input_len, output_len):
    with pytest.raises(ConfigError, match="input-len"):
        run(engine, Workload(num_prompts=1, input_len=input_len, output_len=output_len))


def test_more_prompts_than_memory_holds_are_refused_before_they_are_drawn():
    with pytest.raises(ConfigError, match="1000000000000: lower them"):
        Workload(num_prompts=10**9, input_len=1000, output_len=1).lengths()


def test_lengths_come_from_a_file_and_the_same_rows_each_time(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"x,{n},{n + 1}\n" for n in range(1, 40)))
    work = Workload(num_prompts=10, input_len=1, output_len=1, lengths_file=file)
    lengths = work.lengths()
    assert lengths == work.lengths()
    assert len(set(lengths)) == 10
    assert all(output == prompt + 1 and prompt >= 4 for prompt, output in lengths)
    with pytest.raises(ConfigError, match="36 rows"):
        Workload(37, 1, 1, file).lengths()
    with pytest.raises(ConfigError, match="cannot be read"):
        Workload(1, 1, 1, tmp_path / "absent.csv").lengths()


def test_a_synchronous_run_gives_the_same_tokens_and_no_late_plan_goes_unseen(engine):
    result = run(engine, Workload(num_prompts=3, input_len=10, output_len=7), Mode(synchronous=True))
    assert result["synchronous"] is True
    assert result["late_plans"] == result["num_steps"] - 1


def test_too_little_memory_beside_the_engine_is_one_clear_line(engine, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("control_plane.bench.throughput.play", full)
    with pytest.raises(ConfigError, match=r"lower gpu-memory-utilization from 0\.97: CUDA out of memory$"):
        run(engine, Workload(num_prompts=1, input_len=4, output_len=4))


def test_what_reads_the_gpus_power_is_missed_before_anything_is_loaded(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("control_plane.bench.throughput.open_engine", lambda *args: pytest.fail("it is loaded"))
    with pytest.raises(MeterError, match="pip install nvidia-ml-py"):
        run(engine, Workload(num_prompts=1, input_len=4, output_len=4))
    assert MeterError in user_errors()


def test_a_breakdown_is_for_gpus(engine):
    with pytest.raises(ConfigError, match="breakdown"):
        run(engine, Workload(num_prompts=1, input_len=4, output_len=4), Mode(breakdown=True))


def test_a_run_too_short_for_a_steady_middle_has_a_breakdown_too(engine, monkeypatch, capsys):
    """On the executor of a GPU, which runs the reference kernels here; only what reads the card is made up."""
    meter = SimpleNamespace(start=lambda: None, stop=lambda num_tokens: {})
    card = SimpleNamespace(driver=lambda: "none")
    fakes = {"open_engine": lambda engine, progress: CudaExecutor(single_rank_config(engine))}
    fakes |= {"gemm_rate": lambda *args: 1e12, "GpuMeter": lambda: meter, "NvmlCard": lambda: card}
    fakes["waterfall"] = lambda snapshots, *args: {"kept": snapshots.latest is not None}
    for name, fake in fakes.items():
        monkeypatch.setattr(f"control_plane.bench.throughput.{name}", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    cpu = replace(engine, device="cpu")
    result = run(cpu, Workload(num_prompts=1, input_len=4, output_len=1), Mode(breakdown=True))
    assert result["kept"]
    assert result["steady_tokens_per_s"] is None
    assert re.search(r"the run: \d+ tokens/s; now each operator", capsys.readouterr().err)
    result = run(cpu, Workload(num_prompts=4, input_len=4, output_len=60), Mode(breakdown=True))
    assert f"{result['steady_tokens_per_s']:.0f} in the steady middle; now" in capsys.readouterr().err


def test_a_step_that_was_waited_for_tells_its_moves_again():
    class Executor:
        def submit(self, plan):
            return Step()

    class Step:
        moves = (KVMoveResult(0, 1),)

        def result(self, timeout_s=None):
            self.moves, moves = (), self.moves
            return StepResult(0, np.empty(0, np.int32), (), 0.0, 0.0, moves)

    step = Synchronous(Executor(), 1.0).submit(None)
    assert step.done()
    assert step.result(1.0).moves == (KVMoveResult(0, 1),)
