"""A KV store in memory, and an executor's moves to and from it, which can be slow, fail, lie, forget and hang.

A load writes nonsense into its pages at every step until it ends, and what it could not bring stays nonsense. A store
reads its pages at the very end. So a page that is read too early, or given to another too early, shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.plan import IterationPlan, KVMove, KVMoveResult, MoveKind, PrefixAnswer, StoreTier

NONSENSE = -7


@dataclass
class FakeStore:
    """A PrefixStore; its pages are those of one rank: token ids, positions and salts by digest."""

    pages: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    on_ssd: set[bytes] = field(default_factory=set)
    answer_delay: int | None = 0  # calls of take_answers() before an answer comes; None: it never does
    num_lies: int = 0  # pages that an answer promises beyond those that are there
    num_faults: int = 0
    num_rank_faults: int = 0  # told with the next move that ends
    is_off: bool = False
    asked: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # by ticket, all that ever were
    released: set[int] = field(default_factory=set)
    _open: dict[int, int] = field(default_factory=dict)  # ticket: calls so far

    def ask(self, ticket: int, digests: Sequence[bytes]) -> None:
        """Remember the question."""
        assert digests, "a question about nothing"
        assert ticket not in self.asked, "a ticket is used twice"
        self.asked[ticket] = tuple(digests)
        self._open[ticket] = 0

    def take_answers(self) -> list[PrefixAnswer]:
        """The answers that are due by now, also those of tickets that have been released."""
        answers = []
        for ticket in list(self._open):
            if self.answer_delay is not None and self._open[ticket] >= self.answer_delay:
                del self._open[ticket]
                answers.append(PrefixAnswer(ticket, self._tiers(self.asked[ticket])))
            else:
                self._open[ticket] += 1
        return answers

    def release(self, ticket: int) -> None:
        """Once for each ticket."""
        assert ticket in self.asked, "a ticket that was never used is released"
        assert ticket not in self.released, "a ticket is released twice"
        self.released.add(ticket)

    def _tiers(self, digests: tuple[bytes, ...]) -> tuple[StoreTier, ...]:
        num_held = next((i for i, digest in enumerate(digests) if digest not in self.pages), len(digests))
        promised = digests[: num_held + self.num_lies]
        return tuple(StoreTier.SSD if digest in self.on_ssd else StoreTier.CPU for digest in promised)


@dataclass
class _Copy:
    """A move on its way."""

    move: KVMove
    steps_left: int | None  # None: until heal()
    num_good: int  # leading pages that will arrive, if the store has them


@dataclass
class FakeMover:
    """The moves of one executor."""

    store: FakeStore
    kv: tuple[np.ndarray, np.ndarray, np.ndarray]  # [pages, page_size] token ids, positions, salts
    delay: int | None = 0  # steps that a move takes; None: until heal()
    num_good: int = 1000  # leading pages of each move that arrive
    page_s: float = 0.0  # seconds that each page is said to take
    copies: dict[int, _Copy] = field(default_factory=dict)
    moves: list[KVMove] = field(default_factory=list)  # all that ever were

    def start(self, plan: IterationPlan, touched: set[int]) -> None:
        """Take on a plan's moves; touched: pages that rows in flight read or write."""
        for move in plan.moves:
            assert move.number == len(self.moves), "moves are not numbered one by one"
            assert len(move.page_ids) == len(move.digests) > 0
            pages = set(move.page_ids)
            assert len(pages) == len(move.page_ids), "a page is moved twice at once"
            if move.kind is MoveKind.LOAD:
                assert not pages & touched, "a load writes pages of rows in flight"
                assert not pages & self.pages_of(*MoveKind), "a load writes pages that another move needs"
            else:
                assert not pages & self.pages_of(MoveKind.LOAD), "a page is stored before it is loaded"
            self.moves.append(move)
            self.copies[move.number] = _Copy(move, self.delay, self.num_good)

    def pages_of(self, *kinds: MoveKind) -> set[int]:
        """Pages of such moves on their way."""
        return {page for copy in self.copies.values() if copy.move.kind in kinds for page in copy.move.page_ids}

    def advance(self) -> tuple[KVMoveResult, ...]:
        """One step's worth of copying."""
        results = []
        for number, copy in list(self.copies.items()):
            if copy.move.kind is MoveKind.LOAD:
                for array, value in zip(self.kv, (NONSENSE, NONSENSE, "?")):
                    array[list(copy.move.page_ids)] = value
            if copy.steps_left is not None:
                if not copy.steps_left:
                    run_s = self.page_s * len(copy.move.page_ids)
                    results.append(KVMoveResult(number, self._copy(copy), run_s, self.store.num_rank_faults))
                    self.store.num_rank_faults = 0
                    del self.copies[number]
                else:
                    copy.steps_left -= 1
        return tuple(results)

    def heal(self) -> None:
        """All that hangs will end soon, and what comes is well."""
        self.delay, self.num_good, self.store.answer_delay, self.store.num_lies = 0, 1000, 0, 0
        for copy in self.copies.values():
            copy.steps_left = 0

    def _copy(self, copy: _Copy) -> int:
        pages, num_done = self.store.pages, 0
        for page, digest in list(zip(copy.move.page_ids, copy.move.digests))[: copy.num_good]:
            if copy.move.kind is MoveKind.STORE:
                pages[digest] = tuple(array[page].copy() for array in self.kv)
            elif digest in pages:
                for array, content in zip(self.kv, pages[digest]):
                    array[page] = content
            else:
                break
            num_done += 1
        return num_done
