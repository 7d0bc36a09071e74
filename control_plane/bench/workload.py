"""The work of the throughput benchmarks, fixed so that figures of different days and engines can stand side by side.

Prompts of random token ids, greedy, end-of-sequence ids ignored. Knows nothing of engines or of how they are timed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from scheduler.request import NewRequest, SamplingParams

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 29_999  # prompts are drawn from these, or from what the vocabulary has of them
STEADY = (0.3, 0.7)  # the steady middle, as shares of the run's time


def draw_requests(lengths: Iterable[tuple[int, int]], vocab_size: int) -> list[NewRequest]:
    """A request for each (prompt, output) length in tokens; the same for the same arguments."""
    draw = random.Random(0)
    first, last = min(FIRST_TOKEN_ID, vocab_size - 1), min(LAST_TOKEN_ID, vocab_size - 1)
    return [
        NewRequest(
            f"request-{number}",
            tuple(draw.randint(first, last) for _ in range(prompt_len)),
            SamplingParams(max_tokens=output_len, temperature=0.0),
        )
        for number, (prompt_len, output_len) in enumerate(lengths)
    ]
