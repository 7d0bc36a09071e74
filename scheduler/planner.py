"""Makes the rows of one iteration: all live decodes, then prefill chunks, preemption when pages run out.

Knows nothing of results, ends or the clock's meaning; it acts on the Residence, as far as steps are planned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler import batcher
from scheduler.admission import Admission
from scheduler.kv_transfer import KVTransfer
from scheduler.latency_cap import LatencyCap
from scheduler.plan import EngineCapacity
from scheduler.plan_draft import PlanDraft
from scheduler.residence import Residence
from scheduler.scheduler_config import SchedulerConfig
from scheduler.slot_table import SlotState

Int32 = NDArray[np.int32]


class Planner:
    """Fills iterations of constant size."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: EngineCapacity,
        residence: Residence,
        admission: Admission,
        cap: LatencyCap | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        """cap: rows that prefills may fill up to, where there is a target for latency; decodes always run."""
        self._config = config
        self._page_size = capacity.page_size
        self._max_tokens = capacity.max_batch_tokens
        self._residence = residence
        self._slots = residence.slots
        self._pool = residence.pool
        self._admission = admission
        self._cap = cap
        self._transfer = transfer

    @property
    def max_tokens(self) -> int:
        """Token rows that an iteration may have now, if its decodes need no more."""
        return self._max_tokens if self._cap is None else self._cap.batch_tokens

    def draft(self, now: float) -> PlanDraft:
        """The next iteration; without rows when there is nothing to compute until a result is there."""
        draft = PlanDraft()
        if self._transfer is not None:
            self._transfer.saves.add_evacuations(draft)
        self._fill(draft, now)
        while not draft.num_rows and not draft.moves and self._unblock(draft):
            self._fill(draft, now)
        if self._transfer is not None:
            self._admission.begin_loaded(draft, now)
            self._transfer.saves.add_by_policy(draft)
        assert draft.num_rows or not draft.starts, "a request was started without a row for anybody"
        return draft

    def _fill(self, draft: PlanDraft, now: float) -> None:
        self._add_decodes(draft)
        num_tokens, may_start = self._room_beside(draft.decodes)
        if may_start and not draft.num_preemptions:  # else pages are short: nobody new
            self._admission.start(draft, num_tokens, now)
        self._add_prefills(draft, num_tokens)

    def _room_beside(self, decodes: Int32) -> tuple[int, bool]:
        """Tokens for prefills, and whether anybody new may come."""
        free = self._max_tokens - len(decodes)
        if self._cap is None:
            return free, True
        num_running = len(decodes) + len(self._slots.where(SlotState.PREFILL))
        num_running += len(self._slots.where(SlotState.LOADING))
        # Prefills that run go on in any case; they will decode, so that newcomers must leave them a row each.
        return min(free, max(1, self.max_tokens - len(decodes))), num_running < self.max_tokens

    def _add_decodes(self, draft: PlanDraft) -> None:
        """All live decodes, also those whose input token is still being sampled."""
        table = self._slots
        slots = table.where(SlotState.DECODE)
        # Each decode had a row in the iteration before, as a decode or as its prompt's last chunk.
        assert len(slots) <= self._max_tokens, "more decodes than rows"
        growing = slots[table.computed[slots] == table.num_pages[slots] * self._page_size]
        if len(growing) > self._pool.num_available:
            slots, growing = self._make_room(draft, slots, growing)
        draft.decodes, draft.decode_starts = slots, table.computed[slots]
        draft.grown_slots, draft.grown_indexes = growing, table.num_pages[growing]
        draft.grown_pages = self._pool.allocate(len(growing))
        for slot, page in zip(growing.tolist(), draft.grown_pages):
            table.request(slot).pages.append(page)
        table.num_pages[growing] += 1
        table.computed[slots] += 1
        table.state[slots[table.computed[slots] + 1 == table.limit[slots]]] = SlotState.DRAIN

    def _add_prefills(self, draft: PlanDraft, num_tokens: int) -> None:
        table = self._slots
        slots = table.by_arrival(SlotState.PREFILL)
        remaining = (table.known[slots] - table.computed[slots]).tolist()
        grants = batcher.share_prefill(num_tokens, remaining, self._config.oldest_prefill_share)
        for slot, num_granted in zip(slots.tolist(), grants):
            self._add_chunk(draft, slot, num_granted)

    def _add_chunk(self, draft: PlanDraft, slot: int, num_granted: int) -> None:
        """The next num_granted tokens of a prefill, or as many as there are pages for."""
        table = self._slots
        start, known, num_pages = int(table.computed[slot]), int(table.known[slot]), int(table.num_pages[slot])
        count = min(num_granted, (num_pages + self._pool.num_available) * self._page_size - start)
        if count <= 0:
            return
        end = start + count
        draft.add_pages(slot, num_pages, self._residence.add_pages(slot, -(-end // self._page_size) - num_pages))
        draft.chunks.append((slot, start, count, end == known))
        table.computed[slot] = end
        if end == known:
            table.state[slot] = SlotState.DRAIN if end + 1 == table.limit[slot] else SlotState.DECODE

    def _make_room(self, draft: PlanDraft, slots: Int32, growing: Int32) -> tuple[Int32, Int32]:
        """Preempt until the pages that come free cover the growing decodes; those without a page now sit out."""
        num_coming = self._residence.num_pages_coming() + self._num_evacuating
        victims = self._victims()
        while len(growing) > self._pool.num_available + num_coming and len(victims) > 1:
            victim = victims.pop()
            draft.num_preemptions += 1
            num_coming += self._residence.preempt(victim)
            slots, growing = slots[slots != victim], growing[growing != victim]
        by_arrival = growing[np.argsort(self._slots.arrival[growing])]
        sitting_out = by_arrival[self._pool.num_available :]
        return slots[~np.isin(slots, sitting_out)], growing[~np.isin(growing, sitting_out)]

    def _unblock(self, draft: PlanDraft) -> bool:
        """Nothing could be planned: whether a preemption has made pages for another try.

        That is so when prompts hold all pages, none can go on, and no result will change it.
        """
        if self._residence.num_planned > self._residence.num_finished or self._num_evacuating:
            return False
        victims = self._victims()
        if len(victims) < 2 and self._transfer is not None and (self._transfer.num_moving or self._transfer.is_asking):
            return False
        if not victims:
            assert not len(self._residence.waiting), "requests wait and nothing runs"
            return False
        assert len(victims) > 1, "a request alone does not fit into the pages"
        draft.num_preemptions += 1
        self._residence.preempt(victims[-1])
        return True

    @property
    def _num_evacuating(self) -> int:
        """Pages that come free as soon as the store has them."""
        return 0 if self._transfer is None else self._transfer.saves.num_pages_coming

    def _victims(self) -> list[int]:
        """Slots whose preemption gives pages, in order of arrival: the latest goes first."""
        table = self._slots
        can = (table.state == SlotState.PREFILL) | (table.state == SlotState.DECODE)
        slots = np.flatnonzero(can & (table.num_pages > 0))
        victims: list[int] = slots[np.argsort(table.arrival[slots])].tolist()
        return victims
