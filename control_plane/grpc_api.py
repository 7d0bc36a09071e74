"""The Generation service: translates between protobuf and the front end, message by message.

Decides nothing about requests; what is right or wrong with them is `validation`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from control_plane.errors import ApiError, ErrorKind, InvalidRequestError
from control_plane.frontend import Frontend
from control_plane.generation import (
    CancelOutcome,
    ChatMessage,
    ChatPrompt,
    Delta,
    Final,
    GenerationRequest,
    OnDisconnect,
    TextPrompt,
    TokenPrompt,
)
from control_plane.grpc_auth import ApiKeys
from control_plane.grpc_correlation import correlation
from control_plane.pb import generation_pb2 as pb
from control_plane.pb import generation_pb2_grpc as pb_grpc
from control_plane.reader import Reader
from control_plane.validation import Limits, check_request_id
from scheduler.request import FinishReason

log = logging.getLogger(__name__)

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.EXPIRED: pb.FINISH_REASON_EXPIRED,
    FinishReason.FAILED: pb.FINISH_REASON_FAILED,
}
OUTCOMES = {
    CancelOutcome.CANCELLED: pb.CancelResponse.OUTCOME_CANCELLED,
    CancelOutcome.ALREADY_FINISHED: pb.CancelResponse.OUTCOME_ALREADY_FINISHED,
    CancelOutcome.NOT_FOUND: pb.CancelResponse.OUTCOME_NOT_FOUND,
}
ON_DISCONNECT = {pb.ON_DISCONNECT_CANCEL: OnDisconnect.CANCEL, pb.ON_DISCONNECT_DETACH: OnDisconnect.DETACH}


class GenerationService(pb_grpc.GenerationServicer):
    """nanoflow.v1.Generation."""

    def __init__(self, frontend: Frontend, api_keys: ApiKeys, write_timeout_s: float) -> None:
        """A reader that takes no message for write_timeout_s counts as gone."""
        self._frontend = frontend
        self._api_keys = api_keys
        self._write_timeout_s = write_timeout_s

    async def Submit(self, request: pb.SubmitRequest, context: grpc.aio.ServicerContext) -> pb.SubmitResponse:
        wanted = self._to_request(request.request, OnDisconnect.DETACH, deadline_s=None)
        accepted = await self._frontend.submit(wanted, self._owner(context))
        _log_accepted(accepted.request_id, context)
        return pb.SubmitResponse(request_id=accepted.request_id, prompt_tokens=accepted.num_prompt_tokens)

    async def Stream(self, request: pb.StreamRequest, context: grpc.aio.ServicerContext) -> None:
        check_request_id(request.request_id, self._frontend.limits)
        owner = self._owner(context)
        await self._write_all(self._frontend.stream(request.request_id, owner, request.resume_from_token), context)

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        outcome = self._frontend.cancel(request.request_id, self._owner(context))
        return pb.CancelResponse(outcome=OUTCOMES[outcome])

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        wanted = self._to_request(request, OnDisconnect.CANCEL, context.time_remaining())
        reader = await self._frontend.generate(wanted, self._owner(context))
        _log_accepted(reader.request_id, context)
        await self._write_all(reader, context)

    async def _write_all(self, reader: Reader, context: grpc.aio.ServicerContext) -> None:
        """Write the events of a stream, then end with the final event's status."""
        error: ApiError | None = None
        async with reader:
            await context.send_initial_metadata((("x-request-id", reader.request_id),))
            async for event in reader:
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await context.write(to_response(reader.request_id, event))
                except TimeoutError:
                    message = f"no message was taken for {self._write_timeout_s:g} s"
                    raise ApiError(ErrorKind.OVERLOADED, message) from None
                if isinstance(event, Final):
                    error = event.error
        if error is not None:
            raise error

    def _to_request(
        self, message: pb.GenerateRequest, default: OnDisconnect, deadline_s: float | None
    ) -> GenerationRequest:
        try:
            return to_request(message, default, self._frontend.limits, deadline_s)
        except ApiError as error:
            self._frontend.note_refusal(error)
            raise

    def _owner(self, context: grpc.aio.ServicerContext) -> str:
        owner = self._api_keys.owner(context.invocation_metadata())
        assert owner is not None, "the interceptor lets nobody else in"
        return owner


def to_request(
    message: pb.GenerateRequest, default: OnDisconnect, limits: Limits, deadline_s: float | None
) -> GenerationRequest:
    """The request in the front end's words. deadline_s is what remains of the call's own.

    Takes little time even for a message of millions of ids: they stay where they are. Of too many chat messages
    only so many are translated that validation sees it.

    Raises InvalidRequestError for what cannot be put into them.
    """
    if message.on_disconnect not in (pb.ON_DISCONNECT_UNSPECIFIED, *ON_DISCONNECT):
        raise InvalidRequestError("on_disconnect", f"{message.on_disconnect} is not one of its values")
    on_disconnect = ON_DISCONNECT.get(message.on_disconnect, default)
    timeout_s = _optional(message, "timeout_s")
    if deadline_s is not None and on_disconnect is OnDisconnect.CANCEL:
        if deadline_s <= 0:
            raise ApiError(ErrorKind.EXPIRED, "the call's deadline was over on arrival")
        # NaN stays, for validation to refuse.
        timeout_s = deadline_s if timeout_s is None or timeout_s > deadline_s else timeout_s
    sampling, stopping = message.sampling, message.stopping
    return GenerationRequest(
        prompt=_to_prompt(message, limits),
        request_id=_optional(message, "request_id"),
        max_tokens=_optional(stopping, "max_tokens"),
        temperature=_optional(sampling, "temperature"),
        top_k=_optional(sampling, "top_k"),
        top_p=_optional(sampling, "top_p"),
        seed=_optional(sampling, "seed"),
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        cache_salt=message.cache_salt,
        timeout_s=timeout_s,
        on_disconnect=on_disconnect,
    )


def to_response(request_id: str, event: Delta | Final) -> pb.GenerateResponse:
    """An event as a message."""
    if isinstance(event, Delta):
        delta = pb.Delta(token_ids=event.token_ids, text=event.text, completion_tokens=event.num_output_tokens)
        return pb.GenerateResponse(request_id=request_id, delta=delta)
    final = pb.Final(
        finish_reason=FINISH_REASONS[event.finish_reason],
        matched_stop_token=event.matched_stop_token,
        prompt_tokens=event.num_prompt_tokens,
        completion_tokens=event.num_output_tokens,
        cached_tokens=event.num_cached_tokens,
        seed=event.seed,
        queue_s=event.queue_s,
        ttft_s=event.ttft_s,
        total_s=event.total_s,
        num_preemptions=event.num_preemptions,
        cpu_cached_tokens=event.num_cpu_cached_tokens,
        ssd_cached_tokens=event.num_ssd_cached_tokens,
    )
    return pb.GenerateResponse(request_id=request_id, final=final)


def _to_prompt(message: pb.GenerateRequest, limits: Limits) -> TextPrompt | TokenPrompt | ChatPrompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "token_ids":
        return TokenPrompt(message.token_ids.ids)
    if kind == "chat":
        chat = message.chat
        opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        messages = chat.messages[: limits.max_chat_messages + 1]
        return ChatPrompt(tuple(ChatMessage(each.role, each.content) for each in messages), opens)
    raise InvalidRequestError("prompt", "is missing: send text, token_ids or chat")


def _log_accepted(request_id: str, context: grpc.aio.ServicerContext) -> None:
    if log.isEnabledFor(logging.DEBUG):
        log.debug("request %s is accepted%s", request_id, correlation(context.invocation_metadata() or ()))


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
