"""When requests expire. Knows nothing of what they are or do."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from scheduler.tracked_request import TrackedRequest

_SPARE = 1000  # entries of requests that have ended, kept beside as many as those that live


class Deadlines:
    """A heap, also of requests that have ended: those are passed over when their time comes, or when they are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # deadline, arrival, id

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: TrackedRequest) -> None:
        """It expires so long after its arrival as it says, if ever."""
        if (timeout_s := request.request.timeout_s) is not None:
            heapq.heappush(self._heap, (request.arrived_s + timeout_s, request.arrival, request.request.request_id))

    def take_due(self, live: Mapping[str, TrackedRequest], now: float) -> list[TrackedRequest]:
        """Of all that live, by id, those whose time is over by now."""
        if len(self._heap) > 2 * len(live) + _SPARE:
            self._heap = [entry for entry in self._heap if self._find(entry, live) is not None]
            heapq.heapify(self._heap)
        due: list[TrackedRequest] = []
        while self._heap and self._heap[0][0] <= now:
            request = self._find(heapq.heappop(self._heap), live)
            if request is not None:
                due.append(request)
        return due

    @staticmethod
    def _find(entry: tuple[float, int, str], live: Mapping[str, TrackedRequest]) -> TrackedRequest | None:
        _, arrival, request_id = entry
        request = live.get(request_id)
        return request if request is not None and request.arrival == arrival else None
