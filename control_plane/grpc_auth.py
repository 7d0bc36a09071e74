"""Who may call which gRPC method: keys for requests, a key of its own or the loopback interface for Admin.

Everything is refused that no rule lets in, streaming methods and reflection included; only health is open.
Knows nothing of what the methods do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc

from control_plane.errors import ApiError, ErrorKind
from control_plane.grpc_errors import abort, with_behaviour

OPEN_PREFIX = "/grpc.health.v1.Health/"
ADMIN_PREFIX = "/nanoflow.v1.Admin/"
LOOPBACK_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")

Metadata = Iterable[tuple[str, str | bytes]]


class ApiKeys:
    """A set of keys, compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, metadata: Metadata) -> str | None:
        """A name for the key in `authorization: Bearer KEY`, from which it cannot be told; None if it is not ours.

        Without any keys everybody is the owner "".
        """
        if not self._digests:
            return ""
        header = next((value for name, value in metadata if name == "authorization"), "")
        text = header.decode(errors="replace") if isinstance(header, bytes) else header
        scheme, _, key = text.partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        found = None
        for digest in self._digests:  # all of them, whichever it is
            if hmac.compare_digest(digest, given):
                found = hashlib.sha256(b"owner" + digest).hexdigest()[:16]
        return found if scheme.lower() == "bearer" else None


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through, or answers UNAUTHENTICATED or PERMISSION_DENIED for it."""

    def __init__(self, api_keys: ApiKeys, admin_keys: ApiKeys) -> None:
        """With admin_keys, Admin wants one of these; without, it takes loopback peers (with an API key, if any)."""
        self._api_keys = api_keys
        self._admin_keys = admin_keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN_PREFIX):
            return handler
        admin = method.startswith(ADMIN_PREFIX)
        keys = self._admin_keys if admin and self._admin_keys else self._api_keys
        if keys.owner(handler_call_details.invocation_metadata) is None:
            return _refuse(handler, ErrorKind.UNAUTHENTICATED, "send a valid key as `authorization: Bearer KEY`")
        if admin and not self._admin_keys:
            return _for_loopback(handler)
        return handler


def _refuse(handler: grpc.RpcMethodHandler, kind: ErrorKind, message: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, ApiError(kind, message))

    return with_behaviour(handler, refuse)


def _for_loopback(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    behaviour = handler.unary_unary  # Admin has no other kind

    async def check(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if not context.peer().startswith(LOOPBACK_PEERS):
            message = "Admin answers only this machine's own callers unless the server has an admin key"
            await abort(context, ApiError(ErrorKind.PERMISSION_DENIED, message))
        return await behaviour(request, context)

    return with_behaviour(handler, check)
