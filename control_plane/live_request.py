"""One accepted request, from acceptance until it is forgotten: its output, times, reader and end.

Knows nothing of instances, of other requests or of transport, and sends nothing: `frontend` does all that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from control_plane.errors import ApiError
from control_plane.generation import Delta, Final, OnDisconnect
from control_plane.output_buffer import OutputBuffer
from scheduler.plan import RequestEnd, RequestStart
from scheduler.request import FinishReason, NewRequest


class Detokenizer(Protocol):
    """Output tokens to text, as they come; `tokenizer.Detokenizer`."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TokensOnly:
    """The detokenizer of a server without a tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class LiveRequest:
    """The state of one request. Times are seconds of the asyncio loop's clock."""

    def __init__(
        self,
        request: NewRequest,
        *,
        request_id: str,
        owner: str,
        on_disconnect: OnDisconnect,
        accepted_at: float,
        make_detokenizer: Callable[[], Detokenizer],
        max_buffered_tokens: int,
    ) -> None:
        self.request = request  # as first sent to an engine (its id is known to no client); no prompt after the end
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.request_id = request_id  # as the client knows it
        self.owner = owner  # who may stream and cancel it
        self.on_disconnect = on_disconnect
        self.accepted_at = accepted_at
        self.deadline = None if request.timeout_s is None else accepted_at + request.timeout_s
        self.placed_at = accepted_at  # when it was given to its latest instance
        self.num_attempts = 0  # times that it was given to an instance
        self.final: Final | None = None  # set once
        self.has_reader = False
        self.counted = False  # metrics know of its first token
        self.delivered = False  # a reader has had the final event
        self.accepted_by = ""  # metrics label: the instance that was chosen first
        self.timers: dict[str, asyncio.TimerHandle] = {}  # by purpose; none is left when it is forgotten
        self._make_detokenizer = make_detokenizer
        self._max_buffered_tokens = max_buffered_tokens
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._news = asyncio.Event()
        self._begin(position=0)

    def restart(self) -> None:
        """Forget the output and its times; only while no reader has had any of it.

        A reader that waits for a later token goes on waiting for that one: the output will be the same again.
        """
        self._begin(self.output.position if self.has_reader else 0)

    def _begin(self, position: int) -> None:
        self.output = OutputBuffer(self._max_buffered_tokens, position)
        self._detokenizer = self._make_detokenizer()
        self.last_token_id: int | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.start: RequestStart | None = None  # the engine's latest word, while it has not ended the request

    def add_token(self, token_id: int, now: float) -> None:
        """The next output token. Raises BufferFullError when the reader is too slow."""
        text = self._detokenizer.finish() if token_id in self._stop_ids else self._detokenizer.push(token_id)
        if self.output.num_tokens + 1 == self.request.sampling.max_tokens:
            text += self._detokenizer.finish()
        self.output.append(token_id, text)
        self.last_token_id = token_id
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        self._news.set()

    @property
    def ttft_s(self) -> float | None:
        """From acceptance to the first token of the output that a reader can have; None when there is none."""
        return None if self.first_token_at is None else self.first_token_at - self.accepted_at

    @property
    def decode_s(self) -> float | None:
        """From the first token to the latest; None when there is none."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    def end(self, reason: FinishReason, now: float, error: ApiError | None, told: RequestEnd | None) -> Final:
        """Set the final event; must be called once. `told` is the engine's word, None when it was not waited for."""
        assert self.final is None, "a request ends once"
        known = told or self.start
        started_s = now - self.placed_at if known is None else known.queue_s
        self.final = Final(
            finish_reason=reason,
            error=error,
            matched_stop_token=self.last_token_id if reason is FinishReason.STOP else None,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.output.num_tokens,
            num_cached_tokens=0 if known is None else known.num_cached_tokens,
            seed=self.request.sampling.seed,
            queue_s=self.placed_at - self.accepted_at + started_s,
            ttft_s=self.ttft_s,
            total_s=now - self.accepted_at,
            num_preemptions=0 if known is None else known.num_preemptions,
            num_cpu_cached_tokens=0 if known is None else known.num_cpu_cached_tokens,
            num_ssd_cached_tokens=0 if known is None else known.num_ssd_cached_tokens,
        )
        self._news.set()
        self._release_prompt()
        return self.final

    def _release_prompt(self) -> None:
        """It may be long, and ended requests are kept for readers to come."""
        self.request = replace(self.request, prompt_token_ids=())
        self._make_detokenizer = TokensOnly

    async def next_event(self) -> Delta | Final:
        """Wait for news for the reader: all new output in one delta, then the final event."""
        while True:
            if self.output.has_news:
                return self.output.take()
            if self.final is not None:
                return self.final
            self._news.clear()
            await self._news.wait()

    def stop_timer(self, purpose: str) -> None:
        if (timer := self.timers.pop(purpose, None)) is not None:
            timer.cancel()

    def stop_timers(self) -> None:
        for purpose in list(self.timers):
            self.stop_timer(purpose)
