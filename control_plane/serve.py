"""`nanoflow serve`: one front end with gRPC and metrics over one instance on Ray, until a signal.

Puts the parts together and takes them apart again; each part's work is its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from autosearch.pipeline import PipelineSchedule
from control_plane.cluster import InstanceConfig, RayInstance, start_instance
from control_plane.config import EngineConfig, OwnStoreConfig, ServerConfig
from control_plane.engine import check_device, device_of, model_info, scheduler_config, worker_config
from control_plane.exit_watchdog import exit_within
from control_plane.frontend import Frontend
from control_plane.grpc_admin import ServerInfo
from control_plane.grpc_server import GrpcConfig, GrpcServer
from control_plane.intake import Intake
from control_plane.metrics import Metrics
from control_plane.node_store import NodeStore, ray_store
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from control_plane.ray_connection import connected
from control_plane.release import release
from control_plane.supervisor import Supervisor
from control_plane.validation import Limits
from worker.backend import check

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 30.0  # after the drain, for taking everything down


async def run(
    engine: EngineConfig, server: ServerConfig, limits: Limits, own_store: OwnStoreConfig | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, drain, end; the exit code. A second signal ends the process at once.

    When requests are taken, one line on stdout says so: `ready: gRPC HOST:PORT, metrics URL`. Raises what a user
    can mend: broken models, capacities that do not fit, ports that are taken.
    """
    stop = asyncio.Event()
    _stop_on_signals(stop)
    store = None if own_store is None else store_of(engine, own_store)
    if store is not None:
        engine = replace(engine, kv_store=store.address)
    if not os.environ.get("RAY_ADDRESS"):
        check_device(engine)
    intake = Intake.from_folder(engine.model, model_info(engine, server.served_model_name), limits)
    config = instance_config(engine, limits)
    bounds = check(config.worker)  # refuses what cannot run, before anything is started
    async with AsyncExitStack() as stack:
        await intake.start()
        metrics = Metrics(intake.model.name, bounds.max_model_len, bounds.max_batch_tokens)
        frontend = Frontend(intake, metrics)
        stack.push_async_callback(frontend.close)
        metrics_server = metrics.listen(server.host, server.metrics_port)
        stack.callback(metrics_server.close)
        show = ProgressLine()
        show("starting Ray")
        joining = stack.enter_async_context(connected(len(config.bundles)))
        if not await _unless(stop, joining):
            show.done()
            return 0
        _stop_on_signals(stop)  # again: Ray has put its own handler of SIGTERM in place
        if store is not None:
            stack.push_async_callback(store.close)
        info = ServerInfo(release(), engine.tensor_parallel_size, engine.schedules)
        grpc_server = GrpcServer(frontend, info, grpc_config(server))
        port = await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, 1.0)

        def started() -> None:
            show.done()
            url = f"http://{server.host}:{metrics_server.port}/metrics"
            print(f"ready: gRPC {server.host}:{port}, metrics {url}", flush=True)

        async def start() -> RayInstance:
            now = with_schedules(config, frontend.schedules.serving)
            return await start_instance("instance-0", now, show, None if store is None else store.place)

        supervisor = Supervisor(start, frontend)
        stack.push_async_callback(supervisor.close)
        supervising = asyncio.create_task(supervisor.run(started))
        stack.push_async_callback(_cancel, supervising)
        stack.callback(exit_within, EXIT_TIMEOUT_S)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([supervising, stopping], return_when=asyncio.FIRST_COMPLETED)
        if supervising.done() and not frontend.instances.ever_attached:
            supervising.result()  # the first start failed: raises
        drained = await frontend.drain(server.shutdown_timeout)
        await grpc_server.stop(1.0)
        if supervising.done():  # it never ends by itself
            log.critical("stopped, for nobody looks after the instance any more: %r", supervising.exception())
            return 1
        return 0 if drained else 1


def store_of(engine: EngineConfig, own: OwnStoreConfig) -> NodeStore | None:
    """The KV store that the server is to start, if any. Raises ConfigError."""
    if own.kv_store_cpu_bytes is None:
        return None
    if engine.kv_store is not None:
        raise ConfigError(
            "kv-store and kv-store-cpu-bytes are both given: use the store that runs, or have one started"
        )
    return ray_store(own, beside_gpu=device_of(engine) == "cuda")


def instance_config(engine: EngineConfig, limits: Limits) -> InstanceConfig:
    """What an instance of these options is.

    Its scheduler lets more requests wait than the front end: new ones reach it before the cancels of those that made
    room for them, and after a loss those that ran wait again.
    """
    worker = worker_config(engine)
    return InstanceConfig(
        worker=worker,
        scheduler=scheduler_config(engine, 2 * limits.max_num_queued_reqs + worker.max_slots),
        step_timeout_s=engine.step_timeout,
    )


def with_schedules(config: InstanceConfig, schedules: tuple[PipelineSchedule, ...] | None) -> InstanceConfig:
    """What an instance is that takes the place of one whose schedules were exchanged for these; None: they were not.

    It has room for as many as the first one.
    """
    if schedules is None:
        return config
    room = config.worker.schedule_room
    return replace(config, worker=replace(config.worker, schedules=schedules, nano_batches=1, max_schedules=room))


def grpc_config(server: ServerConfig) -> GrpcConfig:
    """The server's options as gRPC needs them."""
    return GrpcConfig(
        host=server.host,
        port=server.port,
        api_keys=(server.api_key,) if server.api_key else (),
        admin_keys=(server.admin_api_key,) if server.admin_api_key else (),
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        reflection=server.grpc_reflection,
        max_connection_age_s=server.max_connection_age,
        max_connection_age_grace_s=server.max_connection_age_grace,
    )


def _stop_on_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # the second one: at once
        log.info("stopping; once more ends at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Whether the work came to its end before `stop` was set, which cancels it. Raises what the work raises."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    await _cancel(working)
    return False


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
