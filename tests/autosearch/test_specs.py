"""ModelSpec against the meaning that transformers gives to a config.json."""

import json

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen2Config

from autosearch.specs import ModelSpec, RopeSpec, UnsupportedModelError

CONFIG_CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mixtral": MixtralConfig}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mixtral": "MixtralForCausalLM"}


def minimal(family="llama", **changes):
    """The shapes, which have no defaults."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 101,
        "max_position_embeddings": 256,
    }
    if family == "mixtral":
        config["num_local_experts"] = 4
    return {**config, **changes}


@pytest.mark.parametrize("family", CONFIG_CLASSES)
@pytest.mark.parametrize("absent", [(), ("num_key_value_heads",)])
def test_an_absent_key_means_what_it_means_in_transformers(family, absent):
    config = minimal(family, num_attention_heads=32)
    for name in absent:
        del config[name]
    spec, theirs = ModelSpec.from_config(config), CONFIG_CLASSES[family].from_dict(dict(config))
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.rope == RopeSpec(theta=theirs.rope_parameters["rope_theta"])
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert spec.bos_token_id == theirs.bos_token_id
    assert spec.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    if family == "mixtral":
        assert spec.experts_per_token == theirs.num_experts_per_tok


@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_what_transformers_writes_is_read(family, tmp_path):
    theirs = CONFIG_CLASSES[family](**minimal(family, rms_norm_eps=3e-5, rope_theta=777.0, tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    assert (spec.norm_eps, spec.rope, spec.tie_embeddings) == (3e-5, RopeSpec(theta=777.0), True)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 8)
    assert (spec.vocab_size, spec.num_layers, spec.max_position) == (101, 3, 256)


def test_biases_are_where_each_family_has_them():
    flags = {"attention_bias": True, "mlp_bias": True}
    llama = ModelSpec.from_config(minimal("llama", **flags))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = ModelSpec.from_config(minimal("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    mixtral = ModelSpec.from_config(minimal("mixtral", **flags))
    assert (mixtral.qkv_bias, mixtral.o_bias, mixtral.mlp_bias) == (False, False, False)


def test_a_qwens_window_layers_that_are_no_number_are_refused():
    config = minimal("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers="all")
    with pytest.raises(UnsupportedModelError, match="max_window_layers must be a positive whole number"):
        ModelSpec.from_config(config)


def test_null_and_both_spellings():
    spec = ModelSpec.from_config(minimal(head_dim=None, eos_token_id=None, bos_token_id=None, num_key_value_heads=None))
    assert (spec.head_dim, spec.eos_token_ids, spec.bos_token_id, spec.num_kv_heads) == (8, (), None, 8)
    assert ModelSpec.from_config(minimal(head_dim=20)).head_dim == 20
    assert ModelSpec.from_config(minimal(eos_token_id=[5, 7])).eos_token_ids == (5, 7)
    renamed = minimal("mixtral", num_experts=6)
    del renamed["num_local_experts"]
    assert ModelSpec.from_config(renamed).num_experts == 6
    by_model_type = minimal("qwen2")
    del by_model_type["architectures"]
    assert ModelSpec.from_config(by_model_type).architecture == "qwen2"


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "yarn"}},
    ],
)
def test_every_spelling_of_rope(spelling):
    assert ModelSpec.from_config(minimal(**spelling)).rope == RopeSpec(theta=500.0, kind="linear", factor=2.0)


def test_the_original_context_defaults_to_the_context():
    rope = ModelSpec.from_config(minimal(rope_scaling={"type": "yarn", "factor": 4.0})).rope
    assert rope.original_max_position == 256
    assert rope.beta_fast == 32.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim"),
        ({"head_dim": 7}, "odd"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "yarn"}, "JSON object"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "more than 1"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures"),
        ({"architectures": None, "model_type": ["llama"]}, "model_type"),
        ({"sliding_window": "wide"}, "sliding_window must be"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"eos_token_id": -1}, "eos_token_id -1 is below zero"),
        ({"eos_token_id": [5, -2]}, "eos_token_id"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2.0}},
            "high_freq_factor 2 must be more than low_freq_factor 2",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        ModelSpec.from_config(minimal(**changes))


def test_sliding_windows_are_refused_where_they_would_count():
    def spec(family, **changes):
        return ModelSpec.from_config(minimal(family, **changes))

    spec("mixtral", sliding_window=None)
    spec("mixtral", sliding_window=256)  # as long as the context: full attention
    spec("qwen2", sliding_window=64, use_sliding_window=False)
    spec("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3)  # of three layers none slides
    for family, changes in (
        ("mixtral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ):
        with pytest.raises(UnsupportedModelError, match="sliding_window 64"):
            spec(family, sliding_window=64, **changes)


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok 5"):
        ModelSpec.from_config(minimal("mixtral", num_experts_per_tok=5))


def test_folders_without_a_usable_config_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="JSON"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UnsupportedModelError, match="object"):
        ModelSpec.from_folder(tmp_path)
