"""Which pages the KV store is given, and when: by policy, and those of a request that lost its place to others.

A preempted request's pages are *evacuated*: kept from others until they have been saved, if that and loading them
again is cheaper than to compute them. Its place in the queue does not wait for it. Knows nothing of questions, loads
and who is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from scheduler.move_costs import MoveCosts
from scheduler.page_moves import PageMoves
from scheduler.plan import EngineCapacity, KVMove, MoveKind
from scheduler.plan_draft import PlanDraft
from scheduler.residence import Residence
from scheduler.scheduler_config import StoreConfig, WritePolicy
from scheduler.store_backlog import StoreBacklog
from scheduler.tracked_request import TrackedRequest

_MAX_HELD_SHARE = 8  # saves by policy hold at most one page in so many,
_MAX_EVACUATED_SHARE = 4  # and evacuations one in so many
_SELECTIVE_HITS = 2
_COMING_S = 0.5  # for which pages that are evacuated count as coming; then more is preempted


@dataclass(slots=True, eq=False)
class _Evacuation:
    """Pages of a preempted request on their way to the store."""

    request: TrackedRequest | None  # to be told when it is over; None: it has started, or ended
    waiting: list[tuple[int, bytes]]  # pages and digests that are not in a move yet
    held: set[int]  # pages that nobody else may have yet
    overdue_s: float
    is_overdue: bool = False


class PageSaves:
    """What one instance gives to its store."""

    def __init__(
        self,
        config: StoreConfig,
        capacity: EngineCapacity,
        residence: Residence,
        moves: PageMoves,
        costs: MoveCosts,
        is_off: Callable[[], bool],
    ) -> None:
        """is_off: whether the store is not used for a while: it is given nothing then."""
        self._policy, self._most_per_step = config.write_policy, config.pages_per_step
        self._page_size = capacity.page_size
        self._residence, self._pool = residence, residence.pool
        self._moves, self._costs, self._is_off = moves, costs, is_off
        self._backlog = StoreBacklog(config.backlog_pages, config.known_pages)
        self._max_storing = max(1, capacity.num_pages // _MAX_HELD_SHARE)
        self._max_evacuating = max(1, capacity.num_pages // _MAX_EVACUATED_SHARE)
        self._num_storing = 0  # pages of saves by policy on the way
        self._evacuations: list[_Evacuation] = []
        self._evacuation_of: dict[int, _Evacuation] = {}  # by the number of a move on the way
        self._evacuated: list[TrackedRequest] = []  # nobody has heard of them yet
        self.num_moved = 0  # preempted requests so far whose pages are kept in the store
        if self._policy is WritePolicy.WRITE_BACK and self._most_per_step > 0:
            self._pool.on_give_up = self._backlog.given_up

    @property
    def is_busy(self) -> bool:
        """Whether pages wait for their turn."""
        return len(self._backlog) > 0 or any(each.waiting for each in self._evacuations)

    @property
    def num_dropped(self) -> int:
        """Pages so far that were to be given and will not be."""
        return self._backlog.num_dropped

    # --- what happens to pages ---

    def filled(self, digests: Sequence[bytes]) -> None:
        """Pages are full and published."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._offer(digests)

    def hit(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """A new request uses pages of the GPU that another has computed."""
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._pool.count_hits(pages)
            self._offer([digest for page, digest in zip(pages, digests) if self._is_due(page)])

    def learn(self, digests: Sequence[bytes], num_held: int) -> None:
        """The store says which it has. What it has lost and the GPU still holds, it gets again, by policy."""
        held, missing = digests[:num_held], digests[num_held:]
        self._backlog.learn(held)
        self._backlog.forget(missing)
        pages = ((self._pool.find(digest), digest) for digest in missing)
        self._offer([digest for page, digest in pages if page is not None and self._is_due(page)])

    def not_there(self, digests: Sequence[bytes]) -> None:
        """A load did not find these."""
        self._backlog.forget(digests)

    def _is_due(self, page: int) -> bool:
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return self._pool.num_hits(page) >= _SELECTIVE_HITS
        return self._policy is WritePolicy.WRITE_THROUGH

    def _offer(self, digests: Sequence[bytes]) -> None:
        if self._most_per_step > 0:
            self._backlog.offer(digests)

    # --- preempted requests ---

    def evacuate(self, request: TrackedRequest, now: float) -> bool:
        """It is back in the queue: save what it has computed if that pays; whether pages are on their way now.

        Leading pages only, as far as the GPU still has them and not too much is being evacuated.
        """
        pages, digests, num_kept = self._to_save(request)
        num_loads = min(num_kept, (len(request.tokens) - 1) // self._page_size)
        if not num_loads or not self._most_per_step or self._is_off():
            return False
        if not self._costs.is_worth_moving(len(pages), num_loads):
            self._costs.not_moved()
            return False
        self.num_moved += 1
        for digest in digests:
            self._backlog.send(digest)
        if pages:
            self._residence.hold(pages)
            self._evacuations.append(_Evacuation(request, list(zip(pages, digests)), set(pages), now + _COMING_S))
        return bool(pages)

    def _to_save(self, request: TrackedRequest) -> tuple[list[int], list[bytes], int]:
        """Pages to save and their digests; leading pages of the request that the store has then."""
        pages: list[int] = []
        digests: list[bytes] = []
        num_kept, room = 0, self._max_evacuating - sum(len(each.held) for each in self._evacuations)
        for digest in request.digests[: request.num_published]:
            if not self._backlog.knows(digest):  # one on its way is saved twice: so its arrival is waited for
                page = self._pool.find(digest)
                if page is None or len(pages) >= room:
                    break
                pages.append(page)
                digests.append(digest)
            num_kept += 1
        return pages, digests, num_kept

    def leave(self, request: TrackedRequest) -> None:
        """It has started or ended: nobody waits for its evacuation any more."""
        for evacuation in self._evacuations:
            if evacuation.request is request:
                evacuation.request = None
        if request in self._evacuated:
            self._evacuated.remove(request)

    def take_evacuated(self, now: float) -> list[TrackedRequest]:
        """Requests whose evacuation is over since the last call, and that still wait."""
        for evacuation in self._evacuations:
            evacuation.is_overdue = evacuation.overdue_s <= now
        evacuated, self._evacuated = self._evacuated, []
        return evacuated

    @property
    def num_pages_coming(self) -> int:
        """Pages that will soon be available, as their evacuation ends."""
        return sum(self._pool.num_sole(each.held) for each in self._evacuations if not each.is_overdue)

    # --- moves ---

    def add_evacuations(self, draft: PlanDraft) -> None:
        """Start to save what others wait for, as much as one iteration may."""
        room = self._most_per_step
        for evacuation in self._evacuations:
            batch, evacuation.waiting = evacuation.waiting[:room], evacuation.waiting[room:]
            if batch:
                pages, digests = zip(*batch)
                move = self._moves.start(draft, MoveKind.STORE, pages, digests)
                self._residence.release_held(pages)  # the move holds them now
                self._evacuation_of[move.number] = evacuation
                room -= len(batch)

    def add_by_policy(self, draft: PlanDraft) -> None:
        """Give the store what is due, as much as one iteration may."""
        if self._is_off():
            self._backlog.drop_waiting()
            return
        room = min(self._most_per_step, self._max_storing - self._num_storing)
        if room <= 0:
            return
        is_back = self._policy is WritePolicy.WRITE_BACK
        chosen = self._oldest(draft, room) if is_back else self._longest_waiting(room)
        if chosen:
            self._moves.start(draft, MoveKind.STORE, *zip(*chosen))
            self._num_storing += len(chosen)

    def _longest_waiting(self, room: int) -> list[tuple[int, bytes]]:
        chosen: list[tuple[int, bytes]] = []
        while len(chosen) < room and len(self._backlog):
            digest = self._backlog.take()
            page = self._pool.find(digest)
            if page is None:
                self._backlog.drop(digest)
            else:
                chosen.append((page, digest))
        return chosen

    def _oldest(self, draft: PlanDraft, room: int) -> list[tuple[int, bytes]]:
        """Of the pages that the next iterations may give up, those that the store does not have.

        Only beside rows: a store that takes nothing would else keep an idle engine busy.
        """
        num_near = min(self._most_per_step, self._max_storing) - self._pool.num_free
        if num_near <= 0 or not draft.num_rows:
            return []
        near = iter(self._pool.oldest_cached(num_near))
        return list(islice(((page, digest) for page, digest in near if self._backlog.claim(digest)), room))

    def ended(self, move: KVMove, num_pages: int, run_s: float) -> None:
        """A save is over, its first num_pages pages are in the store; releases its pages."""
        evacuation = self._evacuation_of.pop(move.number, None)
        self._costs.saved(num_pages, run_s)
        self._backlog.stored(move.digests[:num_pages])
        self._backlog.failed(move.digests[num_pages:])
        if evacuation is None:
            self._num_storing -= len(move.page_ids)
        else:
            evacuation.held.difference_update(move.page_ids)
            if not evacuation.held:
                self._evacuations.remove(evacuation)
                self._evacuated += [evacuation.request] if evacuation.request is not None else []
        is_write_back = self._policy is WritePolicy.WRITE_BACK and evacuation is None
        self._residence.release_held(move.page_ids, as_oldest=is_write_back)

    # --- own invariants ---

    def check_integrity(self) -> None:
        """Assert that moves and what is known of them agree."""
        stores = [move for move in self._moves if move.kind is MoveKind.STORE]
        on_way = [digest for move in stores for digest in move.digests]
        self._backlog.check_integrity(on_way + [digest for each in self._evacuations for _, digest in each.waiting])
        assert self._evacuation_of.keys() <= {move.number for move in stores}, "an evacuation's move is lost"
        by_policy = [move for move in stores if move.number not in self._evacuation_of]
        chosen = [digest for move in by_policy for digest in move.digests]
        assert self._num_storing == len(chosen) == len(set(chosen)), "saves miscounted, or a page is in two of them"
        moving = [move for move in stores if move.number in self._evacuation_of]
        for evacuation in self._evacuations:
            pages = [
                page for move in moving if self._evacuation_of[move.number] is evacuation for page in move.page_ids
            ]
            pages += [page for page, _ in evacuation.waiting]
            assert sorted(pages) == sorted(evacuation.held) != [], "an evacuation holds other pages than it saves"
        assert all(request.slot < 0 for request in self._evacuated), "one that has started waits for its evacuation"
