"""Chooses the next tokens from logits: greedy, temperature, top-k and top-p, mixed in one batch.

A row's choice depends on its own logits, parameters, seed and position only: not on its neighbours, on the slot or
on how often the request was preempted. With tensor parallelism every rank samples the same gathered logits and so
gets the same ids. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MIN_TEMPERATURE = 1e-9  # lower ones than this count as this
# Nuclei are almost always narrower than this; only rows with a wider one are sorted in full.
NARROW_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters per row."""

    temperature: NDArray[np.float64]  # [rows] 0: greedy
    top_k: NDArray[np.int64]  # [rows] 0 or less: all tokens
    top_p: NDArray[np.float64]  # [rows] in (0, 1]
    seed: NDArray[np.uint64]  # [rows]
    position: NDArray[np.int64]  # [rows] of the token to be sampled in its sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen ids; those of faulty rows are within the vocabulary but mean nothing."""

    token_ids: torch.Tensor  # [rows] int64
    faulty: NDArray[np.bool_]  # [rows] some logit was not finite


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """One token per row of logits [rows, vocab]. Greedy ties go to the lowest id."""
    lowest, highest = torch.aminmax(logits, dim=-1)
    finite = torch.isfinite(lowest) & torch.isfinite(highest)
    token_ids = logits.argmax(dim=-1)
    # The most likely token alone is the greedy choice, noise or not.
    random = torch.from_numpy((rows.temperature > 0) & (rows.top_k != 1)) & finite.cpu()
    chosen = random.nonzero()[:, 0].numpy()
    if len(chosen):
        part = SamplingRows(*(getattr(rows, name)[chosen] for name in SamplingRows.__slots__))
        noise = uniform(part.seed, part.position)
        token_ids[chosen] = draw(logits[chosen].float(), part.temperature, part.top_k, part.top_p, noise)
    return Sampled(token_ids, ~finite.cpu().numpy())


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counter-based noise in [0, 1) from (seed, position): no state, so a repeated step repeats its draw.

    Two rounds of the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014); 53 bits.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) + position.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def draw(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    noise: NDArray[np.float64],
) -> torch.Tensor:
    """Invert each row's cumulative distribution, over the kept tokens in order of their ids, at its noise in [0, 1).

    logits [rows, vocab], finite; parameters [rows] as in SamplingRows; the ids are [rows] int64.
    """
    device = logits.device
    divisor = torch.from_numpy(temperature.clip(MIN_TEMPERATURE)).to(device)[:, None]
    # In fp64, where no temperature between the limits can overflow or flatten the logits.
    scores = (logits.double() - logits.amax(dim=-1, keepdim=True)) / divisor
    weights = scores.exp_()
    restricted = (top_p < 1) | ((top_k > 0) & (top_k < logits.shape[1]))
    if restricted.any():
        index = torch.from_numpy(np.flatnonzero(restricted)).to(device)
        weights[index] *= _kept(logits[index], weights[index], top_k[restricted], top_p[restricted])
    cumulative = weights.cumsum_(dim=-1)
    # Below the total, however it is rounded, as the noise is at most 1 - 2**-53.
    target = cumulative[:, -1:] * torch.from_numpy(noise).to(device)[:, None]
    # The first token whose cumulative weight is above it, and so never one without weight.
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _kept(
    logits: torch.Tensor, weights: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> torch.Tensor:
    """Which tokens top-k and then top-p keep: [rows, vocab] of bool. Of equal logits the lower ids are kept."""
    vocab_size = logits.shape[1]
    most = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    limit = torch.from_numpy(most).to(logits.device)[:, None]
    share = torch.from_numpy(top_p).to(logits.device)[:, None]
    for width in (min(NARROW_WIDTH, vocab_size), vocab_size):
        ranked, ids = logits.topk(width, dim=-1)
        ranked_weights = weights.gather(-1, ids)
        within = torch.arange(width, device=logits.device) < limit
        cumulative = (ranked_weights * within).cumsum(dim=-1)
        total = torch.where(limit < vocab_size, cumulative[:, -1:], weights.sum(dim=-1, keepdim=True))
        # Tokens before the one with which the share is reached, and that one.
        nucleus = (cumulative < share * total).sum(dim=-1, keepdim=True) + 1
        count = torch.minimum(torch.where(share < 1, nucleus, limit), limit)
        if width == vocab_size or bool(((limit <= width) | ((limit == vocab_size) & (count <= width))).all()):
            break
    threshold = ranked.gather(-1, (count - 1).clamp(max=width - 1))
    above, equal = logits > threshold, logits == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
