"""How much may wait: requests that were accepted and have no token yet, counted together with their prompts.

Pure bookkeeping; knows nothing of what a request is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NoReturn

from control_plane.errors import OverloadedError
from control_plane.validation import Limits


class Admission:
    """What waits now."""

    def __init__(self, limits: Limits, retry_after_s: float) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._waiting: dict[Hashable, int] = {}  # prompt tokens by request
        self._num_tokens = 0

    def check(self, num_prompt_tokens: int) -> None:
        """Whether one more may wait. Raises OverloadedError. A prompt larger than the limit may wait alone."""
        if len(self._waiting) >= self._limits.max_num_queued_reqs:
            self._refuse(f"{len(self._waiting)} requests")
        if self._waiting and self._num_tokens + num_prompt_tokens > self._limits.max_num_queued_tokens:
            self._refuse(f"{self._num_tokens} prompt tokens")

    def _refuse(self, what: str) -> NoReturn:
        raise OverloadedError(f"{what} wait already: try again later", self._retry_after_s)

    def add(self, request: Hashable, num_prompt_tokens: int) -> None:
        """Idempotent."""
        if request not in self._waiting:
            self._waiting[request] = num_prompt_tokens
            self._num_tokens += num_prompt_tokens

    def remove(self, request: Hashable) -> None:
        """Idempotent."""
        self._num_tokens -= self._waiting.pop(request, 0)
