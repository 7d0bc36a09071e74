"""Rotary position embedding: the inverse frequencies of each kind, and tables of cosines and sines.

Kinds: default (RoFormer, arXiv 2104.09864), linear interpolation (arXiv 2306.15595), llama3 (LLaMA-3.1's
published scaling), yarn (arXiv 2309.00071, sections 3.2 and 3.4).
"""

from __future__ import annotations

import math

import torch

from autosearch.specs import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2], fp32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    assert rope.kind == "default", rope.kind  # ModelSpec refuses others
    return plain


def attention_scaling(rope: RopeSpec) -> float:
    """Factor on cosines and sines (yarn's temperature, section 3.4); 1 for the other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def cos_sin_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines per position, [num_positions, head_dim / 2] each, fp32.

    A row in halves (a, b) is rotated to (a * cos - b * sin, b * cos + a * sin).
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos() * attention_scaling(rope), angles.sin() * attention_scaling(rope)


def _llama3(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # within the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(plain: torch.Tensor, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, slow ones are stretched, a ramp between."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
