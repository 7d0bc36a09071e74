"""A LLaMA so small that a CPU runs whole benchmarks of it: its config.json, for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}


def save_config(folder: Path, **changes) -> None:
    """Into a folder that is there."""
    (folder / "config.json").write_text(json.dumps(_SHAPE | changes))
