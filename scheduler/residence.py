"""Where requests are: in the queue, in a slot with pages, or leaving it when the steps in flight have finished.

Keeps the one rule of running ahead: a slot and its pages are given to others only after the last planned step
that touches them has finished, and pages also only after the moves that refer to them have. Knows nothing of
policy: not who is placed, preempted or ended, nor why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler.kv_pages import PagePool
from scheduler.plan import EngineCapacity, IterationPlan
from scheduler.slot_table import SlotState, SlotTable
from scheduler.tracked_request import TrackedRequest
from scheduler.waiting_queue import WaitingQueue


class Residence:
    """Queue, slots and pages of one instance; the one place where requests move between them."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.pool = PagePool(capacity.num_pages)
        self.slots = SlotTable(capacity.max_slots, capacity.page_size)
        self.waiting = WaitingQueue()
        self.num_planned = 0  # steps [0, num_planned) have been planned,
        self.num_finished = 0  # and [0, num_finished) of them have finished
        self.num_preemptions = 0
        self._leaving: dict[int, list[int]] = {}  # step: slots that are free once it has finished
        self._held: Counter[int] = Counter()  # references of moves to pages
        self._returned: list[TrackedRequest] = []  # back in the queue, and nobody has looked at them yet

    def step_planned(self, plan: IterationPlan) -> None:
        """The plan touches its slots until it has finished."""
        self.num_planned += 1
        self.slots.last_step[plan.slots] = plan.step

    def step_finished(self) -> None:
        """The oldest step in flight has finished: nothing of it touches a slot any more."""
        self.num_finished += 1

    def free_left(self) -> None:
        """Free what waited for the steps that have finished."""
        for step in [step for step in self._leaving if step < self.num_finished]:
            for slot in self._leaving.pop(step):
                self._vacate(slot)

    def place(self, request: TrackedRequest, hits: list[int]) -> int:
        """From the queue to a slot, with pages that hold its leading tokens already."""
        self.waiting.remove(request)
        self.waiting.count_pass(request)
        self.pool.acquire(hits)
        request.pages = hits
        request.num_published = len(hits)
        return self.slots.place(request)

    def add_pages(self, slot: int, num_pages: int) -> list[int]:
        """More pages for a slot, of those available."""
        pages, request = self.pool.allocate(num_pages), self.slots.request(slot)
        request.pages.extend(pages)
        self.slots.num_pages[slot] = len(request.pages)
        return pages

    def start_load(self, slot: int, num_pages: int) -> list[int]:
        """The slot gets so many more pages and waits until their contents have come."""
        self.slots.state[slot] = SlotState.LOADING
        return self.add_pages(slot, num_pages)

    def end_load(self, slot: int, num_pages: int) -> None:
        """The slot's first num_pages pages hold its tokens; it goes on from there, and its other pages are free."""
        request, table = self.slots.request(slot), self.slots
        self.pool.release(request.pages[num_pages:])
        del request.pages[num_pages:]
        request.num_published = table.num_pages[slot] = num_pages
        table.computed[slot] = num_pages * table.page_size
        table.state[slot] = SlotState.PREFILL

    def withdraw(self, slot: int) -> None:
        """From a slot that loads back to the queue; the load's own reference to its pages stays."""
        assert self.slots.state[slot] == SlotState.LOADING, "only a load can be withdrawn"
        self._to_queue(slot)

    def hold(self, pages: Sequence[int]) -> None:
        """A move refers to these pages: they are given to nobody else before release_held()."""
        self.pool.hold(pages)
        self._held.update(pages)

    def release_held(self, pages: Sequence[int], as_oldest: bool = False) -> None:
        """Nothing of the move touches its pages any more; as_oldest: as in PagePool.release()."""
        self.pool.release(pages, as_oldest)
        self._held.subtract(pages)
        for page in pages:
            if not self._held[page]:
                del self._held[page]

    def take_returned(self) -> list[TrackedRequest]:
        """Preempted requests that have come back to the queue since the last call and still wait there."""
        returned, self._returned = self._returned, []
        return returned

    def preempt(self, slot: int) -> int:
        """From a slot back to the queue; pages that become available later, if not all did at once."""
        request = self.slots.request(slot)
        num_pages = self.pool.num_sole(request.pages)
        self.slots.save_tokens(slot, int(self.slots.known[slot]))
        self.slots.state[slot] = SlotState.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        return num_pages if self._leave(slot) else 0

    def remove(self, request: TrackedRequest) -> None:
        """Out of the house, from wherever it is: it has ended."""
        slot = request.slot
        if slot < 0:
            self.waiting.remove(request)
            if request in self._returned:
                self._returned.remove(request)
            return
        leaves_already = self.slots.state[slot] == SlotState.PREEMPTED
        self.slots.state[slot] = SlotState.ENDED
        if not leaves_already:
            self._leave(slot)

    def num_pages_coming(self) -> int:
        """Pages that the steps in flight will make available for sure."""
        slots = [slot for leaving in self._leaving.values() for slot in leaving]
        slots += self.slots.where(SlotState.DRAIN).tolist()
        return sum(self.pool.num_sole(self.slots.request(slot).pages) for slot in slots)

    def _leave(self, slot: int) -> bool:
        """Free a slot as soon as no step in flight touches it; False when that was at once."""
        last_step = int(self.slots.last_step[slot])
        in_flight = last_step >= self.num_finished
        if in_flight:
            self._leaving.setdefault(last_step, []).append(slot)
        else:
            self._vacate(slot)
        return in_flight

    def _vacate(self, slot: int) -> None:
        if self.slots.state[slot] == SlotState.PREEMPTED:
            self._returned.append(self._to_queue(slot))
        else:
            self._empty(slot)

    def _to_queue(self, slot: int) -> TrackedRequest:
        request = self._empty(slot)
        self.waiting.push(request)
        return request

    def _empty(self, slot: int) -> TrackedRequest:
        request = self.slots.vacate(slot)
        self.pool.release(request.pages)
        request.pages = []
        return request

    def check_integrity(self) -> None:
        """Assert that queue, slots, pages and steps in flight agree."""
        self.slots.check_integrity()
        self.waiting.check_integrity()
        held = [request for request in self.slots.requests if request is not None]
        self.pool.check_integrity(self._held + Counter(page for request in held for page in request.pages))
        assert all(request.slot < 0 for request in self._returned), "a request is both placed and back in the queue"
        leaving = sorted(slot for slots in self._leaving.values() for slot in slots)
        due = (self.slots.state >= SlotState.PREEMPTED).nonzero()[0].tolist()
        assert leaving == due, "a slot would be freed twice or never"
        assert 0 <= self.num_finished <= self.num_planned, "more steps finished than planned"
        in_flight = range(self.num_finished, self.num_planned)
        assert all(step in in_flight for step in self._leaving), "a slot waits for a step that is not in flight"
