"""Rope in every spelling of config.json, against transformers."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from autosearch.specs import ModelSpec
from worker.models.rope import attention_scaling, cos_sin_tables, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SPELLINGS = {
    "none": {},
    "theta": {"rope_theta": 500000.0},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear, type": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 700.0},
    "linear, rope_type": {"rope_scaling": {"rope_type": "linear", "factor": 4}, "rope_theta": 700.0},
    "linear, parameters": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500000.0},
    "llama3, type": {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 300.0},
    "llama3, parameters": {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "rope_theta": 500000.0}},
    "yarn, no original": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1000.0},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn, parameters": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        }
    },
    "yarn, original beside": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
    "yarn, attention factor": {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.8}},
    "yarn, mscale": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        }
    },
    "yarn, equal mscales": {
        "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "yarn, betas, no truncation": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
        }
    },
    "yarn, factor null": {
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    },
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", LlamaConfig, LlamaRotaryEmbedding),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config, Qwen2RotaryEmbedding),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_cosines_and_sines_are_those_of_transformers(family, spelling):
    architecture, config_class, rotary_class = FAMILIES[family]
    config = {
        "architectures": [architecture],
        "model_type": family,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        **SPELLINGS[spelling],
    }
    rotary = rotary_class(config_class.from_dict(config))
    rope = ModelSpec.from_config(config).rope
    torch.testing.assert_close(inverse_frequencies(rope, 32), rotary.inv_freq, atol=0, rtol=1e-6)
    assert attention_scaling(rope) == pytest.approx(rotary.attention_scaling)
    cos, sin = cos_sin_tables(rope, 32, 256)
    their_cos, their_sin = rotary(torch.zeros(1), torch.arange(256)[None])
    torch.testing.assert_close(cos, their_cos[0, :, :16], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, their_sin[0, :, :16], atol=1e-5, rtol=0)
