"""Settings of the scheduler. Knows nothing of where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PrefetchPolicy(StrEnum):
    """How long a request whose turn has come waits for the KV store's answer."""

    BEST_EFFORT = "best_effort"  # not at all: what has been answered by then is used
    WAIT = "wait"  # until the answer is there, or StoreConfig.max_wait_s have passed since the question
    TIMEOUT = "timeout"  # until the answer is there, or StoreConfig.timeout_s have passed since the question


class WritePolicy(StrEnum):
    """When the KV store is given a full page."""

    WRITE_THROUGH = "write_through"  # as soon as it is full
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # after its second hit in the GPU's prefix cache
    WRITE_BACK = "write_back"  # when it is among the next that the GPU's prefix cache will give up


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How a KV store is used, where there is one."""

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT  # best effort seldom hits where nobody queues
    timeout_s: float = 0.1  # seconds
    max_wait_s: float = 5.0  # seconds
    load_timeout_s: float = 5.0  # seconds that a load may take; then its request computes instead
    pages_per_step: int = 256  # pages that one iteration gives to the store at most; 0: none
    backlog_pages: int = 4096  # full pages that wait for their turn; more are dropped
    known_pages: int = 1 << 18  # pages that are remembered to be in the store, so as not to give them again
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    move_timeout_s: float = 60.0  # seconds for a move alone; an executor that takes longer is lost

    @property
    def answer_wait_s(self) -> float:
        """Seconds after the question for which its answer is waited for."""
        waits = {PrefetchPolicy.WAIT: self.max_wait_s, PrefetchPolicy.TIMEOUT: self.timeout_s}
        return waits.get(self.policy, 0.0)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy, not capacity: what the executor can hold is in EngineCapacity."""

    enable_prefix_caching: bool = True  # keep full pages for later requests with the same prefix and salt
    max_waiting: int = 8192  # requests that may wait; more are refused
    max_passes: int = 64  # later requests that may be started before a waiting one; then nobody may, until it runs
    lookahead: int = 8  # waiting requests that are considered per iteration when the first ones do not fit
    oldest_prefill_share: float = 0.25  # of an iteration's prefill tokens, for the oldest unfinished prompt
    target_itl_s: float | None = None  # seconds between two tokens of a request that iterations must keep to
    store: StoreConfig = StoreConfig()
