"""Which tensors of a Hugging Face checkpoint make up one rank's parameters, family by family.

Projections that read the same input are joined, so that a layer needs fewer and larger matrix products.
Knows nothing of files or tensors.
"""

from __future__ import annotations

from autosearch.specs import ModelSpec
from worker.sharding import Shard
from worker.weights import Parameter, TensorPart

EMBEDDING, FINAL_NORM, LM_HEAD = "embedding", "final_norm", "lm_head"
# Their names in the checkpoint; a tied model may carry both.
EMBEDDING_TENSOR, LM_HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"


def model_parameters(spec: ModelSpec, shard: Shard, tied: bool) -> dict[str, Parameter]:
    """All parameters of one rank. `tied`: the embedding serves as lm_head too."""
    hidden = spec.hidden_size
    parameters: dict[str, Parameter] = {
        EMBEDDING: (_vocab_rows(EMBEDDING_TENSOR, spec, shard),),
        FINAL_NORM: (TensorPart("model.norm.weight", (hidden,)),),
    }
    if not tied:
        parameters[LM_HEAD] = (_vocab_rows(LM_HEAD_TENSOR, spec, shard),)
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        parameters[ours + "attn_norm"] = (TensorPart(theirs + "input_layernorm.weight", (hidden,)),)
        parameters[ours + "ffn_norm"] = (TensorPart(theirs + "post_attention_layernorm.weight", (hidden,)),)
        parameters |= _attention(spec, shard, ours, theirs + "self_attn.")
        if spec.num_experts:
            parameters |= _experts(spec, shard, ours, theirs + "block_sparse_moe.")
        else:
            parameters |= _dense_ffn(spec, shard, ours, theirs + "mlp.")
    return parameters


def _vocab_rows(name: str, spec: ModelSpec, shard: Shard) -> TensorPart:
    return TensorPart(name, (spec.vocab_size, spec.hidden_size), 0, (shard.vocab,), shard.vocab_size)


def _attention(spec: ModelSpec, shard: Shard, ours: str, theirs: str) -> dict[str, Parameter]:
    head_dim, hidden = spec.head_dim, spec.hidden_size
    query = ((shard.heads[0] * head_dim, shard.heads[1] * head_dim),)
    key_value = tuple((head * head_dim, (head + 1) * head_dim) for head in shard.kv_heads)
    cuts: list[tuple[str, int, tuple[tuple[int, int], ...]]] = [
        ("q_proj", spec.num_heads, query),
        ("k_proj", spec.num_kv_heads, key_value),
        ("v_proj", spec.num_kv_heads, key_value),
    ]
    parameters: dict[str, Parameter] = {
        ours + "qkv": tuple(
            TensorPart(f"{theirs}{name}.weight", (heads * head_dim, hidden), 0, ranges) for name, heads, ranges in cuts
        ),
        ours + "o": (TensorPart(theirs + "o_proj.weight", (hidden, spec.num_heads * head_dim), 1, query),),
    }
    if spec.qkv_bias:
        parameters[ours + "qkv_bias"] = tuple(
            TensorPart(f"{theirs}{name}.bias", (heads * head_dim,), 0, ranges) for name, heads, ranges in cuts
        )
    if spec.o_bias:
        parameters[ours + "o_bias"] = (_once(theirs + "o_proj.bias", hidden, shard),)
    return parameters


def _dense_ffn(spec: ModelSpec, shard: Shard, ours: str, theirs: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {
        ours + "gate_up": tuple(_ffn_rows(f"{theirs}{name}.weight", spec, shard) for name in ("gate_proj", "up_proj")),
        ours + "down": (_ffn_columns(theirs + "down_proj.weight", spec, shard),),
    }
    if spec.mlp_bias:
        parameters[ours + "gate_up_bias"] = tuple(
            TensorPart(
                f"{theirs}{name}.bias", (spec.intermediate_size,), 0, (shard.intermediate,), shard.intermediate_size
            )
            for name in ("gate_proj", "up_proj")
        )
        parameters[ours + "down_bias"] = (_once(theirs + "down_proj.bias", spec.hidden_size, shard),)
    return parameters


def _experts(spec: ModelSpec, shard: Shard, ours: str, theirs: str) -> dict[str, Parameter]:
    """Experts behind one another: gate and up are w1 and w3, down is w2. The router is whole on every rank."""
    experts = [f"{theirs}experts.{number}." for number in range(spec.num_experts)]
    return {
        ours + "router": (TensorPart(theirs + "gate.weight", (spec.num_experts, spec.hidden_size)),),
        ours + "gate_up": tuple(
            _ffn_rows(f"{expert}{name}.weight", spec, shard) for expert in experts for name in ("w1", "w3")
        ),
        ours + "down": tuple(_ffn_columns(expert + "w2.weight", spec, shard) for expert in experts),
    }


def _ffn_rows(name: str, spec: ModelSpec, shard: Shard) -> TensorPart:
    shape = (spec.intermediate_size, spec.hidden_size)
    return TensorPart(name, shape, 0, (shard.intermediate,), shard.intermediate_size)


def _ffn_columns(name: str, spec: ModelSpec, shard: Shard) -> TensorPart:
    shape = (spec.hidden_size, spec.intermediate_size)
    return TensorPart(name, shape, 1, (shard.intermediate,), shard.intermediate_size)


def _once(name: str, width: int, shard: Shard) -> TensorPart:
    """What the ranks' sum must hold once: zeros but on the first rank."""
    return TensorPart(name, (width,), 0, ((0, width if shard.first else 0),), width)
