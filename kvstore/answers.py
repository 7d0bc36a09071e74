"""What a store's answers can be, and what they cannot: the client's guard against garbage.

Each function gives the reason why an answer cannot be right, or None. Knows nothing of how answers come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.arena import PREFIX
from kvstore.keys import KVKey, Tier
from kvstore.record import SLOT_ALIGNMENT, slot_bytes_for


def attach_problem(answer: Any) -> str | None:
    """Of an AttachResponse."""
    if not Path(answer.arena_path).name.startswith(PREFIX):
        return "the arena has a name that no store would give"
    if not 0.0 < answer.lease_s < 1e6 or not answer.arena_bytes or not answer.boot_id:
        return "no size, no lease time, or no boot id"
    return None


def lookup_problem(keys: Sequence[KVKey]) -> Callable[[Any], str | None]:
    """Of a LookupResponse for these keys."""

    def problem(answer: Any) -> str | None:
        if len(answer.tiers) > len(keys) or any(tier not in (Tier.CPU, Tier.SSD) for tier in answer.tiers):
            return "tiers for more keys than were asked for, or unknown ones"
        return None

    return problem


def acquire_problem(keys: Sequence[KVKey], arena_bytes: int) -> Callable[[Any], str | None]:
    """Of an AcquireResponse for these keys, with an arena of this size."""

    def problem(answer: Any) -> str | None:
        if len(answer.blocks) > len(keys) or any(block.tier not in (Tier.CPU, Tier.SSD) for block in answer.blocks):
            return "blocks for more keys than were asked for, or from unknown tiers"
        if not all(_is_slot(block.offset, block.payload_bytes, arena_bytes) for block in answer.blocks):
            return "blocks outside the arena"
        return None

    return problem


def reserve_problem(keys: Sequence[KVKey], payload_bytes: int, arena_bytes: int) -> Callable[[Any], str | None]:
    """Of a ReserveResponse for these keys, with an arena of this size."""

    def problem(answer: Any) -> str | None:
        if len(answer.offsets) != len(keys):
            return "not one offset for each key"
        if not all(_is_slot(offset, payload_bytes, arena_bytes) for offset in answer.offsets if offset >= 0):
            return "offsets outside the arena"
        return None

    return problem


def _is_slot(offset: int, payload_bytes: int, arena_bytes: int) -> bool:
    return (
        offset >= 0
        and offset % SLOT_ALIGNMENT == 0
        and payload_bytes > 0
        and offset + slot_bytes_for(payload_bytes) <= arena_bytes
    )
