"""The store's calls over gRPC, on a Unix socket or TCP. Control only: bytes go through the arena.

A Unix socket is guarded by its folder, which only its owner may enter; TCP wants a token or certificates (mTLS).
Knows nothing of how the store does what it is asked.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from kvstore.credentials import read_secret
from kvstore.keys import MAX_KEYS_PER_CALL, InvalidCallError, KVKey, StoreError, checked_keys
from kvstore.pb import kvstore_pb2, kvstore_pb2_grpc
from kvstore.record import HEADER_BYTES
from kvstore.service import KVService
from kvstore.settings import ListenConfig

log = logging.getLogger(__name__)

_MAX_WAIT_S = 60.0
_TICK_S = 0.5  # leases are looked after and the index is saved this often


class StoreServer:
    """One service behind one address."""

    def __init__(self, service: KVService, config: ListenConfig) -> None:
        """Raises StoreError."""
        config.check()
        self._service = service
        self._config = config
        self._socket_lock: int | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=(TokenInterceptor(config.token),) if config.token else (),
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=1024,
        )
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(StoreServicer(service), self._server)

    async def start(self) -> str:
        """Listen; the address, as a client wants it. Raises StoreError."""
        if self._config.socket is not None:
            address = self._prepare_socket(self._config.socket)
        else:
            address = f"{self._config.host}:{self._config.port}"
        try:
            if self._config.ssl_keyfile is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(self._config))
        except RuntimeError:
            port = 0
        if port == 0:
            raise StoreError(f"the store cannot listen on {address}: is it taken, or not this machine's?")
        await self._server.start()
        if self._config.socket is not None:
            self._config.socket.chmod(0o600)
        else:
            address = f"{self._config.host}:{port}"
        self._ticking = asyncio.create_task(self._tick())
        return address

    async def stop(self, grace_s: float) -> None:
        """Take no more calls. The service is not closed. Idempotent."""
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking
        await self._server.stop(grace_s)
        if self._socket_lock is not None and self._config.socket is not None:
            self._config.socket.unlink(missing_ok=True)
            os.close(self._socket_lock)
            self._socket_lock = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._service.expire()
                self._service.tiers.save_index()
            except Exception:  # our own fault; the next tick may still do its part
                log.exception("looking after leases and index failed")

    def _prepare_socket(self, path: Path) -> str:
        """See that the socket is nobody else's, alive or dead; its address."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise StoreError(f"{path} is there and is no socket: name a path where nothing is")
            folder = path.parent.stat()
            if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o077:
                raise StoreError(f"{path.parent} must be this user's own and closed to others: chmod 700")
            lock = path.with_name(path.name + ".lock")
            self._socket_lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._socket_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            self._unlock_socket()
            raise StoreError(f"another store listens on {path}") from None
        except OSError as error:
            self._unlock_socket()
            raise StoreError(f"the socket {path} cannot be made: {error.strerror}") from None
        return f"unix:{path}"

    def _unlock_socket(self) -> None:
        if self._socket_lock is not None:
            os.close(self._socket_lock)
            self._socket_lock = None


class StoreServicer(kvstore_pb2_grpc.KVStoreServicer):
    """Messages to calls and back. All but Acquire answer at once."""

    def __init__(self, service: KVService) -> None:
        self._service = service
        self._boot_id = service.boot_id

    async def Attach(self, request: Any, context: Any) -> kvstore_pb2.AttachResponse:
        config, arena = self._service.config, self._service.arena
        return kvstore_pb2.AttachResponse(
            boot_id=self._boot_id,
            arena_path=str(arena.path),
            arena_bytes=arena.num_bytes,
            lease_s=config.lease_s,
            max_payload_bytes=config.slab() - HEADER_BYTES,
        )

    async def Lookup(self, request: Any, context: Any) -> kvstore_pb2.LookupResponse:
        tiers = self._service.lookup(await _keys(request, context))
        return kvstore_pb2.LookupResponse(boot_id=self._boot_id, tiers=[tier.value for tier in tiers])  # type: ignore[misc]

    async def Prefetch(self, request: Any, context: Any) -> kvstore_pb2.PrefetchResponse:
        num_keys = self._service.prefetch(await _keys(request, context))
        return kvstore_pb2.PrefetchResponse(boot_id=self._boot_id, num_keys=num_keys)

    async def Acquire(self, request: Any, context: Any) -> kvstore_pb2.AcquireResponse:
        acquisition = self._service.begin_acquire(await _keys(request, context))
        cancelled = True
        try:
            if acquisition.pending and request.wait_ms:
                pending = {asyncio.wrap_future(each) for each in acquisition.pending}
                await asyncio.wait(pending, timeout=min(request.wait_ms / 1000, _MAX_WAIT_S))
            cancelled = False
        finally:  # pins must go, whatever became of the caller
            acquired = self._service.finish_acquire(acquisition)
            if cancelled:
                self._service.release(acquired.lease_id)
        blocks = [
            kvstore_pb2.Block(offset=block.offset, payload_bytes=block.payload_bytes, tier=block.tier.value)  # type: ignore[arg-type]
            for block in acquired.blocks
        ]
        return kvstore_pb2.AcquireResponse(boot_id=self._boot_id, lease_id=acquired.lease_id, blocks=blocks)

    async def Reserve(self, request: Any, context: Any) -> kvstore_pb2.ReserveResponse:
        keys = await _keys(request, context)
        try:
            reserved = self._service.reserve(keys, request.payload_bytes)
        except InvalidCallError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return kvstore_pb2.ReserveResponse(boot_id=self._boot_id, lease_id=reserved.lease_id, offsets=reserved.offsets)

    async def Commit(self, request: Any, context: Any) -> kvstore_pb2.CommitResponse:
        num_visible = self._service.commit(request.lease_id)
        return kvstore_pb2.CommitResponse(boot_id=self._boot_id, num_visible=num_visible)

    async def Release(self, request: Any, context: Any) -> kvstore_pb2.ReleaseResponse:
        for lease_id in request.lease_ids:
            self._service.release(lease_id)
        return kvstore_pb2.ReleaseResponse(boot_id=self._boot_id)

    async def ReportCorrupt(self, request: Any, context: Any) -> kvstore_pb2.ReportCorruptResponse:
        self._service.report_corrupt(await _keys(request, context))
        return kvstore_pb2.ReportCorruptResponse(boot_id=self._boot_id)

    async def Flush(self, request: Any, context: Any) -> kvstore_pb2.FlushResponse:
        self._service.flush()
        return kvstore_pb2.FlushResponse(boot_id=self._boot_id)

    async def Stats(self, request: Any, context: Any) -> kvstore_pb2.StatsResponse:
        return kvstore_pb2.StatsResponse(boot_id=self._boot_id, values=self._service.stats())


async def _keys(request: Any, context: Any) -> list[KVKey]:
    try:
        if len(request.keys) > MAX_KEYS_PER_CALL:
            raise InvalidCallError(f"{len(request.keys)} keys: at most {MAX_KEYS_PER_CALL} go in one call")
        return checked_keys(request.keys)
    except InvalidCallError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError("abort raises") from None


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the token."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """The call's own handler, or one that says UNAUTHENTICATED."""
        if self._is_known(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the token as `authorization: Bearer TOKEN`")

        return grpc.unary_unary_rpc_method_handler(refuse)

    def _is_known(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        header = next((value for name, value in metadata if name == "authorization"), "")
        scheme, _, token = (header.decode(errors="replace") if isinstance(header, bytes) else header).partition(" ")
        return hmac.compare_digest(_digest(token), self._digest) and scheme.lower() == "bearer"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.strip().encode(errors="replace")).digest()


def _credentials(config: ListenConfig) -> grpc.ServerCredentials:
    """Raises StoreError for files that cannot be read, and for a key that others can read."""
    assert config.ssl_keyfile is not None
    assert config.ssl_certfile is not None
    assert config.ssl_ca_certs is not None
    try:
        pair = (read_secret(config.ssl_keyfile), config.ssl_certfile.read_bytes())
        roots = config.ssl_ca_certs.read_bytes()
    except OSError as error:
        raise StoreError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=True)
