"""How errors leave by gRPC: typed ones with their status and a retry hint, all others as INTERNAL without a word.

Knows nothing of the methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from control_plane.errors import ApiError, ErrorKind
from control_plane.grpc_correlation import correlation

log = logging.getLogger(__name__)

OURS = "/nanoflow.v1."
UNREADABLE = object()  # stands for a message that is none of its kind


async def abort(context: grpc.aio.ServicerContext, error: ApiError) -> NoReturn:
    """End the call with the error's status.

    A retry hint goes out twice: as the trailer `retry-after-ms`, and as google.rpc.RetryInfo for clients that
    read rich errors.
    """
    code = grpc.StatusCode[error.kind.grpc_status]
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    if error.retry_after_s is not None:
        millis = round(error.retry_after_s * 1000)
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(seconds=millis // 1000, nanos=millis % 1000 * 1_000_000)))
        status = Status(code=code.value[0], message=error.message, details=[detail])
        trailers = (("retry-after-ms", str(millis)), ("grpc-status-details-bin", status.SerializeToString()))
    await context.abort(code, error.message, trailers)
    raise AssertionError("abort() raises")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers whatever our methods raise. They are unary, or write their stream with context.write()."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OURS):
            return handler
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                if request is UNREADABLE:
                    raise ApiError(ErrorKind.INVALID_ARGUMENT, "the message is not what this method takes")
                return await behaviour(request, context)
            except ApiError as error:
                await abort(context, error)
            except (grpc.aio.BaseError, asyncio.CancelledError):
                raise  # aborted already, or the client is gone
            except Exception:
                sent = correlation(handler_call_details.invocation_metadata)
                log.exception("a call to %s failed%s", handler_call_details.method, sent)
                await abort(context, ApiError(ErrorKind.INTERNAL, "internal error; the server's log has more"))

        return with_behaviour(handler, answer, _lenient(handler.request_deserializer))


def with_behaviour(
    handler: grpc.RpcMethodHandler,
    behaviour: Callable[..., Any],
    deserializer: Callable[[bytes], object] | None = None,
) -> grpc.RpcMethodHandler:
    """A handler of the same kind with the same messages that does something else, or also reads them differently."""
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[handler.request_streaming, handler.response_streaming]
    return make(behaviour, deserializer or handler.request_deserializer, handler.response_serializer)


def _lenient(deserializer: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Gives UNREADABLE for what it cannot read. gRPC itself would answer UNKNOWN, as if that were our fault."""

    def read(message: bytes) -> object:
        try:
            return deserializer(message)
        except DecodeError:
            return UNREADABLE

    return read
