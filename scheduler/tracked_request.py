"""A request as the scheduler follows it, from its arrival to its end.

Knows nothing of slots' state, of other requests or of policy.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler.kv_pages import page_digest, root_digest
from scheduler.plan import StoreTier
from scheduler.request import NewRequest


@dataclass(slots=True, eq=False)
class Fetch:
    """What the KV store has for a request: asked, then answered, then loading, then loaded; from its question on
    until it starts."""

    ticket: int
    wait_until_s: float  # its request's start may be put off for the answer until then
    first_asked: int = 0  # pages before this one were on the GPU, and were not asked for
    tiers: tuple[StoreTier, ...] | None = None  # of the leading ones asked for that it holds; None: no answer yet
    first_page: int = -1  # pages from this one on are loaded, or have been; -1: no load was planned
    num_loaded: int = 0  # pages that the load has brought

    def tiers_from(self, page_index: int) -> tuple[StoreTier, ...]:
        """Of the pages from this one on, where those lie that the store can add; none without an answer."""
        if self.tiers is None or page_index < self.first_asked:
            return ()
        return self.tiers[page_index - self.first_asked :]


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """What changes about a request while it lives."""

    request: NewRequest
    arrival: int  # number in order of arrival, unique
    arrived_s: float
    limit: int  # it ends when prompt and output together have this many tokens
    tokens: array[int]  # known tokens; while it has a slot, those of the last page may be in SlotTable.tail only
    digests: list[bytes] = field(default_factory=list)  # of its full pages, as far as anyone asked
    pages: list[int] = field(default_factory=list)  # page i holds tokens [i * page_size, (i + 1) * page_size)
    num_published: int = 0  # leading pages that the prefix cache knows
    slot: int = -1  # -1: it waits
    passes: int = 0  # requests that came later and were started before it
    num_cached: int = 0  # prompt tokens from the GPU's prefix cache and the KV store when it was first started
    num_cpu_cached: int = 0  # of those, from the store's CPU tier
    num_ssd_cached: int = 0  # of those, from the store's SSD tier
    queue_s: float = -1.0  # from arrival to its first start; -1: never started
    num_preemptions: int = 0
    fetch: Fetch | None = None  # None: the store was not asked, or is not needed any more

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    def digest(self, page_index: int, page_size: int) -> bytes:
        """Digest of its full page [page_index]; the tokens up to that page's end must be in `tokens`."""
        digests = self.digests
        first = len(digests)
        if first <= page_index:
            tokens = self.tokens[first * page_size : (page_index + 1) * page_size]
            assert len(tokens) == (page_index + 1 - first) * page_size, "digest of a page that is not full"
            parent = digests[-1] if digests else root_digest(self.request.cache_salt)
            data, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
            for offset in range(0, len(data), page_bytes):
                parent = page_digest(parent, data[offset : offset + page_bytes])
                digests.append(parent)
        return digests[page_index]
