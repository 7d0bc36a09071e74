"""When a move of KV pages has ended on all ranks. Pure; knows nothing of how ranks are reached."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import KVMoveResult


class MoveQuorum:
    """Waits for every rank's word on a move: ranks end them in different steps."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, list[int]] = {}  # pages that each rank so far has copied, by the move's number

    def take(self, per_rank: Sequence[Sequence[KVMoveResult]]) -> tuple[KVMoveResult, ...]:
        """The moves that have ended everywhere by one step's results of all ranks; a page counts if all have it."""
        ended = []
        for results in per_rank:
            for result in results:
                pages = self._open.setdefault(result.number, [])
                pages.append(result.num_pages)
                if len(pages) == self._num_ranks:
                    ended.append(KVMoveResult(result.number, min(self._open.pop(result.number))))
        return tuple(ended)
