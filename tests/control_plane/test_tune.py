"""`nanoflow tune` on a small model, step by step on the CPU: what is measured, written and served from it."""

import json
from dataclasses import replace

import pytest
from tiny_model import save_config

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import NanoOperation, PipelineSchedule, sequential
from autosearch.specs import ModelSpec
from control_plane import tune_command
from control_plane.config import EngineConfig
from control_plane.engine import worker_config
from control_plane.options import ConfigError
from control_plane.tune_command import Batches, check, run
from worker.cuda_loading import load_model
from worker.cuda_model import CudaModel
from worker.schedule_bench import ScheduleBench
from worker.steady_batch import SteadyMix, fill_pages, steady_plan
from worker.streams import LaneOrder, PartitionError, Place
from worker.tuner import Effort

QUICK = Effort(0, 0, num_finalists=2, settle_s=0, measure_s=0, num_repeats=2)


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_config(folder, max_position_embeddings=256)
    return EngineConfig(folder, device="cpu", load_format="dummy", max_num_seqs=200)


def test_the_fastest_of_each_batch_is_written_with_its_figures(engine, tmp_path, capsys):
    operators = layer_operators(ModelSpec.from_folder(engine.model))
    proposed = tmp_path / "proposed"
    proposed.mkdir()
    (proposed / "mine.json").write_text(decode_beside(operators, 256, 128, 0.5, 1).to_json())
    (proposed / "other size.json").write_text(sequential(operators, 64).to_json())
    batches = Batches((256,), (0.25, 0.45), (24,), 32)
    result = run(engine, batches, tmp_path / "out", [proposed], QUICK)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    files = sorted((tmp_path / "out").glob("*.json"))
    assert [file.name for file in files] == ["measured-256-115-24.json", "measured-256-64-24.json"]
    for file, batch in zip(files, (result["batches"][1], result["batches"][0])):
        schedule = PipelineSchedule.from_file(file)
        assert schedule.measured is not None
        assert schedule.decode_share == batch["num_decodes"] / 256
        assert schedule.gpu == "cpu"
        assert set(batch["finalists"]) <= {"sequential-256", "sequential-256-folded", *batch["screened"]}
        assert "mine" in batch["screened"]


def test_parts_of_the_device_that_its_driver_does_not_make_are_left_out(engine, tmp_path, monkeypatch, capsys):
    use = CudaModel.use_schedules

    def without_48_sms(model, schedules):
        if any(Place(1, 48) in LaneOrder(each, layer_operators(model.spec), 132).partitions for each in schedules):
            raise PartitionError("the driver gives 56 of 132 SMs")
        use(model, schedules)

    monkeypatch.setattr(CudaModel, "use_schedules", without_48_sms)
    result = run(engine, Batches((256,), (0.45,), (24,), 32), tmp_path / "out", effort=QUICK)
    screened = result["batches"][0]["screened"]
    assert len(screened) > 3
    assert not [name for name in screened if "-0.364-" in name]
    assert "-0.364-3-cuda is left out: the driver gives 56 of 132 SMs" in capsys.readouterr().err


def test_all_candidates_sample_the_same_tokens(engine):
    loaded = load_model(worker_config(engine), lambda what, share: None, [256])
    fill_pages(loaded.cache)
    plan = steady_plan(loaded.limits, SteadyMix(256, 100, 24, 32), num_pages=loaded.capacity.num_pages, vocab_size=99)
    bench, operators = ScheduleBench(loaded.model, plan), layer_operators(loaded.spec)
    expected = bench.tokens(sequential(operators, 256))
    assert len(set(expected)) > 3
    for cut in (64, 128):
        assert bench.tokens(decode_beside(operators, 256, cut, 0.5)) == expected


def test_batches_may_have_so_many_decodes_instead_of_a_share():
    mixes = list(Batches((128, 256, 512), (0.5,), (24,), 32, num_decodes=(200,)).mixes())
    assert [(mix.rows, mix.num_decodes) for mix in mixes] == [(256, 200), (512, 200)]


@pytest.mark.parametrize("batches", [Batches((0,), (0.5,), (24,), 8), Batches((256,), (1.5,), (24,), 8)])
def test_batches_that_cannot_be_are_refused(engine, tmp_path, batches):
    with pytest.raises(ConfigError, match="decode shares between 0 and 1"):
        run(engine, batches, tmp_path, effort=QUICK)


def test_batches_that_do_not_fit_are_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match="lower"):
        run(engine, Batches((256,), (0.5,), (5000,), 8), tmp_path, effort=QUICK)


def test_candidates_of_one_name_are_refused(engine, tmp_path):
    text = sequential(layer_operators(ModelSpec.from_folder(engine.model)), 256).to_json()
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.json").write_text(text)
    with pytest.raises(ConfigError, match="two candidates are named same"):
        run(engine, Batches((256,), (0.5,), (24,), 8), tmp_path / "out", [tmp_path / "one", tmp_path / "other"], QUICK)


def test_a_broken_candidate_is_named(engine, tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        run(engine, Batches((256,), (0.5,), (24,), 8), tmp_path / "out", [tmp_path / "broken.json"], QUICK)


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_without_a_gpu_the_command_says_so(engine, monkeypatch, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        check(replace(engine, device=device))


@pytest.mark.parametrize(
    ("lanes", "share", "error", "message"),
    [
        (3, 1 / 3, PartitionError, "two can be told apart"),
        (2, 0.02, PartitionError, "can be given"),
        (20, 0.05, ConfigError, "lanes"),
    ],
)
def test_candidates_that_cannot_run_are_refused_before_anything_is_loaded(
    engine, tmp_path, monkeypatch, lanes, share, error, message
):
    monkeypatch.setattr(tune_command, "load_for", lambda *args: pytest.fail("loaded"))
    operators = layer_operators(ModelSpec.from_folder(engine.model))
    cuts = [256 * lane // lanes for lane in range(lanes + 1)]
    operations = [
        NanoOperation(operator.name, cuts[lane], cuts[lane + 1], lane, share)
        for operator in operators
        for lane in range(lanes)
    ]
    file = tmp_path / "wide.json"
    file.write_text(PipelineSchedule("wide", 256, tuple(operations)).to_json())
    with pytest.raises(error, match=message):
        run(engine, Batches((256,), (0.5,), (24,), 32), tmp_path / "out", [file], QUICK)
