"""Asks the KV store, as soon as a request waits, what it holds of its tokens; and how long a request waits for that.

Knows nothing of slots, pages of the GPU or moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.ports import PrefixStore
from scheduler.scheduler_config import StoreConfig
from scheduler.tracked_request import Fetch, TrackedRequest


class Prefetch:
    """The questions that are open, by ticket."""

    def __init__(
        self,
        config: StoreConfig,
        store: PrefixStore,
        page_size: int,
        learn: Callable[[Sequence[bytes], int], None],
    ) -> None:
        """learn(digests, n) is told of every answer: the store holds the first n of them, and not the next one."""
        self._wait_s = config.answer_wait_s
        self._store = store
        self._page_size = page_size
        self._learn = learn
        self._asked: dict[int, TrackedRequest] = {}
        self._num_tickets = 0

    @property
    def num_unanswered(self) -> int:
        """Questions that somebody still waits for, or might use."""
        return len(self._asked)

    def ask(self, request: TrackedRequest, now: float, num_on_gpu: int = 0) -> None:
        """Ask for all full pages of its tokens but the last token, which is computed in any case.

        The first num_on_gpu are left out, but not all: by the time of its turn the GPU may hold less.
        """
        num_pages = (len(request.tokens) - 1) // self._page_size
        if not num_pages:
            return
        request.digest(num_pages - 1, self._page_size)
        first = min(num_on_gpu, num_pages - 1)
        request.fetch = Fetch(self._num_tickets, now + self._wait_s, first)
        self._asked[request.fetch.ticket] = request
        self._num_tickets += 1
        self._store.ask(request.fetch.ticket, request.digests[first:num_pages])

    def take_answers(self) -> None:
        """Let each request know its answer; those that nobody waits for any more are passed over."""
        for answer in self._store.take_answers():
            request = self._asked.pop(answer.ticket, None)
            if request is not None:
                assert request.fetch is not None, "a question without its request"
                asked = request.digests[request.fetch.first_asked : (len(request.tokens) - 1) // self._page_size]
                request.fetch.tiers = answer.tiers[: len(asked)]
                self._learn(asked, len(request.fetch.tiers))

    def waits(self, request: TrackedRequest, now: float) -> bool:
        """Whether its start is put off until the answer is there, or the time for it is over."""
        fetch = request.fetch
        return fetch is not None and fetch.tiers is None and now < fetch.wait_until_s

    def close(self, fetch: Fetch) -> None:
        """Neither the answer nor the pages that the store keeps for it are needed any more."""
        self._asked.pop(fetch.ticket, None)
        self._store.release(fetch.ticket)

    def check_integrity(self) -> None:
        """Assert that every open question belongs to a request that waits for its answer."""
        for ticket, request in self._asked.items():
            assert request.fetch is not None, "a question without its request"
            assert request.fetch.ticket == ticket, "a request has two questions"
            assert request.fetch.tiers is None, "an answered question is open"
            assert request.slot < 0, "a request has started and still asks"
