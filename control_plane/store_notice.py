"""What a server's log says of a KV store that is of no use to an instance: once each time, not at every page.

Only counts reach the server; reasons are in the logs of the processes that ask the store. Knows nothing of the store.
"""

from __future__ import annotations

import logging

from scheduler.plan import LoadReport, OutputBatch

log = logging.getLogger(__name__)

_MANY_PAGES = 64  # refused, while none was taken


class StoreNotice:
    """Follows one instance."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._is_off = False
        self._has_rank_trips = False
        self._num_refused: int | None = 0  # pages; None: that is settled

    def note(self, batch: OutputBatch) -> None:
        """What one iteration did."""
        self._note_load(batch.load)
        if batch.stats is None:
            return
        moves = batch.stats.moves
        if moves.num_rank_trips and not self._has_rank_trips:
            self._has_rank_trips = True
            if not self._is_off:
                self._say_unused(f"a rank of {self._instance}")
        if moves.num_stored:
            self._num_refused, self._has_rank_trips = None, False
        elif self._num_refused is not None and not self._is_off and not self._has_rank_trips:
            self._num_refused += moves.num_store_failed
            if self._num_refused >= _MANY_PAGES:
                log.warning(
                    "the KV store has taken none of %d pages of %s: is a page larger than its largest record "
                    "(`nanoflow kvstore --slab-bytes`, or --block-size here)?",
                    self._num_refused,
                    self._instance,
                )
                self._num_refused = None

    def _note_load(self, load: LoadReport) -> None:
        if load.store_is_off == self._is_off:
            return
        self._is_off = load.store_is_off
        if self._is_off:
            self._say_unused(self._instance)
        else:
            log.info("%s uses the KV store again", self._instance)

    def _say_unused(self, who: str) -> None:
        log.warning(
            "%s does not use the KV store for now, after faults in a row: does it run on that node, and are "
            "--kv-store, its token (--kv-store-token-file) and its certificates right?",
            who,
        )
