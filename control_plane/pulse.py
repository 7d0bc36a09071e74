"""Telling a remote process that is stopped or hangs from one that is only busy: the latter still answers.

Knows nothing of processes or Ray, only of awaitables.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
SLICE_S = 0.5


async def first_done(futures: Iterable[asyncio.Future[T]], timeout_s: float) -> set[asyncio.Future[T]]:
    """Those that are done, once any is; none after timeout_s.

    Waits in slices: while this process itself does not run (stopped, or starved of CPU), no more than one of them
    passes, so its own pause is not taken for others' silence.
    """
    waiting = list(futures)
    for _ in range(math.ceil(timeout_s / SLICE_S)):
        done, _ = await asyncio.wait(waiting, timeout=SLICE_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return done
    return set()


async def until_silent(ask: Callable[[], Awaitable[object]], period_s: float, silence_s: float) -> None:
    """Ask every period_s; returns when an answer takes longer than silence_s. Raises what ask() raises."""
    while True:
        answer = asyncio.ensure_future(ask())
        try:
            if not await first_done([answer], silence_s):
                return
            answer.result()
        finally:
            answer.cancel()
        await asyncio.sleep(period_s)
