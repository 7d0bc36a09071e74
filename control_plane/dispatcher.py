"""Between accepted requests and the instances that run them: places, withdraws, takes in output, survives losses.

Knows nothing of clients: who reads an output, and what may be accepted, is `frontend`'s.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from control_plane.errors import ApiError, ErrorKind, UnavailableError
from control_plane.instance import Instance
from control_plane.instance_link import InstanceLink
from control_plane.instance_pool import InstancePool
from control_plane.live_request import LiveRequest
from control_plane.metrics import Metrics
from control_plane.output_buffer import BufferFullError
from scheduler.plan import OutputBatch, RequestEnd
from scheduler.request import FinishReason

log = logging.getLogger(__name__)

Link = InstanceLink[LiveRequest]


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """How the front end treats its instances."""

    stall_timeout_s: float = 30.0  # an instance with work that ends no iteration for so long is not healthy, at most
    max_attempts: int = 3  # instances that a request may be given to, one after the other, as they are lost
    reattach_timeout_s: float = 60.0  # a request whose instance was lost waits this long for another
    retry_after_s: float = 1.0  # hint to clients that were refused
    seed: int | None = None  # of the seeds drawn for requests that have none; None: unpredictable


class Dispatcher:
    """All instances, and which of them has which request. A request is placed, or homeless, until it ends."""

    def __init__(
        self,
        config: FrontendConfig,
        metrics: Metrics,
        *,
        on_token: Callable[[LiveRequest], None],
        on_end: Callable[[LiveRequest, FinishReason, ApiError | None, RequestEnd | None], None],
        on_change: Callable[[], None],
    ) -> None:
        """on_token: a request has got another token. on_end: it has ended (the engine's word, if it was that).

        on_change: an instance has come or gone.
        """
        self._config = config
        self._metrics = metrics
        self._on_token = on_token
        self._on_end = on_end
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._placed: dict[LiveRequest, tuple[Link, str]] = {}  # where it runs, under which engine id
        self._homeless: dict[LiveRequest, None] = {}  # their instance was lost, and there is no other yet
        self.pool = InstancePool[LiveRequest](config.stall_timeout_s, self._on_batch, self._on_lost)

    @property
    def num_homeless(self) -> int:
        """Requests that wait for an instance to come back."""
        return len(self._homeless)

    @property
    def is_idle(self) -> bool:
        """Whether no request is placed or homeless."""
        return not self._placed and not self._homeless

    def attach(self, instance: Instance) -> Link:
        """Use an instance until it is lost, first for the homeless."""
        link = self.pool.attach(instance)
        self._metrics.attached(instance.name, instance.capacity)
        log.info("%s is attached", instance.name)
        waiting, self._homeless = self._homeless, {}
        for live in waiting:
            live.stop_timer("home")
            self.place(live, link)
        self._on_change()
        return link

    def place(self, live: LiveRequest, link: Link) -> None:
        """Give a request to an instance, under an id that was never used before."""
        live.num_attempts += 1
        live.placed_at = self._loop.time()
        engine_id = uuid.uuid4().hex
        timeout_s = None if live.deadline is None else max(live.deadline - live.placed_at, 0.0)
        self._placed[live] = link, engine_id
        link.submit(replace(live.request, request_id=engine_id, timeout_s=timeout_s), live)

    def end(self, live: LiveRequest, reason: FinishReason, error: ApiError) -> None:
        """End a request without waiting for its engine, which is told."""
        if (placed := self._placed.pop(live, None)) is not None:
            link, engine_id = placed
            link.cancel(engine_id, reason)
        self._homeless.pop(live, None)
        live.stop_timer("home")
        self._on_end(live, reason, error, None)

    # Output

    def _on_batch(self, link: Link, batch: OutputBatch) -> None:
        now = self._loop.time()
        for start in batch.starts:
            if (live := link.assigned.get(start.request_id)) is not None:
                live.start = start
        gaps_s: list[float] = []
        num_tokens = 0
        columns = zip(batch.request_ids, batch.token_ids.tolist(), batch.num_output_tokens.tolist(), strict=True)
        for engine_id, token_id, position in columns:
            live = link.assigned.get(engine_id)
            if live is None:  # ended here, while this was on its way
                continue
            before = live.last_token_at
            if self._add_token(live, token_id, position, now):
                num_tokens += 1
                if before is not None:
                    gaps_s.append(now - before)
        self._metrics.tokens(link.instance.name, num_tokens, gaps_s)
        for end in batch.ends:
            if (live := link.assigned.pop(end.request_id, None)) is not None:
                del self._placed[live]
                self._on_end(live, end.finish_reason, _error_of(end), end)
        self._metrics.batch(link.instance.name, batch)

    def _add_token(self, live: LiveRequest, token_id: int, position: int, now: float) -> bool:
        """Whether it could be taken; otherwise the request has ended."""
        try:
            if position != live.output.num_tokens + 1:
                raise ValueError(f"token {position} came after token {live.output.num_tokens}")
            live.add_token(token_id, now)
        except BufferFullError as error:
            self.end(live, FinishReason.CANCELLED, ApiError(ErrorKind.OVERLOADED, str(error)))
            return False
        except Exception:  # for example in the detokenizer: a fault in one request must stay there
            log.exception("a request's output could not be processed")
            self.end(live, FinishReason.FAILED, ApiError(ErrorKind.INTERNAL, "the output could not be processed"))
            return False
        self._on_token(live)
        return True

    # Loss

    def _on_lost(self, link: Link) -> None:
        self._metrics.lost(link.instance.name)
        log.error("%s is lost with %d requests", link.instance.name, len(link.assigned))
        orphans = list(link.assigned.values())
        link.assigned.clear()
        for live in orphans:
            del self._placed[live]
            self._rescue(live)
        self._on_change()

    def _rescue(self, live: LiveRequest) -> None:
        """Start a request again that nobody has read anything of; end any other."""
        if live.output.was_read or live.num_attempts >= self._config.max_attempts:
            self._end_unavailable(live, "the engine was lost")
            return
        self._metrics.retried(live.accepted_by, live.output.num_tokens)
        live.restart()
        if (link := self.pool.least_loaded()) is not None:
            self.place(live, link)
            return
        self._homeless[live] = None
        message = "the engine was lost and has not come back"
        live.timers["home"] = self._loop.call_later(
            self._config.reattach_timeout_s, self._end_unavailable, live, message
        )

    def _end_unavailable(self, live: LiveRequest, message: str) -> None:
        self.end(live, FinishReason.FAILED, UnavailableError(message, self._config.retry_after_s))


def _error_of(end: RequestEnd) -> ApiError | None:
    """The status that goes with an engine's word on a request."""
    errors = {
        FinishReason.CANCELLED: ApiError(ErrorKind.CANCELLED, "the request was cancelled"),
        FinishReason.EXPIRED: ApiError(ErrorKind.EXPIRED, "the request's time was over"),
        FinishReason.FAILED: ApiError(ErrorKind.INTERNAL, end.error or "the engine failed on this request"),
    }
    return errors.get(end.finish_reason)
