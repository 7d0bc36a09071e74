"""The serving front end, free of transport: takes requests, gives them to instances, hands out their output.

Every accepted request gets exactly one final event. One asyncio loop runs everything here; nothing blocks it.
Knows nothing of gRPC or HTTP, of how instances are made, or of how tokens come about.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable

from control_plane.admission import Admission
from control_plane.dispatcher import Dispatcher, FrontendConfig, Link
from control_plane.errors import ApiError, ErrorKind, UnavailableError
from control_plane.generation import Accepted, CancelOutcome, GenerationRequest, OnDisconnect
from control_plane.instance import Instance, InstanceLost
from control_plane.instance_pool import Health, InstancePool
from control_plane.intake import Intake
from control_plane.live_request import LiveRequest
from control_plane.metrics import Metrics
from control_plane.reader import Reader
from control_plane.request_registry import RequestRegistry
from control_plane.schedule_swap import ScheduleSwap
from control_plane.validation import Limits, sampling_params
from scheduler.plan import RequestEnd
from scheduler.request import FinishReason, NewRequest

log = logging.getLogger(__name__)

__all__ = ["Frontend", "FrontendConfig"]


class Frontend:
    """All requests and instances of one served model."""

    def __init__(self, intake: Intake, metrics: Metrics, config: FrontendConfig | None = None) -> None:
        """Must be made on the asyncio loop that it will run on."""
        self.intake = intake
        self.limits: Limits = intake.limits
        self.draining = False
        self.changed = asyncio.Event()  # set whenever health may have changed; whoever waits for it clears it
        self._config = config or FrontendConfig()
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(
            self._config, metrics, on_token=self._on_token, on_end=self._on_end, on_change=self.changed.set
        )
        self.schedules = ScheduleSwap(self._dispatcher.pool, metrics, self._config.retry_after_s)
        self._requests = RequestRegistry(self.limits.max_kept_requests)
        self._admission = Admission(self.limits, self._config.retry_after_s)
        self._settled = asyncio.Event()  # set when a request was forgotten or delivered
        self._seeds: random.Random = random.SystemRandom()
        if self._config.seed is not None:
            self._seeds = random.Random(self._config.seed)

    # Instances

    def attach(self, instance: Instance) -> Awaitable[None]:
        """Use the instance from now on; the awaitable ends when it is lost. Closing it stays the caller's part."""
        return self._dispatcher.attach(instance).lost

    @property
    def instances(self) -> InstancePool[LiveRequest]:
        """The attached instances, with what is known of their load."""
        return self._dispatcher.pool

    def health(self) -> Health:
        """Whether requests are taken, and whether the engines work."""
        return self.instances.health(self.draining)

    async def flush_cache(self) -> int:
        """Drop cached pages that no live request uses, on all instances; how many. Raises UnavailableError."""
        try:
            return sum(await asyncio.gather(*(link.instance.flush_cache() for link in self.instances)))
        except InstanceLost:
            raise UnavailableError("an engine was lost meanwhile", self._config.retry_after_s) from None

    # Requests

    async def submit(self, request: GenerationRequest, owner: str = "") -> Accepted:
        """Check and accept a request. Its output waits for stream(). Raises ApiError, and then has done nothing."""
        live = await self._submit(request, owner)
        return Accepted(live.request_id, live.num_prompt_tokens)

    def stream(self, request_id: str, owner: str = "", resume_from: int = 0) -> Reader:
        """Read a request's output from token `resume_from` on. Raises ApiError."""
        live = self._requests.find(owner, request_id)
        if live is None:
            raise ApiError(ErrorKind.NOT_FOUND, "request_id: there is no such request (any more)")
        return self._read(live, resume_from)

    async def generate(self, request: GenerationRequest, owner: str = "") -> Reader:
        """submit() and stream() at once. Raises ApiError."""
        return self._read(await self._submit(request, owner), 0)

    def note_refusal(self, error: ApiError) -> None:
        """Count a request that was refused; a transport tells of those that it cannot even translate."""
        self._metrics.rejected(error.kind.label)

    def cancel(self, request_id: str, owner: str = "") -> CancelOutcome:
        """End a request, whatever its state. Idempotent."""
        live = self._requests.find(owner, request_id)
        if live is None:
            return CancelOutcome.NOT_FOUND
        if live.final is not None:
            return CancelOutcome.ALREADY_FINISHED
        self._cancel(live, "the request was cancelled")
        return CancelOutcome.CANCELLED

    @property
    def num_live(self) -> int:
        """Requests accepted and not ended."""
        return self._requests.num_live

    @property
    def num_homeless(self) -> int:
        """Of those, requests that wait for an instance to come back."""
        return self._dispatcher.num_homeless

    @property
    def needs_instance(self) -> bool:
        """Whether an instance that is lost must be replaced: in a drain only for requests that have no other."""
        return not self.draining or self.num_homeless > 0

    # The end

    def start_draining(self) -> None:
        """Refuse new requests from now on, for good."""
        if not self.draining:
            log.info("draining: %d requests are live", self.num_live)
        self.draining = True
        self.changed.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until all others have ended and their readers know.

        A request that was cancelled without a reader is not waited for: nobody will ask for it. After timeout_s
        those that are still live end with UNAVAILABLE; False then.
        """
        self.start_draining()
        try:
            async with asyncio.timeout(timeout_s):
                while any(map(_awaited, self._requests)):
                    self._settled.clear()
                    await self._settled.wait()
            return True
        except TimeoutError:
            num_live = self.num_live
            log.warning("after %g s %d requests were live, and others not read to their end", timeout_s, num_live)
            self._end_all()
            return num_live == 0

    async def close(self) -> None:
        """End everything at once, instances excepted: they are the caller's. Idempotent."""
        self.start_draining()
        self._end_all()
        for live in self._requests:
            self._forget(live)
        self.instances.close()
        await self.intake.close()

    # Accepting

    async def _submit(self, request: GenerationRequest, owner: str) -> LiveRequest:
        place = object()  # in the queue, from before any work is put into the prompt
        num_tokens = self.intake.estimated_tokens(request)
        try:
            self._admission.check(num_tokens)
            self._choose_link()
            self._admission.add(place, num_tokens)
            try:
                token_ids = await self.intake.token_ids(request, self._max_model_len())
            finally:
                self._admission.remove(place)
            return self._accept(request, owner, token_ids)
        except ApiError as error:
            self.note_refusal(error)
            raise

    def _accept(self, request: GenerationRequest, owner: str, token_ids: tuple[int, ...]) -> LiveRequest:
        """All at once, so that no limit is passed by requests whose prompts were tokenized meanwhile."""
        link = self._choose_link()
        request_id = uuid.uuid4().hex if request.request_id is None else request.request_id
        seed = self._seeds.getrandbits(63)
        sampling = sampling_params(request, len(token_ids), self._max_model_len(), self.intake.model, seed)
        self._requests.check_free(owner, request_id)
        self._admission.check(len(token_ids))
        # With keys, the salt tells owners apart: nobody can find out by timing what others have asked.
        salt = f"{owner}/{request.cache_salt}" if owner else request.cache_salt
        live = LiveRequest(
            NewRequest("", token_ids, sampling, salt, request.timeout_s),
            request_id=request_id,
            owner=owner,
            on_disconnect=request.on_disconnect,
            accepted_at=self._loop.time(),
            make_detokenizer=lambda: self.intake.detokenizer(token_ids),
            max_buffered_tokens=self.limits.max_buffered_tokens,
        )
        if (before := self._requests.add(live)) is not None:
            self._forget(before)
        live.accepted_by = link.instance.name
        self._metrics.accepted(live.accepted_by, sampling.max_tokens)
        if live.deadline is not None:
            live.timers["deadline"] = self._loop.call_at(live.deadline, self._expire, live)
        self._wait_for_reader(live)
        self._admission.add(live, live.num_prompt_tokens)
        self._dispatcher.place(live, link)
        return live

    def _choose_link(self) -> Link:
        """Where a new request goes. Raises UnavailableError."""
        if self.draining:
            raise UnavailableError("the server is shutting down", self._config.retry_after_s)
        link = self.instances.least_loaded()
        if link is None:
            what = "is being restarted" if self.instances.ever_attached else "is starting"
            raise UnavailableError(f"the engine {what}", self._config.retry_after_s)
        return link

    def _max_model_len(self) -> int:
        """While there is an instance."""
        max_model_len = self.instances.max_model_len
        assert max_model_len is not None
        return max_model_len

    # Reading

    def _read(self, live: LiveRequest, resume_from: int) -> Reader:
        if live.has_reader:
            raise ApiError(ErrorKind.ALREADY_EXISTS, "request_id: it has a reader already")
        if not live.output.seek(resume_from):
            first, end = live.output.first_kept, live.output.num_tokens
            raise ApiError(
                ErrorKind.OUT_OF_RANGE, f"resume_from_token: {resume_from} is not within what is kept, {first} to {end}"
            )
        live.stop_timer("reader")
        return Reader(live, self._count_first_token, self._on_reader_left)

    def _on_reader_left(self, live: LiveRequest) -> None:
        self._settled.set()
        if live.on_disconnect is OnDisconnect.DETACH and self._requests.is_named(live):
            self._wait_for_reader(live)
            return
        if live.final is None:
            self._cancel(live, "its reader went away")
        self._forget(live)

    def _wait_for_reader(self, live: LiveRequest) -> None:
        live.stop_timer("reader")
        live.timers["reader"] = self._loop.call_later(self.limits.detached_ttl_s, self._give_up_waiting, live)

    def _give_up_waiting(self, live: LiveRequest) -> None:
        if live.final is None:
            self._cancel(live, "nobody read it")
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        live.stop_timers()
        self._requests.forget(live)
        self._settled.set()

    # Ends

    def _on_token(self, live: LiveRequest) -> None:
        self._admission.remove(live)

    def _count_first_token(self, live: LiveRequest) -> None:
        """Once per request, as soon as its first token is one that counts: a loss cannot undo it any more."""
        if not live.counted and (ttft_s := live.ttft_s) is not None:
            live.counted = True
            self._metrics.first_token(live.accepted_by, live.num_prompt_tokens, ttft_s)

    def _on_end(self, live: LiveRequest, reason: FinishReason, error: ApiError | None, end: RequestEnd | None) -> None:
        self._admission.remove(live)
        live.stop_timer("deadline")
        self._count_first_token(live)
        final = live.end(reason, self._loop.time(), error, end)
        self._metrics.ended(live.accepted_by, final, live.decode_s)
        for old in self._requests.keep_ended(live):
            self._forget(old)
        self._settled.set()

    def _cancel(self, live: LiveRequest, why: str) -> None:
        self._dispatcher.end(live, FinishReason.CANCELLED, ApiError(ErrorKind.CANCELLED, why))

    def _expire(self, live: LiveRequest) -> None:
        error = ApiError(ErrorKind.EXPIRED, "the request's time was over")
        self._dispatcher.end(live, FinishReason.EXPIRED, error)

    def _end_all(self) -> None:
        error = UnavailableError("the server is shutting down", self._config.retry_after_s)
        for live in self._requests:
            if live.final is None:
                self._dispatcher.end(live, FinishReason.FAILED, error)


def _awaited(live: LiveRequest) -> bool:
    """Whether a drain waits for the request: it is live, or someone may still read its end."""
    if live.final is None or live.has_reader:
        return not live.delivered
    return not live.delivered and live.final.finish_reason is not FinishReason.CANCELLED
