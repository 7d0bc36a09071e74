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
CLOSE_TIMEOUT_S = 15.0  # taking an instance down; what has not gone by then is left to the cluster


class InstanceHost(Protocol):
    """What takes instances: the front end."""

    @property
    def needs_instance(self) -> bool:
        """Whether there is work for an instance, or may be; when a lost one was not replaced, there will be none."""

    def attach(self, instance: Instance) -> Awaitable[None]:
        """Use the instance from now on; the awaitable ends when it is lost."""


class Supervisor:
    """One instance at a time. A lost one is never used again: the next one is new, under the same name."""

    def __init__(self, start: Callable[[], Awaitable[Instance]], host: InstanceHost) -> None:
        """`start` makes a ready instance."""
        self._start = start
        self._host = host
        self._instance: Instance | None = None  # the latest, until it is taken down
        self._pause_s = 0.0  # before the next attempt; 0 until the first has succeeded

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Keep an instance attached until cancelled; `started` is told each time that there is one.

        However this ends, the instance stays as it is, so that its requests can finish: close() comes last.
        Raises what the first start raised: a server that never worked should end and say so. Later failures are
        logged and tried again, with growing pauses. While the host drains and nobody waits for an instance, a lost
        one is not replaced.
        """
        while self._host.needs_instance:
            if await self._try_start():
                await self._attach(started)
        await asyncio.get_running_loop().create_future()  # nothing is left to do but to be cancelled

    async def close(self) -> None:
        """Take the instance down, if there is one. Never raises, takes CLOSE_TIMEOUT_S at most. Idempotent."""
        instance, self._instance = self._instance, None
        if instance is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await instance.close()
        except TimeoutError:
            logger.error("%s could not be taken down within %g s", instance.name, CLOSE_TIMEOUT_S)
        except Exception:
            logger.exception("what was left of %s could not be taken down", instance.name)

    async def _try_start(self) -> bool:
        """Whether there is an instance now; after a failure there is a pause first."""
        try:
            self._instance = await self._start()
        except Exception:
            if not self._pause_s:
                raise
            logger.exception("the instance could not be started again; next attempt in %g s", self._pause_s)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return False
        self._pause_s = FIRST_PAUSE_S
        return True

    async def _attach(self, started: Callable[[], None]) -> None:
        """Until it is lost."""
        assert self._instance is not None
        lost = self._host.attach(self._instance)
        started()
        await lost
        logger.warning("%s is lost", self._instance.name)
        await self.close()
