"""What several of these tests serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random LLaMA of 101 tokens."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=4, vocab_size=101, max_position_embeddings=256)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
