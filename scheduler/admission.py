"""Which waiting requests are started in an iteration.

In order of arrival, as far as slots, this iteration's prefill tokens and the forecast of pages allow. One that
does not fit may be passed by later ones, but only so often: then nobody is started before it. With a KV store, one
that waits for its answer, or for a load that another has begun, lets others pass, and one whose pages are there
starts when they have come. Knows nothing of decodes, preemption or results.
"""

from __future__ import annotations

from bisect import bisect
from typing import Any

import numpy as np

from scheduler import batcher
from scheduler.kv_pages import PagePool
from scheduler.kv_transfer import KVTransfer
from scheduler.memory_forecast import OutputLengths, PageForecast, SurvivalCurve
from scheduler.plan import EngineCapacity, SlotStart
from scheduler.plan_draft import PlanDraft
from scheduler.residence import Residence
from scheduler.scheduler_config import SchedulerConfig
from scheduler.slot_table import SlotState, SlotTable
from scheduler.tracked_request import TrackedRequest

_MAX_ASKING = 256  # waiting requests that may be passed in one iteration because they wait for the store


class Admission:
    """Moves requests from the queue to slots."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: EngineCapacity,
        residence: Residence,
        lengths: OutputLengths,
        transfer: KVTransfer | None = None,
    ) -> None:
        self._config = config
        self._capacity = capacity
        self._residence = residence
        self._pool = residence.pool
        self._slots = residence.slots
        self._waiting = residence.waiting
        self._lengths = lengths
        self._transfer = transfer

    def start(self, draft: PlanDraft, num_tokens: int, now: float) -> None:
        """Start what fits into num_tokens prefill tokens beside the prefills that run already.

        When anyone is started, somebody will get a row: there are pages for all who share the tokens.
        """
        if not len(self._waiting) or not self._slots.has_free or num_tokens <= 0:
            return
        room = _Room(self._config, self._capacity, self._pool, self._slots, num_tokens)
        forecast = _Forecast(self._capacity, self._pool, self._slots, self._lengths)
        blocked: list[TrackedRequest] = []  # do not fit
        num_asking = 0  # wait for the store
        while len(blocked) < self._config.lookahead and num_asking < _MAX_ASKING:
            index = len(blocked) + num_asking
            if index >= len(self._waiting) or not self._slots.has_free or not room.has_room or self._is_barred(blocked):
                return
            request = self._waiting[index]
            if self._transfer is not None and self._transfer.waits(request, now):
                num_asking += 1
                continue
            hits = self._find_prefix(request)
            num_loads = 0
            if self._transfer is not None:
                if self._transfer.waits_beyond(request, len(hits), now):
                    num_asking += 1
                    continue
                num_loads = self._transfer.num_worth_loading(request, len(hits))
            if room.takes(request, hits, num_loads) and forecast.takes(request, hits):
                room.take(request, hits, num_loads)
                self._place(draft, request, hits, num_loads, now)
            else:
                blocked.append(request)

    def begin_loaded(self, draft: PlanDraft, now: float) -> None:
        """Tell of the slots that get their first row in this iteration after a load."""
        for slot, start, _, _ in draft.chunks:
            request = self._slots.request(slot)
            if request.fetch is not None:
                self._begin(draft, request, start, now)

    def _is_barred(self, blocked: list[TrackedRequest]) -> bool:
        """Whether one of those that do not fit must not be passed any more."""
        return any(request.passes >= self._config.max_passes for request in blocked)

    def _find_prefix(self, request: TrackedRequest) -> list[int]:
        """Pages that hold its leading tokens already; at least one token is left to compute."""
        hits: list[int] = []
        if self._config.enable_prefix_caching:
            page_size = self._capacity.page_size
            for index in range((len(request.tokens) - 1) // page_size):
                page = self._pool.find(request.digest(index, page_size))
                if page is None:
                    break
                hits.append(page)
        return hits

    def _place(self, draft: PlanDraft, request: TrackedRequest, hits: list[int], num_loads: int, now: float) -> None:
        self._residence.place(request, hits)
        if self._transfer is not None:
            self._transfer.start(draft, request, num_loads, now)
        if not num_loads:
            self._begin(draft, request, len(hits) * self._capacity.page_size, now)

    def _begin(self, draft: PlanDraft, request: TrackedRequest, num_cached: int, now: float) -> None:
        """Its first num_cached tokens lie in its pages: from now on the ranks know it."""
        if request.queue_s < 0:  # its first start
            request.queue_s = now - request.arrived_s
            request.num_cached = num_cached
            if request.fetch is not None and self._transfer is not None:
                request.num_cpu_cached, request.num_ssd_cached = self._transfer.tokens_by_tier(request.fetch)
            draft.prefix_queries += request.prompt_len
            draft.prefix_hits += num_cached - request.num_cpu_cached - request.num_ssd_cached
            draft.cpu_hits += request.num_cpu_cached
            draft.ssd_hits += request.num_ssd_cached
        request.fetch = None
        sampling = request.request.sampling
        draft.add_pages(request.slot, 0, request.pages[: num_cached // self._capacity.page_size])
        draft.starts.append(
            SlotStart(
                slot=request.slot,
                request_id=request.request.request_id,
                token_ids=np.array(request.tokens, np.int32),
                num_cached=num_cached,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
            )
        )


class _Room:
    """What is left for newcomers in one iteration."""

    def __init__(
        self, config: SchedulerConfig, capacity: EngineCapacity, pool: PagePool, slots: SlotTable, num_tokens: int
    ) -> None:
        self._capacity = capacity
        self._pool = pool
        self._share = config.oldest_prefill_share
        self._num_tokens = num_tokens
        running = slots.by_arrival(SlotState.PREFILL)
        self._arrivals: list[int] = slots.arrival[running].tolist()
        self._remaining: list[int] = (slots.known - slots.computed)[running].tolist()  # in order of arrival
        wanted = np.minimum(slots.computed[running] + num_tokens, slots.known[running])
        wanted_pages = -(-wanted // capacity.page_size) - slots.num_pages[running]
        self._pages_left = pool.num_available - int(wanted_pages.sum())

    @property
    def has_room(self) -> bool:
        """Whether any newcomer, however short, would get a token."""
        return self._pages_left > 0 and batcher.prefill_room(self._num_tokens, self._remaining, self._share, 1) > 0

    def takes(self, request: TrackedRequest, hits: list[int], num_loads: int) -> bool:
        """Whether it would get a token in this iteration if nothing had to be loaded, all pages to load, and one."""
        to_compute = len(request.tokens) - (len(hits) + num_loads) * self._capacity.page_size
        if not batcher.prefill_room(self._num_tokens, self._remaining, self._share, to_compute):
            return False
        return self._pages_left > self._pool.num_cached_among(hits) + num_loads

    def take(self, request: TrackedRequest, hits: list[int], num_loads: int) -> None:
        """Count it in, before its hits are acquired. While it loads, it takes no tokens."""
        self._pages_left -= self._pool.num_cached_among(hits) + num_loads
        if num_loads:
            return
        to_compute = len(request.tokens) - len(hits) * self._capacity.page_size
        index = bisect(self._arrivals, request.arrival)
        self._arrivals.insert(index, request.arrival)
        self._remaining.insert(index, to_compute)
        chunk = min(to_compute, self._num_tokens)
        self._pages_left -= -(-chunk // self._capacity.page_size)


class _Forecast:
    """Whether pages will suffice for one more request, until all have ended."""

    def __init__(self, capacity: EngineCapacity, pool: PagePool, slots: SlotTable, lengths: OutputLengths) -> None:
        self._capacity = capacity
        self._pool = pool
        self._slots = slots
        self._lengths = lengths
        # If all reach their limits: often enough known, and cheaper than the forecast.
        self._most_pages = int(self._pages_at_end(slots.limit[slots.live()]).sum())
        self._expected: tuple[SurvivalCurve, PageForecast] | None = None

    def takes(self, request: TrackedRequest, hits: list[int]) -> bool:
        """Whether it fits beside all who are placed; if so, place it next, for it is counted in."""
        is_alone = not self._most_pages  # then it always fits: one that does not was refused when it came
        most_pages = self._most_pages + int(self._pages_at_end(request.limit))
        if is_alone or (self._expected is None and most_pages <= self._capacity.num_pages):
            self._most_pages = most_pages
            return True
        curve, forecast = self._expected = self._expected or self._expect()
        num_known = len(request.tokens)
        generated, most = np.array([num_known - request.prompt_len]), np.array([request.limit - num_known])
        own_tokens = num_known - len(hits) * self._capacity.page_size
        remaining = float(curve.expected_remaining(generated, most)[0])
        return forecast.admit(own_tokens, remaining, self._capacity.num_pages)

    def _pages_at_end(self, limit: Any) -> Any:
        """Pages of a request that reaches its limit; the last token's KV is never computed."""
        return -(-(limit - 1) // self._capacity.page_size)

    def _expect(self) -> tuple[SurvivalCurve, PageForecast]:
        slots, live = self._slots, self._slots.live()
        known = slots.known[live]
        generated = known - slots.prompt_len[live]
        curve = self._lengths.curve(generated)
        page_size = self._capacity.page_size
        own_tokens = np.maximum(known, slots.computed[live]) - slots.num_hit[live] * page_size
        remaining = curve.expected_remaining(generated, slots.limit[live] - known)
        forecast = PageForecast(self._lengths.edges, page_size, self._pool.num_hit, own_tokens, remaining)
        return curve, forecast
