"""How many nano-operations: start at two per operator, add near bubbles, stop when nothing improves.

The rules around Stage I (paper, section 4.1.2). Pure functions of placements; knows nothing of solvers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autosearch.blocks import RANGE_STEP, Layer
from autosearch.placement import COMPUTE_LANE, Placed, Placement
from autosearch.retiming import Undisturbed, retimed

FIRST_SLOTS = 2  # nano-operations of each operator to start with
REAL_GAIN = 0.003  # a shorter period counts only from here; below it the fewer nano-operations win
_NO_BUBBLE = 0.002  # of the period


@dataclass(frozen=True, slots=True)
class Bubble:
    """The compute lane idles until the first of `chain` may start, because the others have not ended."""

    idle_us: float
    chain: tuple[Placed, ...]  # what waits, what it waits for, and so on back to the compute lane


def first_slots(layer: Layer, batch_tokens: int) -> dict[str, int]:
    """Two ranges per operator, or one where the batch cannot be halved."""
    return {group: min(FIRST_SLOTS, max(1, batch_tokens // RANGE_STEP)) for group in layer.groups}


def largest_bubble(placement: Placement) -> Bubble | None:
    """The compute lane's longest idle stretch, next layer included; None where it hardly idles."""
    placement = retimed(placement, Undisturbed())  # the solver may have left slack anywhere
    lane = [placement.placed[index] for index in placement.lane(COMPUTE_LANE)]
    gaps = [(later.begin_us - earlier.end_us, later) for earlier, later in zip(lane, lane[1:])]
    gaps.append((lane[0].begin_us + placement.period_us - lane[-1].end_us, lane[0]))
    idle_us, waiting = max(gaps, key=lambda gap: gap[0])
    if idle_us < _NO_BUBBLE * placement.period_us:
        return None
    return Bubble(idle_us, tuple(_chain(placement, waiting)))


def _chain(placement: Placement, waiting: Placed) -> Iterator[Placed]:
    """Follow the input that ends last, back to an operation of the compute lane."""
    yield waiting
    awaited = _awaited(placement, waiting)
    while awaited is not None:
        yield awaited
        awaited = _awaited(placement, awaited) if awaited.lane != COMPUTE_LANE else None


def _awaited(placement: Placement, waiting: Placed) -> Placed | None:
    """The input that ends last before `waiting` begins."""
    names = waiting.block.inputs or (placement.layer.last.name,)
    inputs = [
        placed
        for placed in placement.placed
        if placed.block.name in names and placed.start < waiting.end and waiting.start < placed.end
    ]
    return max(inputs, key=lambda placed: placed.end_us, default=None)


def add_near_bubble(placement: Placement, slots: Mapping[str, int]) -> list[dict[str, int]]:
    """Proposals of one more range, the likeliest first; none without a bubble, nor below 128 rows a range.

    First for the operators of the chain that the largest bubble waits for. A bubble moves when the layers repeat:
    where that does not help, two neighbouring groups of operators in turn.
    """
    bubble = largest_bubble(placement)
    if bubble is None:
        return []
    groups = placement.layer.groups
    neighbours = [frozenset({group, groups[(index + 1) % len(groups)]}) for index, group in enumerate(groups)]
    proposals = dict.fromkeys([frozenset(placed.block.group for placed in bubble.chain), *neighbours])
    grown = [{group: count + (group in chosen) for group, count in slots.items()} for chosen in proposals]
    return [each for each in grown if max(each.values()) * RANGE_STEP <= placement.batch_tokens]


def improves(period_us: float, best_us: float) -> bool:
    """Whether a period is shorter by more than what a smaller number of nano-operations is worth."""
    return period_us < best_us * (1 - REAL_GAIN)
