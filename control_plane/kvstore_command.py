"""`nanoflow kvstore`: runs the KV store of a node until SIGTERM. Knows nothing of how the store works."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import typer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from control_plane.config import ALL_GROUPS, KVStoreOptions, LogConfig
from control_plane.exit_watchdog import exit_within
from control_plane.flags import configured
from control_plane.options import ConfigError
from kvstore.credentials import read_token
from kvstore.keys import StoreError
from kvstore.settings import KVServiceConfig, ListenConfig

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for calls under way when SIGTERM comes
_CLOSE_S = 10.0  # for copies to SSD that wait, and for the index


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command()(configured(ALL_GROUPS)(kvstore))


def kvstore(store: KVStoreOptions, log_options: LogConfig) -> None:
    """Keep KV of earlier tokens in CPU memory and on SSD, for all instances of this node, until SIGTERM."""
    logging.basicConfig(
        level=log_options.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True
    )
    try:
        code = asyncio.run(run(store_config(store), listen_config(store), store))
    except StoreError as error:
        raise ConfigError(str(error)) from None
    raise typer.Exit(code)


def store_config(options: KVStoreOptions) -> KVServiceConfig:
    """What the store keeps."""
    return KVServiceConfig(
        cpu_bytes=options.cpu_bytes,
        ssd_dir=options.ssd_dir,
        ssd_bytes=options.ssd_bytes,
        slab_bytes=options.slab_bytes,
        ssd_after_hits=options.ssd_after_hits,
        lease_s=options.store_lease,
    )


def listen_config(options: KVStoreOptions) -> ListenConfig:
    """Where it listens: on a socket unless a port was asked for. Raises StoreError."""
    token = options.store_token
    if options.store_token_file is not None:
        if token is not None:
            raise StoreError("store-token and store-token-file are both given: choose one")
        token = read_token(options.store_token_file)
    config = ListenConfig(
        host=options.store_host,
        token=token,
        ssl_keyfile=options.store_ssl_keyfile,
        ssl_certfile=options.store_ssl_certfile,
        ssl_ca_certs=options.store_ssl_ca_certs,
    )
    if options.store_port is not None:
        if options.socket is not None:
            raise StoreError("socket and store-port are both given: choose one")
        return replace(config, port=options.store_port)
    return replace(config, socket=options.socket or default_socket())


def default_socket() -> Path:
    """Where a store listens that was not told otherwise: one for each user of a machine."""
    return Path(f"/tmp/nanoflow-{os.geteuid()}/kvstore.sock")


async def run(store: KVServiceConfig, listen: ListenConfig, options: KVStoreOptions) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises StoreError."""
    from kvstore.server import StoreServer
    from kvstore.service import KVService

    ended, orphaned = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    listen.check()
    service = KVService(store)
    server = StoreServer(service, listen)
    metrics = None
    try:
        address = await server.start()
        if options.store_metrics_port is not None:
            metrics = _serve_metrics(StoreCollector(service.stats), options)
        if options.store_ends_with_stdin:
            _when_stdin_ends(asyncio.get_running_loop(), ended, orphaned)
        print(f"nanoflow kvstore: ready on {address}", flush=True)
        await ended.wait()
        log.info("stopping")
    finally:
        exit_within(_GRACE_S + 2 * _CLOSE_S)
        await server.stop(_GRACE_S)
        if orphaned.is_set() and listen.socket is not None:
            _remove_folder(listen.socket)
        if metrics is not None:
            metrics.shutdown()
            metrics.server_close()
        in_time = service.close(_CLOSE_S)
    return 0 if in_time else 1


def _remove_folder(socket: Path) -> None:
    """Of a socket that has gone, when nobody is left to do it; unless there is something else in it."""
    with suppress(OSError):
        socket.with_name(socket.name + ".lock").unlink()
        socket.parent.rmdir()


def _when_stdin_ends(loop: asyncio.AbstractEventLoop, *events: asyncio.Event) -> None:
    """Set all of them then."""

    def read() -> None:
        with suppress(OSError):
            while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
                pass
        with suppress(RuntimeError):  # the loop is closed
            for event in events:
                loop.call_soon_threadsafe(event.set)

    threading.Thread(target=read, name="stdin", daemon=True).start()


class StoreCollector(Collector):
    """The store's counters and gauges for Prometheus, as they are when it asks."""

    def __init__(self, stats: Callable[[], dict[str, int]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family for each."""
        from kvstore.service import GAUGES

        for name, value in self._stats().items():
            help_text = f"The KV store's {name.replace('_', ' ')}"
            if name in GAUGES:
                yield GaugeMetricFamily(f"nanoflow_kvstore_{name}", help_text, value)
            else:
                yield CounterMetricFamily(f"nanoflow_kvstore_{name}", help_text, value)


def _serve_metrics(collector: StoreCollector, options: KVStoreOptions) -> WSGIServer:
    registry = CollectorRegistry()
    registry.register(collector)
    assert options.store_metrics_port is not None
    try:
        server, _ = start_http_server(options.store_metrics_port, addr=options.store_host, registry=registry)
    except OSError as error:
        raise StoreError(
            f"store-metrics-port {options.store_metrics_port} cannot be listened on: {error.strerror}"
        ) from None
    log.info("metrics on %s:%d", options.store_host, server.server_port)
    return server
