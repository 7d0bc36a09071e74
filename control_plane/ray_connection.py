"""Joining Ray: the cluster that RAY_ADDRESS names, or one of our own that ends with us.

Never blocks the event loop, and never waits without a bound: Ray itself retries a dead address for minutes.
Knows nothing of what runs on Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from control_plane.errors import StartError
from control_plane.local_ray import LocalRay

PROBE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
CANCEL_PATIENCE_S = 5.0


@asynccontextmanager
async def connected(num_cpus: int) -> AsyncIterator[None]:
    """Connected to Ray inside; a Ray of our own has at least num_cpus CPUs, and is ended on the way out.

    `ray_environment.prepare` comes first, before Ray is imported. Raises StartError.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        await _probe(address)
        await _join(address, f"the Ray cluster that RAY_ADDRESS={address} names")
        try:
            yield
        finally:
            ray.shutdown()
        return
    local = await LocalRay.start(max(num_cpus, os.cpu_count() or 1))
    try:
        await _join(local.address, "the Ray that was started here", CANCEL_PATIENCE_S, _node_ip_address="127.0.0.1")
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        await local.stop()


async def _probe(address: str) -> None:
    """Raises StartError where nothing listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto" or not host or not port.isdigit():
        return  # Ray says what is wrong with it
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except TimeoutError:
        reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
    except (OSError, OverflowError) as error:
        # asyncio puts the address into errors of connecting, where it is said already.
        reason = os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else str(error)
    else:
        return
    raise StartError(
        f"nothing answers at RAY_ADDRESS={address} ({reason}): correct it, start that cluster "
        "(`ray start --head`), or unset RAY_ADDRESS for a Ray of this server's own"
    )


async def _join(address: str, what: str, patience_s: float = 0.0, **options: Any) -> None:
    """ray.init in a thread of its own: it cannot be interrupted, so nobody may have to wait for it for long.

    patience_s: when cancelled, how long it may take to come to its end.
    """
    loop = asyncio.get_running_loop()
    joined: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if joined.done():
            return
        if error is None:
            joined.set_result(None)
        else:
            joined.set_exception(error)

    def join() -> None:
        error = None
        try:
            # Its warning that it leaves SIGTERM to us is no news.
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    thread = threading.Thread(target=join, name="ray-init", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await joined
    except asyncio.CancelledError:
        # Ray aborts this process if its own processes end while it joins them.
        await asyncio.to_thread(thread.join, patience_s)
        if ray.is_initialized():
            ray.shutdown()
        raise
    except TimeoutError:
        raise StartError(f"{what} has not answered within {CONNECT_TIMEOUT_S:g} s: is it whole? `ray status`") from None
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StartError(f"{what} cannot be joined: {first}") from error
