"""The front end's end of one attached instance: batches what goes there, receives what comes, watches its pulse.

Knows which requests the instance has, but nothing of what they are: they are values of type T.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from control_plane.instance import Instance, InstanceLost
from control_plane.step_pace import StepPace
from control_plane.store_notice import StoreNotice
from scheduler.plan import Cancel, LoadReport, OutputBatch
from scheduler.request import FinishReason, NewRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
RATE_WINDOW_S = 10.0  # output tokens per second are an average over this long


class InstanceLink(Generic[T]):
    """Calls `on_outputs` for every batch and `on_lost` once. Both run on the asyncio loop, and must not raise."""

    def __init__(
        self,
        instance: Instance,
        stall_timeout_s: float,
        on_outputs: Callable[[InstanceLink[T], OutputBatch], None],
        on_lost: Callable[[InstanceLink[T]], None],
    ) -> None:
        """stall_timeout_s: with work and no iteration ended for so long it has stalled; less once it has a pace."""
        self.instance = instance
        self.assigned: dict[str, T] = {}  # by engine id: submitted, and not ended as far as is known here
        self.lost = asyncio.get_running_loop().create_future()  # done when the instance is lost
        self.load: LoadReport | None = None  # the latest
        self.batch_fill = 0.0  # of the last iteration, 0..1
        self.prefix_queries = 0  # prompt tokens looked up so far
        self.prefix_hits = 0
        self._store_notice = StoreNotice(instance.name)
        self._pace = StepPace(instance.capacity.max_batch_tokens, stall_timeout_s)
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._now = asyncio.get_running_loop().time
        self._last_progress = self._now()  # an iteration ended, or work came to an idle instance
        self._new: dict[str, NewRequest] = {}  # not yet sent
        self._cancels: list[Cancel] = []
        self._to_send = asyncio.Event()
        self._recent: deque[tuple[float, int]] = deque()  # time and output tokens of recent batches
        self._tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._receive_all())]

    def submit(self, request: NewRequest, item: T) -> None:
        """Send soon, together with whatever else is submitted meanwhile."""
        if not self.assigned:
            self._last_progress = self._now()
        self.assigned[request.request_id] = item
        self._new[request.request_id] = request
        self._to_send.set()

    def cancel(self, engine_id: str, reason: FinishReason) -> None:
        """Let go of a request: none of its outputs is passed on any more, and the instance is told to end it."""
        self.assigned.pop(engine_id, None)
        if self._new.pop(engine_id, None) is None:
            self._cancels.append(Cancel(engine_id, reason))
            self._to_send.set()

    def is_stalled(self) -> bool:
        """Whether work is there and no iteration has ended for longer than one can be expected to take."""
        return bool(self.assigned) and self._now() - self._last_progress > self._pace.allowed_s

    def tokens_per_s(self) -> float:
        """Output tokens per second of late."""
        self._forget_old(self._now())
        return sum(count for _, count in self._recent) / RATE_WINDOW_S

    def detach(self) -> None:
        """Stop using the instance, without a word to it. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _send_all(self) -> None:
        try:
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                await self._send()
        except Exception as error:
            self._lose(error)

    async def _send(self) -> None:
        new, self._new = self._new, {}
        cancels, self._cancels = self._cancels, []
        if new:
            await self.instance.submit(list(new.values()))
        if cancels:
            await self.instance.cancel(cancels)

    async def _receive_all(self) -> None:
        try:
            while True:
                for batch in await self.instance.next_outputs():
                    self._note(batch)
                    self._on_outputs(self, batch)
        except Exception as error:
            self._lose(error)

    def _note(self, batch: OutputBatch) -> None:
        now = self._now()
        self.load = batch.load
        self._store_notice.note(batch)
        if batch.request_ids:
            self._recent.append((now, len(batch.request_ids)))
            self._forget_old(now)
        if (stats := batch.stats) is not None:
            self._last_progress = now
            if stats.num_tokens:
                self._pace.note(stats.num_tokens, stats.run_s)
            self.batch_fill = stats.num_tokens / max(stats.batch_tokens, 1)
            self.prefix_queries += stats.prefix_queries
            self.prefix_hits += stats.prefix_hits

    def _forget_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()

    def _lose(self, error: Exception) -> None:
        if self.lost.done():
            return
        if isinstance(error, InstanceLost):
            log.error("%s", error)
        else:
            log.error("%s is given up after a fault in using it", self.instance.name, exc_info=error)
        self.detach()
        self.lost.set_result(None)
        self._on_lost(self)
