"""The KV store that a server starts for its instance, on the instance's node, and keeps running until the server ends.

A store that is gone costs speed, never output: engines go on without it, and find it again on the same socket. Knows
nothing of what the store does, nor of how engines use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from control_plane.config import OwnStoreConfig
from control_plane.errors import StartError
from control_plane.store_host import STOP_TIMEOUT_S, LogLine, StoreHost, own_socket

logger = logging.getLogger(__name__)

POLL_S = 0.5
FIRST_PAUSE_S = 0.5  # before it is started again; each one more in a row waits twice as long
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # who ran that long did not end because of its start
_READY_S = 60.0  # and as long as it takes to get the memory
_BYTES_PER_S = 256 << 20  # of memory to be taken, at the slowest


class Host(Protocol):
    """A StoreHost, wherever it is."""

    async def start(self) -> None:
        """Raises StartError."""

    async def where(self) -> str:
        """As StoreHost.where(). Never raises."""

    async def ended(self) -> str | None:
        """As StoreHost.ended(); also when the host itself is gone."""

    async def said(self) -> list[LogLine]:
        """As StoreHost.said(). Never raises."""

    async def stop(self) -> None:
        """Never raises."""


class NodeStore:
    """At most one store, on the node that was named last."""

    def __init__(self, make_host: Callable[[str], Host], address: str) -> None:
        """make_host: for a node; nothing is started by it."""
        self.address = address  # for engines
        self._make_host = make_host
        self._node: str | None = None
        self._host: Host | None = None
        self._watching: asyncio.Task[None] | None = None

    async def place(self, node: str) -> None:
        """Have a store on this node; one that runs there, or is being started again, stays. Raises StartError."""
        if node == self._node:
            return
        await self.close()
        host = self._make_host(node)
        try:
            await host.start()
        except BaseException:
            await host.stop()
            raise
        logger.info("the KV store runs %s", await host.where())
        self._node, self._host = node, host
        self._watching = asyncio.create_task(self._watch(node))

    async def close(self) -> None:
        """End it. Idempotent."""
        watching, self._watching, self._node = self._watching, None, None
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        host, self._host = self._host, None
        if host is not None:
            await host.stop()

    async def _watch(self, node: str) -> None:
        """Start it again whenever it ends; what it logs is part of our log."""
        assert self._host is not None
        pause_s, started_s = FIRST_PAUSE_S, time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            how = await self._host.ended()
            _log(await self._host.said())
            if how is None:
                continue
            if time.monotonic() - started_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            logger.warning("the KV store has ended (%s); it is started again in %g s", how, pause_s)
            await self._host.stop()  # now: a killed store's memory is in use until then
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._host = self._make_host(node)
            try:
                await self._host.start()
                logger.info("the KV store runs again")
            except StartError as error:
                logger.error("%s", error)
            started_s = time.monotonic()


class RayHost:
    """A StoreHost as an actor on one node of the cluster; it ends with this server, however that ends."""

    def __init__(
        self, node: str, socket: Path, flags: list[str], ready_timeout_s: float, beside_gpu: bool = False
    ) -> None:
        self._timeout_s = ready_timeout_s + 30.0  # for the actor itself
        self._actor = _StoreHostActor.options(
            num_cpus=0, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(socket, flags, ready_timeout_s, beside_gpu)

    async def start(self) -> None:
        """Raises StartError."""
        try:
            await asyncio.wait_for(_wait(self._actor.start.remote()), self._timeout_s)
        except TimeoutError:
            raise StartError(f"the KV store did not start within {self._timeout_s:g} s") from None
        except RayError as error:
            raise StartError(_reason(error)) from None

    async def where(self) -> str:
        """Never raises."""
        with suppress(RayError):
            where: str = await _wait(self._actor.where.remote())
            return where
        return "nowhere any more"

    async def ended(self) -> str | None:
        try:
            how: str | None = await _wait(self._actor.ended.remote())
            return how
        except RayError as error:
            return _reason(error)

    async def said(self) -> list[LogLine]:
        with suppress(RayError):
            lines: list[LogLine] = await _wait(self._actor.said.remote())
            return lines
        return []

    async def stop(self) -> None:
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(_wait(self._actor.stop.remote()), STOP_TIMEOUT_S + 3.0)
        ray.kill(self._actor)


def ray_store(config: OwnStoreConfig, beside_gpu: bool) -> NodeStore:
    """A store as the options say, on whatever node of the cluster it is placed; there beside the GPU, or anywhere."""
    assert config.kv_store_cpu_bytes is not None
    socket = own_socket()
    ready_timeout_s = _READY_S + config.kv_store_cpu_bytes / _BYTES_PER_S
    flags = store_flags(config)
    return NodeStore(lambda node: RayHost(node, socket, flags, ready_timeout_s, beside_gpu), f"unix:{socket}")


def store_flags(config: OwnStoreConfig) -> list[str]:
    """The options as `nanoflow kvstore` has them."""
    flags = ["--cpu-bytes", str(config.kv_store_cpu_bytes)]
    if config.kv_store_ssd_dir is not None:
        flags += ["--ssd-dir", str(config.kv_store_ssd_dir.absolute()), "--ssd-bytes", str(config.kv_store_ssd_bytes)]
        flags += ["--ssd-after-hits", str(config.kv_store_ssd_after_hits)]
    if config.kv_store_metrics_port is not None:
        flags += ["--store-metrics-port", str(config.kv_store_metrics_port)]
    return flags


def _log(lines: list[LogLine]) -> None:
    for line in lines:
        logger.log(line.level, "KV store: %s", line.words)


def _reason(error: RayError) -> str:
    """What the host said, or that it is gone."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return str(error.cause)
    if isinstance(error, RayActorError):
        return "the process that looks after the KV store has ended"
    return str(error).strip().splitlines()[0]


def _wait(ref: Any) -> Awaitable[Any]:
    async def wait() -> Any:
        return await ref

    return wait()


_StoreHostActor = ray.remote(StoreHost)
