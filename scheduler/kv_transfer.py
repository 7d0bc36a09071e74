"""The KV store as the scheduler uses it: pages that requests get from it, and pages that it is given.

A load belongs to a slot that waits for it; a store belongs to nobody. Both refer to their pages until the executor
says that they have ended, whatever becomes of the request in the meantime: a copy that comes late never reaches a
page that is another's by then. Knows nothing of who is started, nor of what the store or a copy is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.plan import EngineCapacity, KVMove, KVMoveResult, MoveCounts, MoveKind, StoreTier
from scheduler.plan_draft import PlanDraft
from scheduler.ports import ExecutorError, PrefixStore
from scheduler.prefetch import Prefetch
from scheduler.residence import Residence
from scheduler.scheduler_config import StoreConfig
from scheduler.slot_table import SlotState
from scheduler.store_backlog import StoreBacklog
from scheduler.tracked_request import Fetch, TrackedRequest

_MAX_HELD_SHARE = 8  # stores on the way hold at most one page in so many


@dataclass(frozen=True, slots=True)
class _Load:
    """For whom pages are loaded. The request may have left the slot since, or wait for another load."""

    request: TrackedRequest
    fetch: Fetch
    overdue_s: float  # from then on the request does not wait for it


class KVTransfer:
    """Questions, loads and stores of one instance."""

    def __init__(self, config: StoreConfig, store: PrefixStore, capacity: EngineCapacity, residence: Residence) -> None:
        self._config = config
        self._residence = residence
        self._prefetch = Prefetch(config, store, capacity.page_size, self._learn)
        self._backlog = StoreBacklog(config.backlog_pages, config.known_pages)
        self._max_storing = max(1, capacity.num_pages // _MAX_HELD_SHARE)
        self._num_storing = 0  # pages of stores on the way
        self._num_moves = 0
        self._moves: dict[int, KVMove] = {}  # on the way
        self._loads: dict[int, _Load] = {}  # of those, loads
        self._num_dropped_told = 0

    @property
    def is_busy(self) -> bool:
        """Whether moves are on the way or due: their results need plans, though no request is left."""
        return bool(self._moves) or len(self._backlog) > 0

    @property
    def num_moving(self) -> int:
        """Moves on the way."""
        return len(self._moves)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is due."""
        return self._prefetch.num_unanswered > 0

    # --- requests that wait ---

    def ask(self, request: TrackedRequest, now: float) -> None:
        """A request has entered the queue."""
        self._prefetch.ask(request, now)

    def update(self, returned: Iterable[TrackedRequest], now: float) -> None:
        """Before each plan: take answers, ask again for requests back in the queue, give up loads that are overdue."""
        self._prefetch.take_answers()
        for request in returned:
            self.leave(request)
            self._prefetch.ask(request, now)
        for load in list(self._loads.values()):
            if load.overdue_s <= now and load.request.fetch is load.fetch:
                self.leave(load.request)
                self._residence.withdraw(load.request.slot)

    def waits(self, request: TrackedRequest, now: float) -> bool:
        """Whether its start is put off for the store's answer."""
        return self._prefetch.waits(request, now)

    def num_loadable(self, request: TrackedRequest, num_hits: int) -> int:
        """Pages that the store can add to the first num_hits, which the GPU holds."""
        fetch = request.fetch
        return 0 if fetch is None or fetch.tiers is None else max(0, len(fetch.tiers) - num_hits)

    def leave(self, request: TrackedRequest) -> None:
        """It starts without the store, or has ended, or asks anew. A load on its way keeps its ticket and pages."""
        fetch, request.fetch = request.fetch, None
        if fetch is not None and fetch.first_page < 0:
            self._prefetch.close(fetch)

    # --- loads ---

    def load(self, draft: PlanDraft, slot: int, num_pages: int, now: float) -> None:
        """Bring the next num_pages pages of a slot that was just placed."""
        request = self._residence.slots.request(slot)
        fetch = request.fetch
        assert fetch is not None, "a load without an answer"
        fetch.first_page = len(request.pages)
        pages = self._residence.start_load(slot, num_pages)
        digests = request.digests[fetch.first_page : fetch.first_page + num_pages]
        number = self._move(draft, MoveKind.LOAD, pages, digests)
        self._loads[number] = _Load(request, fetch, now + self._config.load_timeout_s)

    def tokens_by_tier(self, fetch: Fetch) -> tuple[int, int]:
        """Tokens that a load has brought, from CPU and from SSD."""
        tiers = (fetch.tiers or ())[fetch.first_page : fetch.first_page + fetch.num_loaded]
        num_ssd, page_size = tiers.count(StoreTier.SSD), self._residence.slots.page_size
        return (len(tiers) - num_ssd) * page_size, num_ssd * page_size

    # --- stores ---

    def offer(self, digests: Sequence[bytes]) -> None:
        """Pages are full and published: the store gets them in a later plan, unless it has them."""
        if self._config.pages_per_step > 0:
            self._backlog.offer(digests)

    def add_stores(self, draft: PlanDraft) -> None:
        """Give the store what waits longest, as much as one iteration may."""
        room = min(self._config.pages_per_step, self._max_storing - self._num_storing)
        pages: list[int] = []
        digests: list[bytes] = []
        while len(pages) < room and len(self._backlog):
            digest = self._backlog.take()
            page = self._residence.pool.find(digest)
            if page is None:
                self._backlog.drop(digest)
            else:
                pages.append(page)
                digests.append(digest)
        if pages:
            self._move(draft, MoveKind.STORE, pages, digests)
            self._num_storing += len(pages)

    # --- results ---

    def finish(self, results: Iterable[KVMoveResult]) -> MoveCounts:
        """Take in what has ended. Raises ExecutorError for a result that belongs to no move on the way."""
        num_done, num_failed = Counter[MoveKind](), Counter[MoveKind]()
        for result in results:
            move = self._moves.get(result.number)
            if move is None or not 0 <= result.num_pages <= len(move.page_ids):
                raise ExecutorError(f"the result of move {result.number} belongs to no move on the way")
            del self._moves[result.number]
            num_done[move.kind] += result.num_pages
            num_failed[move.kind] += len(move.page_ids) - result.num_pages
            end = self._end_load if move.kind is MoveKind.LOAD else self._end_store
            end(move, result.num_pages)
            self._residence.release_held(move.page_ids)
        new = self._backlog.num_dropped - self._num_dropped_told
        self._num_dropped_told += new
        load, store = MoveKind.LOAD, MoveKind.STORE
        return MoveCounts(num_done[load], num_failed[load], num_done[store], num_failed[store], new)

    def _end_store(self, move: KVMove, num_pages: int) -> None:
        self._num_storing -= len(move.page_ids)
        self._backlog.stored(move.digests[:num_pages])
        self._backlog.failed(move.digests[num_pages:])

    def _end_load(self, move: KVMove, num_pages: int) -> None:
        """The pages that came are as good as computed, even if their request is gone."""
        load = self._loads.pop(move.number)
        self._backlog.forget(move.digests[num_pages:])
        self._residence.pool.publish(move.page_ids[:num_pages], move.digests[:num_pages])
        self._prefetch.close(load.fetch)
        if load.request.fetch is load.fetch:
            load.fetch.num_loaded = num_pages
            self._residence.end_load(load.request.slot, load.fetch.first_page + num_pages)

    def _move(self, draft: PlanDraft, kind: MoveKind, pages: Sequence[int], digests: Sequence[bytes]) -> int:
        move = KVMove(self._num_moves, kind, tuple(pages), tuple(digests))
        self._num_moves += 1
        self._residence.hold(move.page_ids)
        self._moves[move.number] = move
        draft.moves.append(move)
        return move.number

    def _learn(self, digests: Sequence[bytes], num_held: int) -> None:
        """What an answer says. Where the store has lost pages that the GPU still holds, it gets them again."""
        held, missing = digests[:num_held], digests[num_held:]
        self._backlog.learn(held)
        self._backlog.forget(missing)
        self.offer([digest for digest in missing if self._residence.pool.find(digest) is not None])

    # --- own invariants ---

    def check_integrity(self) -> None:
        """Assert that moves, slots and pages agree."""
        self._prefetch.check_integrity()
        self._backlog.check_integrity()
        table, moves = self._residence.slots, self._moves.values()
        stores = [move for move in moves if move.kind is MoveKind.STORE]
        assert self._num_storing == sum(len(move.page_ids) for move in stores), "stores miscounted"
        assert self._loads.keys() == {move.number for move in moves if move.kind is MoveKind.LOAD}, "a load is lost"
        waiting = [load.request.slot for load in self._loads.values() if load.request.fetch is load.fetch]
        assert sorted(waiting) == table.where(SlotState.LOADING).tolist(), "a slot waits for no load"
        pages = [page for load in self._loads for page in self._moves[load].page_ids]
        assert len(pages) == len(set(pages)), "two loads into one page"
