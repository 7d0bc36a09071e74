"""All requests that concern a client: live ones, ended ones that are being read, ended ones kept for a reader to come.

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
        self._requests: dict[LiveRequest, None] = {}  # all of them
        self._named: dict[tuple[str, str], LiveRequest] = {}  # by owner and id: those that a client can name
        self._ended: dict[LiveRequest, None] = {}  # in the order of their ends

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._requests))

    @property
    def num_live(self) -> int:
        return len(self._requests) - len(self._ended)

    def find(self, owner: str, request_id: str) -> LiveRequest | None:
        return self._named.get((owner, request_id))

    def is_named(self, live: LiveRequest) -> bool:
        """Whether a client can name it: it is not forgotten, nor has another request got its id."""
        return self.find(live.owner, live.request_id) is live

    def check_free(self, owner: str, request_id: str) -> None:
        """Raises ALREADY_EXISTS when a live request has the id. Ids of ended ones may be used again."""
        found = self.find(owner, request_id)
        if found is not None and found.final is None:
            raise ApiError(
                ErrorKind.ALREADY_EXISTS,
                "request_id: a live request has this id; choose another, or leave it out to be given one",
            )

    def add(self, live: LiveRequest) -> LiveRequest | None:
        """Register; returns the ended request that had the id before, if it is to be forgotten now.

        One with a reader loses its name only: it stays until its reader leaves.
        """
        before = self.find(live.owner, live.request_id)
        self._requests[live] = None
        self._named[live.owner, live.request_id] = live
        return None if before is None or before.has_reader else before

    def keep_ended(self, live: LiveRequest) -> list[LiveRequest]:
        """Note that a request has ended; returns those that are to be forgotten to make room."""
        self._ended[live] = None
        surplus = len(self._ended) - self._max_kept
        return [old for old in self._ended if not old.has_reader][: max(surplus, 0)]

    def forget(self, live: LiveRequest) -> None:
        """Idempotent."""
        if self.is_named(live):
            del self._named[live.owner, live.request_id]
        self._requests.pop(live, None)
        self._ended.pop(live, None)
