"""Turns a GGUF file of a LLaMA model into a Hugging Face folder that can be served.

Quantised tensors are dequantised once; the folder holds plain safetensors. The folder appears whole or not at all.
Tokenizers are rebuilt from what the file says; kinds that cannot be rebuilt exactly are refused.
Knows nothing of how a model is run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from worker.weights import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TENSORS["output.weight"] = "lm_head.weight"
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types, as ggml numbers them


class ConversionError(ValueError):
    """The GGUF file cannot be converted; the message says why."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The key-value part of a GGUF file."""

    fields: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConversionError(f"the GGUF file lacks {key}")
        return value


def convert_gguf(
    gguf_file: str | Path,
    folder: str | Path,
    dtype: str = "float32",
    *,
    replace: bool = False,
    progress: Progress = lambda what, share: None,
) -> None:
    """Write `folder` with config.json, model.safetensors, tokenizer and generation_config.

    Raises ConversionError, also where the folder exists and `replace` is not set.
    """
    source, target = Path(gguf_file), Path(folder)
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if target.exists() and not replace:
        raise ConversionError(f"{target} already exists: remove it, or name another folder")
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ConversionError(f"{source} cannot be read as GGUF: {error}") from None
    metadata = _Metadata(reader.fields)
    config = _config(metadata, reader.tensors, dtype)
    tokenizer = _tokenizer(metadata)
    try:
        _write_folder(target, _Content(config, tokenizer, metadata, reader.tensors), DTYPES[dtype], progress)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk is to safetensors
        reason = getattr(error, "strerror", None) or error
        raise ConversionError(f"{target} cannot be written: {reason}") from None


@dataclass(frozen=True, slots=True)
class _Content:
    """All that goes into the folder."""

    config: Mapping[str, Any]
    tokenizer: Tokenizer
    metadata: _Metadata
    tensors: list[Any]


def _write_folder(target: Path, content: _Content, dtype: torch.dtype, progress: Progress) -> None:
    """Write the folder beside its place, then move it there whole. Raises OSError or SafetensorError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tensors = _read_tensors(content.tensors, content.config, dtype, progress)
        progress("writing safetensors", 1.0)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        _write_text(partial / "tokenizer.json", content.tokenizer.to_str(pretty=True))
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(content.metadata))
        _write_json(partial / "generation_config.json", _token_ids(content.metadata))
        _write_json(partial / "config.json", content.config)
        (partial / "model.safetensors").chmod(0o644)
        partial.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _config(metadata: _Metadata, tensors: list[Any], dtype: str) -> dict[str, Any]:
    architecture = metadata.need("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"GGUF architecture {architecture!r} is not supported: only 'llama' is")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    names = {tensor.name for tensor in tensors}
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ConversionError("GGUF files with scaled rope are not supported: convert the original model instead")
    if metadata.get("llama.expert_count", 0):
        raise ConversionError("GGUF files with experts are not supported: convert the original model instead")
    heads = metadata.need("llama.attention.head_count")
    hidden = metadata.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.need("llama.feed_forward_length"),
        "num_hidden_layers": metadata.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": metadata.need("llama.context_length"),
        "rms_norm_eps": _shortest(metadata.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "vocab_size": len(metadata.need("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **_token_ids(metadata),
    }


def _shortest(value: float) -> float:
    """GGUF keeps fp32; 9.99999975e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _token_ids(metadata: _Metadata) -> dict[str, Any]:
    """Special token ids, as config.json and generation_config.json name them. All end-of-turn ids end an output."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(int(end) for end in ends if end is not None))
    special = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in special.items() if value is not None}


def _read_tensors(
    tensors: list[Any], config: Mapping[str, Any], dtype: torch.dtype, progress: Progress
) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = {}
    for number, tensor in enumerate(tensors):
        name = _tensor_name(tensor.name)
        values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = _in_halves(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _in_halves(values, config["num_key_value_heads"])
        converted[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
        progress("dequantising tensors", (number + 1) / len(tensors))
    return converted


def _tensor_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and kind in _LAYER_TENSORS:
        return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}"
    raise ConversionError(f"the GGUF file has a tensor {name!r} that a LLaMA model does not have")


def _in_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Q and K rows of a head from rotation pairs side by side (GGUF) to pairs half a head apart (Hugging Face)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    """A byte-level BPE tokenizer from the file's vocabulary and merges."""
    kind, splitting = metadata.need("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or splitting not in ("smollm", "gpt-2"):
        raise ConversionError(f"tokenizer {kind!r} / {splitting!r} is not supported: only gpt2 with smollm or gpt-2 is")
    tokens = metadata.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    # smollm splits off every digit before the usual words.
    digits = [pre_tokenizers.Digits(individual_digits=True)] if splitting == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False) for i, t in enumerate(types) if t == wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        number = metadata.need("tokenizer.ggml.bos_token_id")
        bos = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return tokenizer


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.need("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if number is not None:
            config[f"{ours}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}
