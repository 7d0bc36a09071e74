"""Loading checkpoints: whole, cut, incomplete, unsafe, tied and dummy."""

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.executor import Worker
from worker.models.loading import load_weights
from worker.models.parameters import model_parameters
from worker.sharding import shard
from worker.weights import (
    DUMMY_SCALE,
    MOST_MAPPED_BYTES,
    DummySource,
    MissingTensorsError,
    ModelLoadError,
    SafetensorsSource,
    TensorPart,
    load_parameters,
)

CPU = torch.device("cpu")


@pytest.fixture
def folder_with(random_model, tmp_path):
    """folder_with(change, family, **config) -> a copy of a random model, its tensors changed in place by change."""

    def make(change=lambda tensors: None, family="llama", **config):
        source = random_model(family, **config)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


def loaded(folder, **changes):
    worker = Worker(WorkerConfig(folder, max_batch_tokens=16, page_size=8, num_pages=8, num_threads=1, **changes))
    worker.load()
    return worker


def output(folder, planner, ask, **changes):
    return planner(loaded(folder, **changes)).run([ask([3, 1, 4, 1, 5], 12)])[0]


def test_missing_tensors_stop_the_start_and_all_are_named(folder_with):
    gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    folder = folder_with(lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(MissingTensorsError) as error:
        loaded(folder)
    assert error.value.names == tuple(gone)
    assert all(name in str(error.value) for name in gone)


def test_a_missing_bias_stops_the_start(folder_with):
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(MissingTensorsError, match=name):
        loaded(folder_with(lambda tensors: tensors.pop(name), family="qwen2"))


def test_a_missing_expert_stops_the_start(folder_with):
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    with pytest.raises(MissingTensorsError, match=name):
        loaded(folder_with(lambda tensors: tensors.pop(name), family="mixtral"))


def test_unexpected_tensors_only_warn(folder_with, caplog, planner, ask, random_model):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    with caplog.at_level(logging.WARNING):
        result = output(folder_with(add), planner, ask)
    assert [r.message for r in caplog.records if "q_norm" in r.message]
    assert not [r.message for r in caplog.records if "inv_freq" in r.message]
    assert result == output(random_model("llama"), planner, ask)


def test_a_tensor_of_another_shape_stops_the_start(folder_with):
    def shrink(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 79)

    with pytest.raises(ModelLoadError, match=r"down_proj.*\[64, 79\].*\[64, 80\]"):
        loaded(folder_with(shrink))


@pytest.fixture
def sharded(random_model, tmp_path_factory):
    """A model in several files, and its index."""
    import shutil

    source = random_model("llama", shard_size="30KB")
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(source, folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_sharded_checkpoints_load(sharded, random_model, planner, ask):
    assert output(sharded, planner, ask) == output(random_model("llama"), planner, ask)


def test_a_missing_shard_names_its_tensors_and_itself(sharded):
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    lost.unlink()
    with pytest.raises(MissingTensorsError, match=lost.name) as error:
        loaded(sharded)
    assert set(error.value.names) == {name for name, file in index.items() if file == lost.name}


def test_a_shard_without_what_the_index_promises(sharded):
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
    with pytest.raises(MissingTensorsError, match=name):
        loaded(sharded)


def test_an_index_cannot_point_out_of_the_folder(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name: f"../../{file}" for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    loaded(sharded)  # files are looked for in the folder itself


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        loaded(sharded)


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was opened')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unopened(folder_with, name):
    folder = folder_with()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelLoadError, match="safetensors"):
        loaded(folder)


def test_no_weights_and_broken_weights_are_refused(folder_with):
    folder = folder_with()
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        loaded(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        loaded(folder)


def test_code_in_a_model_folder_is_never_run(folder_with, tmp_path, planner, ask):
    folder = folder_with()
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert len(output(folder, planner, ask)) == 12
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("redundant", ["absent", "equal", "different"])
def test_tied_and_untied_heads_are_those_of_transformers(tied, redundant, folder_with, planner, ask, reference, caplog):
    def change(tensors):
        tensors["lm_head.weight"] = {
            "equal": tensors["model.embed_tokens.weight"].clone(),
            "different": torch.randn(101, 64, generator=torch.Generator().manual_seed(9)),
        }.get(redundant)
        if redundant == "absent":
            del tensors["lm_head.weight"]

    folder = folder_with(change, tie_word_embeddings=tied)
    if not tied and redundant == "absent":
        with pytest.raises(MissingTensorsError, match=r"lm_head\.weight"):
            loaded(folder)
        return
    one = ask([3, 1, 4, 1, 5], 12)
    with caplog.at_level(logging.WARNING):
        planner(loaded(folder)).run([one])
    assert one.output == reference(folder)(one.prompt + one.output)[4:-1].argmax(-1).tolist()
    assert bool(caplog.records) == (tied and redundant == "different")


def test_weights_in_half_precision_are_read_as_fp32(folder_with, planner, ask, reference):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16)

    folder = folder_with(halve)
    one = ask([3, 1, 4, 1, 5], 12)
    planner(loaded(folder)).run([one])
    assert one.output == reference(folder)(one.prompt + one.output)[4:-1].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("size", [2, 4])
def test_cut_parameters_put_together_are_the_whole(family, size, random_model):
    folder = random_model(family, intermediate_size=82, num_key_value_heads=4)
    spec = ModelSpec.from_folder(folder)

    def weights(size, rank):
        part = shard(spec, size, rank)
        return load_weights(spec, part, SafetensorsSource(folder), torch.float32, CPU)

    whole, parts = weights(1, 0), [weights(size, rank) for rank in range(size)]
    vocab = torch.cat([part["lm_head"] for part in parts])
    assert torch.equal(vocab[:101], whole["lm_head"])
    assert not vocab[101:].any()
    o = torch.cat([part["layers.1.o"] for part in parts], dim=1)
    assert torch.equal(o, whole["layers.1.o"])
    if family == "qwen2":
        third = [part["layers.0.qkv_bias"].split([64 // size, 32 // size, 32 // size]) for part in parts]
        assert torch.equal(torch.cat([torch.cat(side) for side in zip(*third)]), whole["layers.0.qkv_bias"])


def test_dummy_weights_are_uniform_seeded_and_cut_like_real_ones(random_model):
    spec = ModelSpec.from_folder(random_model("mixtral", intermediate_size=82))

    def weights(size=1, rank=0, seed=0):
        return load_weights(spec, shard(spec, size, rank), DummySource(seed), torch.float32, CPU)

    whole = weights()
    assert set(whole) == set(model_parameters(spec, shard(spec, 1, 0), tied=False))
    for tensor in whole.values():
        assert tensor.abs().max() <= DUMMY_SCALE
        assert tensor.std() == pytest.approx(DUMMY_SCALE / np.sqrt(3), rel=0.25)
    assert torch.equal(weights()["layers.0.qkv"], whole["layers.0.qkv"])
    assert not torch.equal(weights(seed=1)["layers.0.qkv"], whole["layers.0.qkv"])
    assert not torch.equal(whole["layers.0.qkv"], whole["layers.1.qkv"])
    halves = [weights(2, rank)["layers.0.o"] for rank in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), whole["layers.0.o"])


def test_dummy_weights_need_config_json_only(random_model, tmp_path, planner, ask):
    (tmp_path / "config.json").write_text((random_model("llama") / "config.json").read_text())
    assert len(output(tmp_path, planner, ask, load_format="dummy")) == 12


def test_progress_reaches_the_end(random_model):
    spec = ModelSpec.from_folder(random_model("llama"))
    shares = []
    parameters = model_parameters(spec, shard(spec, 1, 0), tied=False)
    load_parameters(parameters, DummySource(), torch.float32, CPU, lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_parts_are_cut_joined_and_padded():
    class Numbers:
        def check(self, parts):
            pass

        def read(self, part, start, stop):
            return torch.arange(12.0).view(3, 4).narrow(part.dim, start, stop - start)

    parameter = (
        TensorPart("a", (3, 4), 0, ((2, 3), (0, 1)), 3),
        TensorPart("b", (3, 4)),
    )
    columns = (TensorPart("a", (3, 4), 1, ((3, 4),), 2),)
    loaded = load_parameters({"rows": parameter, "columns": columns}, Numbers(), torch.float32, CPU)
    assert loaded["rows"].tolist() == [
        [8, 9, 10, 11],
        [0, 1, 2, 3],
        [0, 0, 0, 0],
        *torch.arange(12.0).view(3, 4).tolist(),
    ]
    assert loaded["columns"].tolist() == [[3, 0], [7, 0], [11, 0]]


def file_pages_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0]) * 1024


def test_a_checkpoint_is_not_in_memory_twice_while_it_loads(tmp_path):
    size, number = 32 * 2**20, 8
    names = [f"t{each}" for each in range(number)]
    save_file(
        {name: torch.full((size // 4,), float(each)) for each, name in enumerate(names)}, tmp_path / "model.safetensors"
    )
    before, most = file_pages_bytes(), 0

    def watch(what, share):
        nonlocal most
        most = max(most, file_pages_bytes() - before)

    parameters = {name: (TensorPart(name, (size // 4,)),) for name in names}
    found = load_parameters(parameters, SafetensorsSource(tmp_path), torch.float32, CPU, watch)
    assert [found[name][0].item() for name in names] == [float(each) for each in range(number)]
    assert most < MOST_MAPPED_BYTES + 2 * size
