"""The requests that hold a slot, as columns: what changes for every one of them in every iteration.

Arrays indexed by slot, so that a step of a thousand decodes costs a few numpy calls. Knows nothing of policy,
pages' contents or the queue.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.tracked_request import TrackedRequest

Int32 = NDArray[np.int32]


class SlotState:
    """Where a slot's request stands. The states LOADING to DRAIN are live: its results still count.

    Plain numbers, not an Enum, which numpy would convert in each of many comparisons per iteration.
    """

    FREE: Final = 0
    LOADING: Final = 1  # pages are on their way from the KV store; nothing is planned for it until then
    PREFILL: Final = 2  # known tokens are left to compute
    DECODE: Final = 3  # one token per iteration
    DRAIN: Final = 4  # all iterations that it needs are planned; the last result is on its way
    PREEMPTED: Final = 5  # goes back to the queue when the iterations in flight that touch it have finished
    ENDED: Final = 6  # has ended; iterations in flight may still touch its pages


class SlotTable:
    """Columns over [0, num_slots)."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.num_slots = num_slots
        self.page_size = page_size
        self.state = np.zeros(num_slots, np.int8)  # SlotState
        self.computed = np.zeros(num_slots, np.int32)  # tokens whose KV is computed, or planned to be
        self.known = np.zeros(num_slots, np.int32)  # tokens whose ids are known
        self.limit = np.zeros(num_slots, np.int32)  # TrackedRequest.limit
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)  # len(TrackedRequest.pages)
        self.num_hit = np.zeros(num_slots, np.int32)  # leading pages that came from the prefix cache
        self.arrival = np.zeros(num_slots, np.int64)
        self.last_step = np.full(num_slots, -1, np.int64)  # the last planned step that touches the slot
        self.tail = np.zeros((num_slots, page_size), np.int32)  # known tokens of the page being filled
        self.stops = np.full((num_slots, 1), -1, np.int32)  # stop ids, padded with -1; widened on demand
        self.ids = np.empty(num_slots, object)  # request ids
        self.requests: list[TrackedRequest | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack, lowest slot on top

    @property
    def has_free(self) -> bool:
        """Whether another request can be placed."""
        return bool(self._free)

    @property
    def num_taken(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def request(self, slot: int) -> TrackedRequest:
        """The request in a slot that is taken."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def where(self, state: int) -> Int32:
        """Slots in this state, ascending."""
        return np.flatnonzero(self.state == state).astype(np.int32)

    def by_arrival(self, state: int) -> Int32:
        """Slots in this state, in order of arrival."""
        slots = self.where(state)
        return slots[np.argsort(self.arrival[slots])]

    def live(self) -> Int32:
        """Slots whose results still count, ascending."""
        return np.flatnonzero(is_live(self.state)).astype(np.int32)

    def place(self, request: TrackedRequest) -> int:
        """Give a slot to a request; the pages that it has hold its leading tokens already."""
        slot = self._free.pop()
        known = len(request.tokens)
        stop_ids = request.request.sampling.stop_token_ids
        self.state[slot] = SlotState.PREFILL
        self.computed[slot] = len(request.pages) * self.page_size
        self.known[slot] = known
        self.limit[slot] = request.limit
        self.prompt_len[slot] = request.prompt_len
        self.num_pages[slot] = self.num_hit[slot] = len(request.pages)
        self.arrival[slot] = request.arrival
        self.last_step[slot] = -1
        partial = known % self.page_size
        self.tail[slot, :partial] = request.tokens[known - partial :]
        self._widen_stops(len(stop_ids))
        self.stops[slot] = -1
        self.stops[slot, : len(stop_ids)] = stop_ids
        self.ids[slot] = request.request.request_id
        self.requests[slot] = request
        request.slot = slot
        return slot

    def vacate(self, slot: int) -> TrackedRequest:
        """Take the request out of its slot."""
        request = self.request(slot)
        self.state[slot] = SlotState.FREE
        self.ids[slot] = None
        self.requests[slot] = None
        self._free.append(slot)
        request.slot = -1
        return request

    def append_tokens(self, slots: Int32, token_ids: Int32) -> None:
        """One more known token for each slot; a page that this begins must have been saved before."""
        self.tail[slots, self.known[slots] % self.page_size] = token_ids
        self.known[slots] += 1

    def save_tokens(self, slot: int, end: int) -> None:
        """Bring TrackedRequest.tokens up to `end` known tokens, which lie in the page being filled."""
        request = self.request(slot)
        have = len(request.tokens)
        if have < end:
            page_start = (end - 1) // self.page_size * self.page_size
            assert page_start <= have, "a page of tokens was not saved in time"
            request.tokens.frombytes(self.tail[slot, have - page_start : end - page_start].tobytes())

    def stopped(self, slots: Int32, token_ids: Int32) -> NDArray[np.bool_]:
        """[slots] whether the token is one of the slot's stop ids."""
        stopped: NDArray[np.bool_] = (self.stops[slots] == token_ids[:, None]).any(axis=1)
        return stopped

    def _widen_stops(self, width: int) -> None:
        missing = width - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)

    def check_integrity(self) -> None:
        """Assert the table's invariants."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot in range(self.num_slots):
            request = self.requests[slot]
            assert (slot in free) == (request is None) == (self.state[slot] == SlotState.FREE), f"slot {slot}"
            if request is not None:
                self._check_slot(slot, request)

    def _check_slot(self, slot: int, request: TrackedRequest) -> None:
        computed, known, pages = int(self.computed[slot]), int(self.known[slot]), len(request.pages)
        assert request.slot == slot, f"slot {slot} and its request disagree"
        assert request.prompt_len <= known <= request.limit, f"slot {slot}: tokens beyond the limit"
        assert pages == self.num_pages[slot], f"slot {slot}: pages miscounted"
        assert computed <= pages * self.page_size, f"slot {slot}: tokens without a page"
        if self.state[slot] == SlotState.LOADING:
            assert self.last_step[slot] < 0, f"slot {slot}: a row is planned while it loads"
            assert pages * self.page_size < known, f"slot {slot}: nothing would be left to compute"
        else:
            assert pages * self.page_size - computed < self.page_size, f"slot {slot}: more pages than it needs"
        if self.state[slot] == SlotState.PREFILL:
            assert computed < known, f"slot {slot}: nothing to prefill"
        if self.state[slot] in (SlotState.DECODE, SlotState.DRAIN):
            assert known <= computed + 1, f"slot {slot}: a token is known that was not sampled"


def has_result(states: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Whether what an iteration computed for slots of these states is kept."""
    return (states >= SlotState.LOADING) & (states <= SlotState.PREEMPTED)


def is_live(states: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Whether slots of these states have results that still count."""
    return (states >= SlotState.LOADING) & (states <= SlotState.DRAIN)
