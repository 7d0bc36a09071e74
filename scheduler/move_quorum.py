"""When a move of KV pages has ended on all ranks. Pure; knows nothing of how ranks are reached."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import KVMoveResult


class MoveQuorum:
    """Waits for every rank's word on a move: ranks end them in different steps."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, list[KVMoveResult]] = {}  # of each rank so far, by the move's number

    def take(self, per_rank: Sequence[Sequence[KVMoveResult]]) -> tuple[KVMoveResult, ...]:
        """The moves that have ended everywhere by one step's results of all ranks.

        A page counts if all have it, a fault if one had it.
        """
        ended = []
        for results in per_rank:
            for result in results:
                words = self._open.setdefault(result.number, [])
                words.append(result)
                if len(words) == self._num_ranks:
                    del self._open[result.number]
                    num_pages, run_s = min(each.num_pages for each in words), max(each.run_s for each in words)
                    num_faults, num_trips = (
                        sum(each.num_faults for each in words),
                        sum(each.num_trips for each in words),
                    )
                    ended.append(KVMoveResult(result.number, num_pages, run_s, num_faults, num_trips))
        return tuple(ended)
