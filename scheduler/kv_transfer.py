"""The KV store as the scheduler uses it: pages that requests get from it, and pages that it is given.

A load belongs to a slot that waits for it; a save belongs to nobody. Both refer to their pages until the executor
says that they have ended, whatever becomes of the request in the meantime: a copy that comes late never reaches a
page that is another's by then. Pages that are being loaded are loaded once: others that need them wait for that
load. Knows nothing of who is started, nor of what the store or a copy is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.move_costs import MoveCosts
from scheduler.page_moves import PageMoves
from scheduler.page_saves import PageSaves
from scheduler.plan import EngineCapacity, KVMove, KVMoveResult, MoveCounts, MoveKind, StoreTier
from scheduler.plan_draft import PlanDraft
from scheduler.ports import PrefixStore
from scheduler.prefetch import Prefetch
from scheduler.residence import Residence
from scheduler.scheduler_config import StoreConfig, WritePolicy
from scheduler.slot_table import SlotState
from scheduler.tracked_request import Fetch, TrackedRequest


@dataclass(frozen=True, slots=True)
class _Load:
    """For whom pages are loaded. The request may have left the slot since, or wait for another load."""

    request: TrackedRequest
    fetch: Fetch
    tiers: tuple[StoreTier, ...]  # of its pages
    overdue_s: float  # from then on nobody waits for it


class KVTransfer:
    """Questions, loads and saves of one instance."""

    def __init__(self, config: StoreConfig, store: PrefixStore, capacity: EngineCapacity, residence: Residence) -> None:
        self._config = config
        self._store = store
        self._page_size = capacity.page_size
        self._residence = residence
        self.costs = MoveCosts(capacity.page_size)
        self._moves = PageMoves(residence, config.move_timeout_s)
        self.saves = PageSaves(config, capacity, residence, self._moves, self.costs, lambda: store.is_off)
        self._prefetch = Prefetch(config, store, capacity.page_size, self.saves.learn)
        self._loads: dict[int, _Load] = {}  # by the number of a move on the way
        self._coming: dict[bytes, int] = {}  # contents that are being loaded, and are not overdue: the move's number
        self._num_skipped = 0  # pages so far
        self._told = MoveCounts()  # so far, of what is counted as a total

    @property
    def is_busy(self) -> bool:
        """Whether moves are on the way or due: their results need plans, though no request is left."""
        return len(self._moves) > 0 or self.saves.is_busy

    @property
    def num_moving(self) -> int:
        """Moves on the way."""
        return len(self._moves)

    @property
    def is_off(self) -> bool:
        """Whether the store is not asked for a while, after faults."""
        return self._store.is_off

    @property
    def is_asking(self) -> bool:
        """Whether an answer is due."""
        return self._prefetch.num_unanswered > 0

    # --- requests that wait ---

    def ask(self, request: TrackedRequest, now: float) -> None:
        """A request has entered the queue."""
        # Written back, a chain's pages come to the store last ones first, while the GPU still has the first ones.
        is_write_back = self._config.write_policy is WritePolicy.WRITE_BACK
        self._prefetch.ask(request, now, self._num_on_gpu(request) if is_write_back else 0)

    def update(self, returned: Iterable[TrackedRequest], now: float) -> None:
        """Before each plan: take answers, ask again for requests back in the queue, give up loads that are overdue.

        Raises ExecutorError when a move should have ended long ago.
        """
        self._moves.check_time(now)
        self._prefetch.take_answers()
        for request in returned:
            self.leave(request)
            if not self.saves.evacuate(request, now):
                self.ask(request, now)
        for request in self.saves.take_evacuated(now):
            self.ask(request, now)
        for number, load in list(self._loads.items()):
            if load.overdue_s <= now:
                self._not_coming(self._moves[number])
                if load.request.fetch is load.fetch:
                    self.leave(load.request)
                    self._residence.withdraw(load.request.slot)

    def waits(self, request: TrackedRequest, now: float) -> bool:
        """Whether its start is put off for the store's answer."""
        return self._prefetch.waits(request, now)

    def waits_beyond(self, request: TrackedRequest, num_hits: int, now: float) -> bool:
        """Whether its start is put off for what comes after the first num_hits pages, which the GPU holds.

        That is so while another request's load brings the next page, or when the GPU has lost pages since the store
        was asked for those after them, until it has answered anew.
        """
        if num_hits < len(request.digests) and request.digests[num_hits] in self._coming:
            return num_hits < (len(request.tokens) - 1) // self._page_size
        fetch = request.fetch
        if fetch is None or num_hits >= fetch.first_asked:
            return False
        self._prefetch.close(fetch)
        self._prefetch.ask(request, now, num_hits)
        return self._prefetch.waits(request, now)

    def num_worth_loading(self, request: TrackedRequest, num_hits: int) -> int:
        """Pages after the first num_hits, which the GPU holds, that the store has and that are cheaper to load."""
        tiers = () if request.fetch is None else request.fetch.tiers_from(num_hits)
        return self.costs.num_worth_loading(tiers) if tiers else 0

    def leave(self, request: TrackedRequest) -> None:
        """It starts without the store, or has ended, or asks anew. A load on its way keeps its ticket and pages."""
        fetch, request.fetch = request.fetch, None
        if fetch is not None and fetch.first_page < 0:
            self._prefetch.close(fetch)
        self.saves.leave(request)

    # --- requests that start ---

    def start(self, draft: PlanDraft, request: TrackedRequest, num_loads: int, now: float) -> None:
        """It was just placed on pages of the GPU; bring its next num_loads pages."""
        num_hits = len(request.pages)
        if request.queue_s < 0:
            self.saves.hit(request.pages, request.digests[:num_hits])
        fetch = request.fetch
        tiers = () if fetch is None else fetch.tiers_from(num_hits)
        if num_loads < len(tiers):
            self._num_skipped += len(tiers) - num_loads
            self.costs.skipped(tiers)
        if not num_loads:
            self.leave(request)
            return
        assert fetch is not None, "a load without an answer"
        self.saves.leave(request)
        fetch.first_page = num_hits
        pages = self._residence.start_load(request.slot, num_loads)
        move = self._moves.start(draft, MoveKind.LOAD, pages, request.digests[num_hits : num_hits + num_loads])
        self._loads[move.number] = _Load(request, fetch, tiers[:num_loads], now + self._config.load_timeout_s)
        self._coming.update(dict.fromkeys(move.digests, move.number))

    def tokens_by_tier(self, fetch: Fetch) -> tuple[int, int]:
        """Tokens that a load has brought, from CPU and from SSD."""
        tiers = fetch.tiers_from(fetch.first_page)[: fetch.num_loaded]
        num_ssd = tiers.count(StoreTier.SSD)
        return (len(tiers) - num_ssd) * self._page_size, num_ssd * self._page_size

    # --- results ---

    def finish(self, results: Iterable[KVMoveResult]) -> MoveCounts:
        """Take in what has ended. Raises ExecutorError for a result that belongs to no move on the way."""
        num_done, num_failed = Counter[MoveKind](), Counter[MoveKind]()
        num_rank_faults = num_rank_trips = 0
        for result in results:
            move = self._moves.take(result)
            num_rank_faults += result.num_faults
            num_rank_trips += result.num_trips
            num_done[move.kind] += result.num_pages
            num_failed[move.kind] += len(move.page_ids) - result.num_pages
            if move.kind is MoveKind.LOAD:
                self._end_load(move, result)
            else:
                self.saves.ended(move, result.num_pages, result.run_s)
        told = self._told
        self._told = MoveCounts(
            num_dropped=self.saves.num_dropped,
            num_skipped=self._num_skipped,
            num_requests_moved=self.saves.num_moved,
            num_faults=self._store.num_faults,
        )
        return MoveCounts(
            num_loaded=num_done[MoveKind.LOAD],
            num_load_failed=num_failed[MoveKind.LOAD],
            num_stored=num_done[MoveKind.STORE],
            num_store_failed=num_failed[MoveKind.STORE],
            num_dropped=self._told.num_dropped - told.num_dropped,
            num_skipped=self._told.num_skipped - told.num_skipped,
            num_requests_moved=self._told.num_requests_moved - told.num_requests_moved,
            num_faults=self._told.num_faults - told.num_faults,
            num_rank_faults=num_rank_faults,
            num_rank_trips=num_rank_trips,
        )

    def _end_load(self, move: KVMove, result: KVMoveResult) -> None:
        """The pages that came are as good as computed, even if their request is gone."""
        self._not_coming(move)
        load, num_pages = self._loads.pop(move.number), result.num_pages
        self.costs.loaded(load.tiers, num_pages, result.run_s)
        self.saves.not_there(move.digests[num_pages:])
        self._residence.pool.publish(move.page_ids[:num_pages], move.digests[:num_pages])
        self._prefetch.close(load.fetch)
        if load.request.fetch is load.fetch:
            load.fetch.num_loaded = num_pages
            self._residence.end_load(load.request.slot, load.fetch.first_page + num_pages)
        self._residence.release_held(move.page_ids)

    def _not_coming(self, move: KVMove) -> None:
        """Nobody waits for this load any more."""
        for digest in move.digests:
            if self._coming.get(digest) == move.number:
                del self._coming[digest]

    def _num_on_gpu(self, request: TrackedRequest) -> int:
        """Leading pages that the GPU holds now, of those that the store could be asked for."""
        num_pages = (len(request.tokens) - 1) // self._page_size
        if num_pages:
            request.digest(num_pages - 1, self._page_size)
        digests: Sequence[bytes] = request.digests[:num_pages]
        find = self._residence.pool.find
        return next((i for i, digest in enumerate(digests) if find(digest) is None), num_pages)

    # --- own invariants ---

    def check_integrity(self) -> None:
        """Assert that moves, slots and pages agree."""
        self._prefetch.check_integrity()
        self.saves.check_integrity()
        table = self._residence.slots
        loads = {move.number: move for move in self._moves if move.kind is MoveKind.LOAD}
        assert self._loads.keys() == loads.keys(), "a load is lost"
        waiting = [load.request.slot for load in self._loads.values() if load.request.fetch is load.fetch]
        assert sorted(waiting) == table.where(SlotState.LOADING).tolist(), "a slot waits for no load"
        pages = [page for load in loads.values() for page in load.page_ids]
        assert len(pages) == len(set(pages)), "two loads into one page"
        assert all(digest in loads[number].digests for digest, number in self._coming.items()), "a page never comes"
