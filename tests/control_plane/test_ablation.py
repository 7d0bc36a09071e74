"""`nanoflow bench ablation` on a small model, step by step on the CPU, and its parts on made-up figures."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import save_config

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.layer_trace import LayerTrace, TraceError
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, sequential
from autosearch.specs import ModelSpec
from control_plane.ablation_command import plot
from control_plane.bench.ablation import Options, run
from control_plane.bench.ablation_plan import (
    Load,
    Mode,
    at_share,
    in_turns,
    kernels_of,
    sequential_candidates,
    with_kernels,
)
from control_plane.bench.ablation_steady import Ablation, MeteredBench, SteadyOptions
from control_plane.bench.ablation_table import LoadResult, Row, table
from control_plane.config import EngineConfig
from control_plane.engine import worker_config
from control_plane.options import ConfigError
from worker.cuda_executor import CudaExecutor
from worker.folded_norms import is_folded
from worker.steady_batch import SteadyMix
from worker.tuner import Effort, Reading

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
HALF = SteadyMix(2048, 1024, 768, 512)
QUICK = Effort(0, 0, settle_s=0, measure_s=0, num_repeats=2)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(params=[96, 84], ids=["norms can be folded", "and cannot"])  # a width of the FFN in eights, and not
def engine(tmp_path, request):
    save_config(tmp_path, num_hidden_layers=3, intermediate_size=request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield EngineConfig(
        tmp_path, device="cpu", load_format="dummy", max_num_batched_tokens=256, max_num_seqs=200, num_threads=1
    )
    torch.set_num_threads(threads)


class FakeBench:
    """Milliseconds by a rule, on a card that gets slower all the time."""

    def __init__(self, ms, drift=0.0):
        self._ms, self._drift, self.runs = ms, drift, []

    def run(self, schedule, settle_s, seconds):
        self.runs.append(schedule.name)
        return Reading(self._ms(schedule) * (1 + self._drift * len(self.runs)), 40.0)


def rule(schedule):
    """Sequential 70, with folded norms 69; nano-batches cost 1 each; overlap is best with 64 SMs."""
    ms = 69.0 if is_folded(schedule) else 70.0
    shares = {op.sm_share for op in schedule.operations if op.lane == 1}
    if shares:
        return ms - 3 + abs(min(shares) * 132 - 64) / 10
    return ms + len(schedule.ranges("qkv")) - 1


def ablation(bench, mix=HALF, can_fold=True, **options):
    steady = SteadyOptions(effort=QUICK, sweep_effort=QUICK, **options)
    return Ablation(MeteredBench(bench, None), OPERATORS, mix, 132, can_fold, steady, lambda line: None)


@given(st.lists(st.integers(), min_size=1, max_size=6, unique=True), st.integers(1, 7))
def test_turns_go_there_and_back_and_leave_nobody_out(items, repeats):
    order = list(in_turns(items, repeats))
    assert Counter(order) == dict.fromkeys(items, repeats)
    rounds = [order[i : i + len(items)] for i in range(0, len(order), len(items))]
    assert all(after == before[::-1] for before, after in zip(rounds, rounds[1:]))
    # After an even number of rounds all have waited equally long.
    if repeats % 2 == 0:
        waits = {item: sum(i for i, each in enumerate(order) if each == item) for item in items}
        assert len(set(waits.values())) == 1


@given(
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.integers(1, 4096),
    st.integers(1, 2000),
    st.integers(1, 20_000),
    st.sampled_from([16, 64]),
)
def test_a_steady_mix_fits_slots_pages_and_rows_and_has_the_loads_share(inputs, outputs, rows, slots, pages, page):
    load = Load(inputs, outputs)
    try:
        mix = load.steady_mix(rows, slots, pages, page)
    except ConfigError:
        return
    chunks = -(-(mix.rows - mix.num_decodes) // inputs)
    assert mix.rows <= rows
    assert mix.num_decodes + chunks <= slots
    assert mix.num_decodes * mix.mean_context <= pages * page
    assert abs(mix.num_decodes - mix.rows * outputs / (inputs + outputs)) <= 0.5


def test_the_papers_loads_on_an_h200():
    # 15,151 pages of 64 for LLaMA-3-8B (docs/results.md): 512/1024 cannot keep 2,048 rows full.
    mixes = [Load.parse(text).steady_mix(2048, 1536, 15_151, 64) for text in ("512/0", "512/512x2048", "512/1024")]
    assert mixes[0] == SteadyMix(2048, 0, 512, 512)
    assert mixes[1] == SteadyMix(2048, 1024, 768, 512)
    assert 1200 < mixes[2].rows < 1480
    assert mixes[2].num_decodes == round(mixes[2].rows * 2 / 3)
    assert mixes[2].mean_context == 1024


@pytest.mark.parametrize("text", ["512", "512/", "/512", "a/b", "0/512", "512/512x0", "512/512x"])
def test_loads_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="a load is like"):
        Load.parse(text)


def test_a_load_without_outputs_still_asks_for_one_token():
    assert Load.parse("512/0x3").workload.lengths() == [(512, 1)] * 3


@given(st.sampled_from(range(32, 100, 8)))
def test_a_swept_share_keeps_schedules_valid(sms):
    schedule = at_share(decode_beside(OPERATORS, 2048, 1024, 0.5, kernel="cuda"), sms / 132)
    schedule.validate(OPERATORS)
    assert {round(op.sm_share * 132) for op in schedule.operations if op.lane == 1} == {sms}
    assert {round(op.sm_share * 132) for op in schedule.operations if op.sm_share < 1 and op.lane == 0} == {132 - sms}


def test_non_overlap_may_have_the_kernels_of_the_overlapping_schedule():
    base = decode_beside(OPERATORS, 2048, 1024, 0.5, kernel="cuda")
    found = sequential_candidates(OPERATORS, 2048, [base], can_fold=True)
    assert len(found) == len({schedule.name for schedule in found}) == 4
    assert found[0] == sequential(OPERATORS, 2048)
    assert [kernels_of(schedule).get("decode_attention", "") for schedule in found] == ["", "cuda", "", "cuda"]
    assert [is_folded(schedule) for schedule in found] == [False, False, True, True]
    assert with_kernels(found[0], {}) == found[0]


def test_without_schedules_overlap_is_the_fastest_of_the_sweep_and_is_measured_again():
    result, schedules = ablation(FakeBench(rule, drift=1e-4)).run("512/512", None)
    assert is_folded(schedules[Mode.NON_OVERLAP])
    assert [row.name for row in result.nano_batches] == ["1", "2", "3", "4", "5", "6"]
    assert [int(row.name) for row in result.shares] == [0, *range(32, 93, 8)]
    assert max(result.shares, key=lambda row: row.median).name == "64"
    assert result.gain(result.mode(Mode.OVERLAP)) == pytest.approx(69 / 66, rel=1e-3)
    assert result.gain(result.mode(Mode.NANO_BATCH)) == pytest.approx(69 / 70, rel=1e-3)
    assert all(len(row.tokens_per_s) == 2 for row in result.modes)
    assert result.modes[0].watts == pytest.approx(40 / 69e-3, rel=1e-2)
    assert result.modes[0].joules_per_token == pytest.approx(40 / 2048)


def test_a_model_whose_norms_cannot_be_folded_is_measured_without():
    bench = FakeBench(rule)
    result, schedules = ablation(bench, can_fold=False).run("512/512", None)
    assert not any("folded" in name for name in bench.runs)
    assert schedules[Mode.NON_OVERLAP].name.startswith("sequential")
    assert result.gain(result.mode(Mode.OVERLAP)) == pytest.approx(70 / 67, rel=1e-3)


def test_overlap_is_what_serving_would_choose():
    base = decode_beside(OPERATORS, 2048, 1024, 64 / 132)
    figures = Figures(2000, 31_000, 29_000)
    tuned = planned_for_half(base, name="tuned", measured=figures)
    result, schedules = ablation(FakeBench(rule), attention_sms=(40,)).run("512/512", [tuned])
    assert schedules[Mode.OVERLAP].name == "tuned"
    assert not result.notes
    slower = planned_for_half(base, name="tuned", measured=Figures(2000, 28_000, 29_000))
    result, schedules = ablation(FakeBench(rule)).run("512/512", [slower])
    assert Mode.OVERLAP not in schedules
    assert "sequential schedule was the fastest" in result.notes[0]
    mix = SteadyMix(2048, 1900, 768, 512)
    result, schedules = ablation(FakeBench(rule), mix).run("512/9999", [tuned])
    assert "nanoflow tune --batch-sizes 2048 --decode-shares 0.928 --mean-contexts 768" in result.notes[0]


def planned_for_half(schedule, **changes):
    return replace(schedule, decode_share=0.5, mean_context=768.0, prefill_pairs=1024 * 512.0, **changes)


def test_nothing_decodes_so_nothing_overlaps():
    result, schedules = ablation(FakeBench(rule), SteadyMix(2048, 0, 512, 512)).run("512/0", None)
    assert set(schedules) == {Mode.NON_OVERLAP, Mode.NANO_BATCH}
    assert result.shares == ()


def test_tables_show_gain_spread_power_and_what_is_missing():
    rows = (
        Row("non-overlap", "sequential-2048", (30_000.0, 29_000.0, 31_000.0), 690.0, 1545.0, 23e-3),
        Row("overlap", "mine", (31_200.0, 31_500.0, 30_900.0)),
    )
    result = LoadResult("512/512", "2048 rows", rows, notes=("overlap: a note",))
    lines = table(result)
    measured = ["29000", "30000", "31000", "1.000", "6.7%", "690", "1545", "23.00"]
    assert lines[0] == "load 512/512: 2048 rows"
    assert lines[2].split() == ["non-overlap", *measured, "sequential-2048"]
    assert lines[3].split() == ["overlap", "30900", "31200", "31500", "1.040", "1.9%", "–", "–", "–", "mine"]
    assert lines[-1].strip() == "overlap: a note"
    assert result.to_json()["modes"][1]["gain"] == 1.04


def test_steady_iterations_end_in_one_json_line_a_plot_and_traces(engine, tmp_path, capsys):
    operators = layer_operators(ModelSpec.from_folder(engine.model))
    loads = (Load(60, 0), Load(60, 4))
    steady = SteadyOptions((2,), (64,), QUICK, QUICK)
    options = Options(loads, steady, num_repeats=3, plot=tmp_path / "bars.png", traces=tmp_path / "traces")
    result = run(engine, options)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == result
    assert [[row["name"] for row in load["modes"]] for load in result["loads"]] == [
        ["non-overlap", "nano-batch only"],
        ["non-overlap", "nano-batch only", "overlap"],
    ]
    assert all(len(row["tokens_per_s"]) == 3 for load in result["loads"] for row in load["modes"])
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)
    trace = LayerTrace.from_file(tmp_path / "traces" / "60-4-overlap.json")
    assert {operation.operator for operation in trace.operations} == {operator.name for operator in operators}
    assert {operation.layer for operation in trace.operations} == {-1, 0, 1}
    assert sum(operation.helps for operation in trace.operations) == 3


def test_whole_runs_switch_schedules_between_runs_without_loading_again(engine, tmp_path, capsys):
    operators = layer_operators(ModelSpec.from_folder(engine.model))
    folder = tmp_path / "schedules"
    folder.mkdir()
    (folder / "all.json").write_text(decode_beside(operators, 256, 128, 0.5).to_json())
    opened = []

    def open_executor(config, progress=None):
        opened.append(CudaExecutor(config))
        return opened[-1]

    engine = replace(engine, schedules=folder)
    options = Options((Load(40, 8, 12),), SteadyOptions((2,), (), QUICK, QUICK), whole_runs=True, num_repeats=2)
    result = run(engine, options, open_executor)
    assert len(opened) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    (load,) = result["loads"]
    assert [row["name"] for row in load["modes"]] == list(Mode)
    assert load["modes"][0]["schedule"].startswith("sequential")
    for row in load["modes"][1:]:
        overlapped, steps = (int(part) for part in row["schedule"].split()[:3:2])
        assert 0 < overlapped <= steps


def test_what_cannot_be_measured_is_refused(engine):
    with pytest.raises(ConfigError, match="tune"):
        run(engine, Options((Load(24, 24),), whole_runs=True))
    with pytest.raises(ConfigError, match="at least one load"):
        run(engine, Options(()))
    with pytest.raises(ConfigError, match="does not fit"):
        run(engine, Options((Load(5000, 5000),)))
    with pytest.raises(ConfigError, match="multiples of 8"):
        run(engine, Options((Load(24, 24),), SteadyOptions(attention_sms=(33,))))
    assert worker_config(engine).device == "cpu"


def test_plot_draws_a_result_and_says_what_other_files_are_not(tmp_path, capsys):
    rows = (Row("non-overlap", "s", (3.0, 2.0), 690.0, 1545.0, 0.1), Row("overlap", "o", (4.0, 3.5)))
    swept = tuple(replace(row, name=name) for row, name in zip(rows, "12"))
    result = LoadResult("512/512", "2 rows", rows, swept, swept, ("a note",))
    assert LoadResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    line = {"benchmark": "ablation", "of": "steady iterations", "model": "m", "device": "d"}
    file = tmp_path / "result.json"
    file.write_text("a line before\n" + json.dumps(line | {"loads": [result.to_json()]}) + "\n")
    plot([file], tmp_path / "bars.png", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"png": str(tmp_path / "bars.png")}
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)
    file.write_text(json.dumps(line | {"loads": [{}]}))
    with pytest.raises(ConfigError, match=r"result\.json"):
        plot([file], tmp_path / "bars.png")
    file.write_text("{}")
    with pytest.raises(TraceError, match="no trace of a layer"):
        plot([file], tmp_path / "bars.png")
