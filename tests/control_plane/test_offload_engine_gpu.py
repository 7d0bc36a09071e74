"""On a GPU: a conversation of 4,096 tokens that returns from the store's CPU tier, beside computing it again."""

from __future__ import annotations

import json

import pytest
import torch

from control_plane.bench.offload_engine import run
from control_plane.bench.offload_options import EngineOptions
from control_plane.config import EngineConfig

pytestmark = pytest.mark.gpu

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.timeout(600)
def test_a_long_conversation_returns_three_times_as_fast(tmp_path):
    """The issue's bound, by the medians."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    engine = EngineConfig(model=tmp_path, device="cuda", load_format="dummy", max_model_len=8192, max_num_seqs=64)
    options = EngineOptions(repeats=0, return_len=4096, return_repeats=5, cpu_bytes=8 << 30)
    rows = {row["label"]: row for row in run(engine, options)["returns"]}
    assert rows["store, CPU"]["cached_tokens"] >= 4096
    assert rows["store, CPU"]["times_faster"] >= 3.0
