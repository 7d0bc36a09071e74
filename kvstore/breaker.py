"""A circuit breaker: after some failures in a row nothing is tried for a while, then one call may try.

The clock is an argument. Knows nothing of what is called. Safe for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to stop trying, and for how long."""

    failures: int = 3  # in a row, after which it opens
    open_s: float = 0.5  # for so long at first; twice as long after each trial that failed
    max_open_s: float = 15.0  # but no longer than this


class Breaker:
    """Closed: calls go through. Open: none does. Half open: one does, the trial."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._open_s = config.open_s  # how long it will be open next time
        self._open_until: float | None = None  # None: closed
        self._trial_until = 0.0  # a trial that says nothing by then is forgotten
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are being refused, or only a trial is let through."""
        return self._open_until is not None

    def allows(self) -> bool:
        """Whether to call now. Each call that was allowed is to be followed by `succeeded` or `failed`."""
        with self._lock:
            now = self._clock()
            if self._open_until is None:
                return True
            if now < max(self._open_until, self._trial_until):
                return False
            self._trial_until = now + self._config.max_open_s
            return True

    def succeeded(self) -> bool:
        """A call worked; whether that closed it."""
        with self._lock:
            was_open = self._open_until is not None
            self._failures = 0
            self._open_s = self._config.open_s
            self._open_until = None
            self._trial_until = 0.0
            return was_open

    def failed(self) -> bool:
        """A call did not work; whether that opened it, after it was closed."""
        with self._lock:
            was_open = self._open_until is not None
            self._failures += 1
            self._trial_until = 0.0
            if not was_open and self._failures < self._config.failures:
                return False
            if self._open_until is not None and self._clock() < self._open_until:
                return False  # one that was under way when it opened
            self.times_opened += 1
            self._open_until = self._clock() + self._open_s
            self._open_s = min(2 * self._open_s, self._config.max_open_s)
            return not was_open
