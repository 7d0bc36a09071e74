"""How long an iteration of an instance may take before the instance counts as stalled.

Pure; knows nothing of clocks or of what follows from a stall.
"""

from __future__ import annotations

import math

FACTOR = 5.0  # longer contexts and busy machines make iterations slower than those seen so far
SHORTEST_S = 3.0
MEMORY = 0.999  # how much of the slowest iteration is still believed after one more


class StepPace:
    """What the iterations so far tell of the next one, which may be a full batch of prefill."""

    def __init__(self, batch_tokens: int, longest_s: float) -> None:
        """batch_tokens: B_dense. longest_s: allowed to an iteration of which nothing is known, and at most."""
        self._batch_tokens = batch_tokens
        self._longest_s = longest_s
        self._full_s = math.inf  # a full iteration takes about this at most
        self._slowest_s = 0.0

    def note(self, num_tokens: int, run_s: float) -> None:
        """An iteration of num_tokens rows, at least one, took run_s.

        A full one takes at most as many times as long as it has more rows: weights are read once, however many.
        """
        self._slowest_s = max(MEMORY * self._slowest_s, run_s)
        self._full_s = min(self._full_s, run_s * self._batch_tokens / num_tokens)

    @property
    def allowed_s(self) -> float:
        """A few times what the next iteration is expected to take at most."""
        return min(max(FACTOR * self._slowest_s, FACTOR * self._full_s, SHORTEST_S), self._longest_s)
