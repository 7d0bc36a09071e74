"""Requests that wait for a slot, in order of arrival, and how often each one has been passed.

Knows nothing of why a request is started or not.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduler.tracked_request import TrackedRequest


def _arrival(request: TrackedRequest) -> int:
    return request.arrival


class WaitingQueue:
    """Sorted by arrival, so that a preempted request comes back to its place."""

    def __init__(self) -> None:
        self._requests: list[TrackedRequest] = []
        self.num_tokens = 0  # known tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: TrackedRequest) -> None:
        """Let a request wait at its place."""
        insort(self._requests, request, key=_arrival)
        self.num_tokens += len(request.tokens)

    def remove(self, request: TrackedRequest) -> None:
        """Take out a waiting request."""
        index = bisect_left(self._requests, request.arrival, key=_arrival)
        assert self._requests[index] is request, "the request does not wait"
        del self._requests[index]
        self.num_tokens -= len(request.tokens)

    def __getitem__(self, index: int) -> TrackedRequest:
        """The index-th longest waiting one."""
        return self._requests[index]

    def count_pass(self, starter: TrackedRequest) -> None:
        """A request is started: all that came before it and still wait have been passed once more."""
        for request in self._requests:
            if request.arrival > starter.arrival:
                break
            request.passes += 1

    def check_integrity(self) -> None:
        """Assert the queue's invariants."""
        arrivals = [request.arrival for request in self._requests]
        assert arrivals == sorted(set(arrivals)), "the queue is not in order of arrival"
        assert self.num_tokens == sum(len(request.tokens) for request in self._requests), "waiting tokens miscounted"
