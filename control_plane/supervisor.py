"""Keeps one engine instance alive: starts it, gives it to the front end, and replaces it when it is lost.

Knows nothing of how an instance is started or of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from control_plane.instance import Instance

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # before the second attempt in a row; each one more waits twice as long
LONGEST_PAUSE_S = 30.0


class InstanceHost(Protocol):
    """What takes instances: the front end."""

    def attach(self, instance: Instance) -> Awaitable[None]:
        """Use the instance from now on; the awaitable ends when it is lost."""


class Supervisor:
    """One instance at a time. A lost one is never used again: the next one is new, under the same name."""

    def __init__(self, start: Callable[[], Awaitable[Instance]], host: InstanceHost) -> None:
        """`start` makes a ready instance."""
        self._start = start
        self._host = host
        self._instance: Instance | None = None

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Keep an instance attached until cancelled; `started` is told each time that there is one.

        Raises what the first start raised: a server that never worked should end and say so. Later failures are
        logged and tried again, with growing pauses.
        """
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    self._instance = await self._start()
                except Exception:
                    if self._instance is None:
                        raise
                    logger.exception("the instance could not be started again; next attempt in %g s", pause_s)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    continue
                pause_s = FIRST_PAUSE_S
                lost = self._host.attach(self._instance)
                started()
                await lost
                logger.warning("%s is lost; starting another", self._instance.name)
                try:
                    await self._instance.close()
                except Exception:
                    logger.exception("what was left of %s could not be taken down", self._instance.name)
        finally:
            if self._instance is not None:
                await self._instance.close()
