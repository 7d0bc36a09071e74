"""Moves of pages on their way between GPU and KV store: numbered, and their pages held until they have ended.

A page that a copy may still reach must never be given to anybody else, and only the executor knows when it no longer
can: it ends every move within a bound of its own (`ports.Executor`). One that breaks this promise is lost, as one
that does not finish a step is. Knows nothing of why pages move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.plan import KVMove, KVMoveResult, MoveKind
from scheduler.plan_draft import PlanDraft
from scheduler.ports import ExecutorError
from scheduler.residence import Residence


class PageMoves:
    """All moves of one instance."""

    def __init__(self, residence: Residence, timeout_s: float) -> None:
        """timeout_s: for the end of a move after the ends of all that were started before it."""
        self._residence = residence
        self._timeout_s = timeout_s
        self._num_moves = 0
        self._moves: dict[int, KVMove] = {}  # on the way, oldest first
        self._oldest = -1
        self._oldest_since_s = 0.0  # from then on, that one was the oldest

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[KVMove]:
        return iter(self._moves.values())

    def __getitem__(self, number: int) -> KVMove:
        """A move on the way."""
        return self._moves[number]

    def start(self, draft: PlanDraft, kind: MoveKind, pages: Sequence[int], digests: Sequence[bytes]) -> KVMove:
        """Move these pages with the iteration that is being planned."""
        move = KVMove(self._num_moves, kind, tuple(pages), tuple(digests))
        self._num_moves += 1
        self._residence.hold(move.page_ids)
        self._moves[move.number] = move
        draft.moves.append(move)
        return move

    def take(self, result: KVMoveResult) -> KVMove:
        """The move that has ended; its pages are still to be released.

        Raises ExecutorError for a result that belongs to no move on the way.
        """
        move = self._moves.get(result.number)
        if move is None or not 0 <= result.num_pages <= len(move.page_ids):
            raise ExecutorError(f"the result of move {result.number} belongs to no move on the way")
        del self._moves[result.number]
        return move

    def check_time(self, now: float) -> None:
        """Raises ExecutorError when the oldest move should have ended long ago."""
        oldest = next(iter(self._moves), -1)
        if oldest != self._oldest:
            self._oldest, self._oldest_since_s = oldest, now
        elif oldest >= 0 and now - self._oldest_since_s > self._timeout_s:
            raise ExecutorError(f"move {oldest} of KV pages has not ended within {self._timeout_s:g} s")
