"""How many parameters a model has, from its shapes alone.

Exact in the sense of config.json: every weight matrix, bias and norm is counted. Knows nothing of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosearch.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model; `active` is what one token passes through (all of them where there are no experts)."""

    total: int
    active: int


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Exact parameter counts of a ModelSpec."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    outside = embeddings + spec.hidden_size  # the final norm
    shared = _attention(spec) + 2 * spec.hidden_size
    expert = 3 * spec.hidden_size * spec.intermediate_size
    if spec.mlp_bias:
        expert += 2 * spec.intermediate_size + spec.hidden_size
    router = spec.hidden_size * spec.num_experts
    stored = shared + router + expert * max(1, spec.num_experts)
    used = shared + router + expert * max(1, spec.experts_per_token)
    return ParameterCount(outside + spec.num_layers * stored, outside + spec.num_layers * used)


def _attention(spec: ModelSpec) -> int:
    query, key_value = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    weights = spec.hidden_size * (query + key_value) + query * spec.hidden_size
    if spec.qkv_bias:
        weights += query + key_value
    return weights + (spec.hidden_size if spec.o_bias else 0)
