"""Counters by name, all known from the start, so that a metric exists before its first event. Safe for threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Counters:
    """Numbers that only grow."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count. The name must be one that was declared."""
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All of them, at one moment."""
        with self._lock:
            return dict(self._values)
