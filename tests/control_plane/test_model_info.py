"""What generation_config.json adds to config.json."""

from __future__ import annotations

import json

import pytest

from autosearch.specs import ModelSpec, UnsupportedModelError
from control_plane.model_info import ModelInfo, SamplingDefaults

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
SPEC = ModelSpec.from_config(CONFIG)


def write(folder, generation_config):
    (folder / "generation_config.json").write_text(json.dumps(generation_config))


def test_without_the_file_defaults_are_plain(tmp_path):
    info = ModelInfo.from_folder(tmp_path, SPEC)
    assert (info.name, info.eos_token_ids, info.vocab_size) == (tmp_path.name, (2,), 100)
    assert info.sampling_defaults == SamplingDefaults(1.0, 0, 1.0)


def test_eos_ids_are_united_and_sampling_is_taken_over(tmp_path):
    settings = {"eos_token_id": [2, 7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": False}
    write(tmp_path, settings)
    info = ModelInfo.from_folder(tmp_path, SPEC, name="served")
    assert (info.name, info.eos_token_ids) == ("served", (2, 7, 9))
    assert info.sampling_defaults == SamplingDefaults(0.6, 20, 0.9)
    plain = ModelInfo.from_folder(tmp_path, SPEC, use_generation_config=False)
    assert plain.sampling_defaults == SamplingDefaults()
    assert plain.eos_token_ids == (2, 7, 9)
    write(tmp_path, {"eos_token_id": 7, "temperature": None})
    assert ModelInfo.from_folder(tmp_path, SPEC).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"eos_token_id": 100},
        {"eos_token_id": "x"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": "x"},
        {"top_p": True},
    ],
)
def test_a_broken_file_stops_the_start_and_is_named(tmp_path, broken):
    write(tmp_path, broken)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json"):
        ModelInfo.from_folder(tmp_path, SPEC)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json"):
        ModelInfo.from_folder(tmp_path, SPEC)
