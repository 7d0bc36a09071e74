"""Deals an iteration's rows: how prefills share what the decodes leave, and which bucket holds them all.

Pure functions over numbers; knows nothing of requests, pages or time.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import ScheduleBucket


def share_prefill(num_tokens: int, remaining: Sequence[int], oldest_share: float) -> list[int]:
    """Deal num_tokens of an iteration to prefills; remaining[i] tokens are left of the i-th, oldest first.

    The shortest go first, which keeps a short prompt from waiting behind a long one; the oldest is sure of
    oldest_share of the tokens, so that it ends however many short ones come. Nothing is left over while
    anyone can take it.
    """
    grants = [0] * len(remaining)
    if not remaining:
        return grants
    grants[0] = min(remaining[0], max(1, int(num_tokens * oldest_share)), num_tokens)
    left = num_tokens - grants[0]
    for i in sorted(range(len(remaining)), key=lambda i: (remaining[i], i)):
        more = min(left, remaining[i] - grants[i])
        grants[i] += more
        left -= more
    return grants


def prefill_room(num_tokens: int, remaining: Sequence[int], oldest_share: float, newcomer: int) -> int:
    """Tokens that share_prefill would deal to a newcomer with so many remaining, who came after the others."""
    if not remaining:
        return min(num_tokens, newcomer)
    reserved = min(remaining[0], max(1, int(num_tokens * oldest_share)), num_tokens)
    before = sum(tokens for tokens in remaining[1:] if tokens <= newcomer)
    oldest = remaining[0] if remaining[0] <= newcomer else reserved
    return max(0, min(newcomer, num_tokens - oldest - before))


def smallest_bucket(buckets: Sequence[ScheduleBucket], num_tokens: int) -> ScheduleBucket:
    """The first bucket (ascending in batch_tokens) that holds num_tokens rows."""
    return next(bucket for bucket in buckets if bucket.batch_tokens >= num_tokens)
