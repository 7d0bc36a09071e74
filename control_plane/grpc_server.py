"""The gRPC server: its port, transport settings, services, health and reflection.

Knows nothing of what the services do.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from control_plane.errors import ListenError
from control_plane.frontend import Frontend
from control_plane.grpc_admin import AdminService, ServerInfo
from control_plane.grpc_api import GenerationService
from control_plane.grpc_auth import ApiKeys, AuthInterceptor
from control_plane.grpc_errors import ErrorInterceptor
from control_plane.pb import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from control_plane.validation import Limits

log = logging.getLogger(__name__)

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
LIVENESS = ""  # the health service's name for the server as a whole


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """Where and how gRPC is served. Sizes and counts that clients can drive are in `validation.Limits`."""

    host: str = "127.0.0.1"  # 0.0.0.0 is every interface
    port: int = 50051  # 0 picks a free one
    api_keys: tuple[str, ...] = ()  # one of them is needed for every call but health; empty: none is
    admin_keys: tuple[str, ...] = ()  # one of them is needed for Admin; empty: Admin answers loopback peers only
    ssl_keyfile: Path | None = None  # PEM; with ssl_certfile: TLS
    ssl_certfile: Path | None = None  # PEM, the whole chain
    ssl_ca_certs: Path | None = None  # PEM; clients must have a certificate from one of these (mTLS)
    reflection: bool | None = None  # None: on, unless keys would travel without TLS
    write_timeout_s: float = 60.0  # a client that takes no message for so long counts as gone
    min_ping_interval_s: float = 10.0  # clients may ping this often, calls or not: a long prefill sends no data
    keepalive_time_s: float = 60.0  # the server pings a silent client after this long
    keepalive_timeout_s: float = 20.0  # and gives it this long to answer
    max_connection_age_s: float = 0.0  # a connection is asked to reconnect after this long, 0: never
    max_connection_age_grace_s: float = 0.0  # calls that are under way then have so long, 0: for ever


class GrpcServer:
    """Generation and Admin on one port."""

    def __init__(self, frontend: Frontend, info: ServerInfo, config: GrpcConfig) -> None:
        self._frontend = frontend
        self._config = config
        api_keys, admin_keys = ApiKeys(config.api_keys), ApiKeys(config.admin_keys)
        self._server = grpc.aio.server(
            interceptors=(AuthInterceptor(api_keys, admin_keys), ErrorInterceptor()),
            options=channel_options(config, frontend.limits),
            maximum_concurrent_rpcs=frontend.limits.max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        self._told: dict[str, int] = {}  # by service: what the health service was told last
        self._health_task: asyncio.Task[None] | None = None
        generation = GenerationService(frontend, api_keys, config.write_timeout_s)
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(frontend, info), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if _has_reflection(config):
            names = (GENERATION, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen; returns the port. Raises ListenError."""
        address = f"{self._config.host}:{self._config.port}"
        credentials = _credentials(self._config)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ListenError(f"gRPC cannot listen on {address}: is the port taken, or the address not this machine's?")
        await self._tell_health()
        await self._server.start()
        self._health_task = asyncio.create_task(self._watch_health())
        log.info("gRPC listens on %s:%d", self._config.host, port)
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that have not ended themselves within grace_s. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._health_task is not None:
            self._health_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._health_task

    async def _watch_health(self) -> None:
        """Bring the front end's health to the health service: at once when it says so, else every 0.25 s."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await self._frontend.changed.wait()
            self._frontend.changed.clear()
            await self._tell_health()

    async def _tell_health(self) -> None:
        state = self._frontend.health()
        await self._set_health(LIVENESS, state.alive)
        await self._set_health(GENERATION, state.ready)
        await self._set_health(ADMIN, True)

    async def _set_health(self, service: str, good: bool) -> None:
        """Only changes are told, and not for ever: a watcher that reads nothing can hold the service's lock."""
        serving = health_pb2.HealthCheckResponse
        status = serving.SERVING if good else serving.NOT_SERVING
        if self._told.get(service) == status:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._health.set(service, status)
            self._told[service] = status
        except TimeoutError:
            log.warning("a watcher of the health of %r takes nothing; its state will be told later", service)


def channel_options(config: GrpcConfig, limits: Limits) -> list[tuple[str, int]]:
    """gRPC core's settings. A connection age of 0 leaves its own default: unlimited."""
    options = [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls without a word
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(config.min_ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
    ]
    if config.max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", round(config.max_connection_age_s * 1000)))
        if config.max_connection_age_grace_s:
            options.append(("grpc.max_connection_age_grace_ms", round(config.max_connection_age_grace_s * 1000)))
    return options


def _has_reflection(config: GrpcConfig) -> bool:
    if config.reflection is not None:
        return config.reflection
    return not (config.api_keys or config.admin_keys) or config.ssl_certfile is not None


def _credentials(config: GrpcConfig) -> grpc.ServerCredentials | None:
    """None: no TLS. Raises ListenError when a file cannot be read."""
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        if config.ssl_keyfile or config.ssl_certfile or config.ssl_ca_certs:
            raise ListenError("TLS needs both ssl_keyfile and ssl_certfile")
        return None
    try:
        pair = (config.ssl_keyfile.read_bytes(), config.ssl_certfile.read_bytes())
        ca_certs = None if config.ssl_ca_certs is None else config.ssl_ca_certs.read_bytes()
    except OSError as error:
        raise ListenError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=ca_certs, require_client_auth=ca_certs is not None)
