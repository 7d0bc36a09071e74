"""How many token rows an iteration may have so that it ends within a target: the time between two tokens.

Learns from the times of past steps, bucket by bucket. Knows nothing of requests, plans or the clock.

Two rules move the cap. A bucket whose recent steps were mostly late is closed, with all above it. The next one is
opened when the last one ends in good time: with time to spare at once, else only if few steps have been late
lately, because a bucket that is opened for a try may turn out too slow: at once, or only when the requests that it
let in have grown. Then these go on, and steps may be late until they end; the longer that lasts, the longer no
larger bucket is tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

_WINDOW = 16  # steps of a bucket that are remembered
_IGNORED = 6  # one slow step in so many, and one in any case, may be an accident
_HEADROOM = 0.98  # a bucket that needs more of the target than this is too slow: times scatter
_TO_SPARE = 1.5  # the next bucket is safe if this much more than its share of rows would still be in time
_LATE_SHARE = 0.005  # of all steps that may be late because a larger bucket is tried
_MOST_CREDIT, _LEAST_CREDIT = 4.0, -50.0  # late steps that are forgiven at once; that are remembered at most
_BEST_EFFORT = 1.25  # where no bucket meets the target: this much more than the smallest one's time will do


class LatencyCap:
    """The largest bucket that a plan may fill."""

    def __init__(self, sizes: Sequence[int], target_s: float) -> None:
        """sizes: token rows of the buckets, ascending; target_s: seconds from one token to the next."""
        self._sizes = tuple(sizes)
        self._target_s = target_s
        self._level = 0  # the largest open bucket
        self._recent: tuple[deque[float], ...] = tuple(deque(maxlen=_WINDOW) for _ in sizes)  # step times
        self._credit = _MOST_CREDIT  # late steps that tries may still cost
        self._best_effort_s = 0.0  # the target instead, where the smallest bucket misses it

    @property
    def batch_tokens(self) -> int:
        """Token rows of an iteration at most, if the live decodes need no more."""
        return self._sizes[self._level]

    def record(self, batch_tokens: int, step_s: float) -> None:
        """A step of the bucket with so many rows took so long."""
        used, limit_s = bisect_left(self._sizes, batch_tokens), max(self._target_s, self._best_effort_s)
        late = step_s > limit_s
        self._credit = max(self._credit - 1, _LEAST_CREDIT) if late else min(self._credit + _LATE_SHARE, _MOST_CREDIT)
        if step_s <= self._target_s:
            self._best_effort_s = 0.0
        self._recent[used].append(step_s)
        usual_s = _slowest_but_accidents(self._recent[used])
        self._best_effort_s = min(self._best_effort_s, _BEST_EFFORT * usual_s)  # no smaller bucket takes longer
        if usual_s > _HEADROOM * limit_s:
            if len(self._recent[used]) > 1:
                self._close(used, usual_s)
        elif used >= self._level and self._level + 1 < len(self._sizes):
            self._open_next(used, usual_s, limit_s)

    def _close(self, bucket: int, usual_s: float) -> None:
        self._level = min(self._level, max(bucket - 1, 0))
        if bucket:
            self._recent[bucket].clear()  # when it is tried again, the past does not count
        else:
            self._best_effort_s = _BEST_EFFORT * usual_s

    def _open_next(self, bucket: int, usual_s: float, limit_s: float) -> None:
        growth = self._sizes[self._level + 1] / self._sizes[bucket]
        if self._credit > 0 or _TO_SPARE * growth * usual_s <= limit_s:
            self._level += 1


def _slowest_but_accidents(times: deque[float]) -> float:
    """The slowest of these times, of which there is one at least, accidents left out."""
    num_ignored = min(max(1, len(times) // _IGNORED), len(times) - 1)
    return sorted(times)[-1 - num_ignored]
