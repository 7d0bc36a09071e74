"""All requests that a client can still name: live ones, and ended ones kept for a reader to come.

Ids are per owner, so nobody learns of another's. Knows nothing of what requests do.
"""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.errors import ApiError, ErrorKind
from control_plane.live_request import LiveRequest


class RequestRegistry:
    """Requests by owner and id."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: ended requests at most; beyond, the one that ended first is forgotten."""
        self._max_kept = max_kept
        self._requests: dict[tuple[str, str], LiveRequest] = {}
        self._ended: dict[LiveRequest, None] = {}  # in the order of their ends

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._requests.values()))

    @property
    def num_live(self) -> int:
        return len(self._requests) - len(self._ended)

    def find(self, owner: str, request_id: str) -> LiveRequest | None:
        return self._requests.get((owner, request_id))

    def check_free(self, owner: str, request_id: str) -> None:
        """Raises ALREADY_EXISTS when a live request has the id. Ids of ended ones may be used again."""
        found = self.find(owner, request_id)
        if found is not None and found.final is None:
            raise ApiError(
                ErrorKind.ALREADY_EXISTS,
                "request_id: a live request has this id; choose another, or leave it out to be given one",
            )

    def add(self, live: LiveRequest) -> LiveRequest | None:
        """Register; returns the ended request that had the id before, which is forgotten now."""
        before = self.find(live.owner, live.request_id)
        if before is not None:
            self.forget(before)
        self._requests[live.owner, live.request_id] = live
        return before

    def keep_ended(self, live: LiveRequest) -> list[LiveRequest]:
        """Note that a request has ended; returns those that are to be forgotten to make room."""
        self._ended[live] = None
        surplus = len(self._ended) - self._max_kept
        return [old for old in self._ended if not old.has_reader][: max(surplus, 0)]

    def forget(self, live: LiveRequest) -> None:
        """Idempotent."""
        if self._requests.get((live.owner, live.request_id)) is live:
            del self._requests[live.owner, live.request_id]
        self._ended.pop(live, None)
