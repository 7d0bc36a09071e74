"""Ctrl-C and SIGTERM at awkward moments: during imports, and while a process is being started.

Imports next to nothing, for it comes before the heavy imports. Knows nothing of what it guards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ctrl-C inside ends the process with code 130, no traceback and no cleaning up: for imports."""
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside are dealt with on the way out: for steps that must be done wholly."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)
