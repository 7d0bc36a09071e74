"""What two computations of one sequence may differ in: rounding, and a token where two logits nearly tie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Largest difference of a logit between two ways to compute it, in standard deviations of the logits.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.12}


def assert_same_choices(
    tokens: Sequence[int],
    logits: torch.Tensor,
    expected_tokens: Sequence[int],
    expected_logits: torch.Tensor,
    tolerance: float,
) -> None:
    """Greedy tokens and the logits [tokens, vocab] before them, up to where a near tie lets the two part."""
    parted = (i for i, (a, b) in enumerate(zip(tokens, expected_tokens)) if a != b)
    last = next(parted, len(expected_tokens) - 1)
    expected = expected_logits[: last + 1]
    allowed = tolerance * expected.std()
    assert (logits[: last + 1] - expected).abs().max() < allowed
    if tokens[last] != expected_tokens[last]:
        top = expected[last].topk(2).values
        assert top[0] - top[1] < 2 * allowed
