"""Settings of the scheduler. Knows nothing of where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy, not capacity: what the executor can hold is in EngineCapacity."""

    enable_prefix_caching: bool = True  # keep full pages for later requests with the same prefix and salt
    max_waiting: int = 8192  # requests that may wait; more are refused
    max_passes: int = 64  # later requests that may be started before a waiting one; then nobody may, until it runs
    lookahead: int = 8  # waiting requests that are considered per iteration when the first ones do not fit
    oldest_prefill_share: float = 0.25  # of an iteration's prefill tokens, for the oldest unfinished prompt
    target_itl_s: float | None = None  # seconds between two tokens of a request that iterations must keep to
