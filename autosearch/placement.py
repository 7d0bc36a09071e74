"""Blocks put on row ranges and lanes: what Stage I finds and Stage II refines, and the schedule it becomes.

Knows nothing of solvers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autosearch.blocks import Block, Layer
from autosearch.operators import Resource
from autosearch.pipeline import NanoOperation, PipelineSchedule


class Overlap(StrEnum):
    """Which resources get a lane of their own (the paper's ablation, section 6.4)."""

    NONE = "none"
    NETWORK = "network"
    ALL = "all"


COMPUTE_LANE, MEMORY_LANE, NETWORK_LANE = 0, 1, 2


def lane_of(block: Block, overlap: Overlap) -> int:
    """The lane of a block."""
    if block.resource is Resource.NETWORK and overlap is not Overlap.NONE:
        return NETWORK_LANE
    if block.resource is Resource.MEMORY and overlap is Overlap.ALL:
        return MEMORY_LANE
    return COMPUTE_LANE


@dataclass(frozen=True, slots=True)
class Placed:
    """One block on one row range."""

    block: Block
    start: int
    end: int
    lane: int
    begin_us: float  # orders the operations; times count from one layer's first operation
    end_us: float


@dataclass(frozen=True)
class Placement:
    """One layer's blocks in time, repeated every `period_us`."""

    layer: Layer
    batch_tokens: int
    period_us: float
    placed: tuple[Placed, ...]  # in order of begin_us, a valid issue order

    def lane(self, lane: int) -> list[int]:
        """Indexes on a lane, in order."""
        return [index for index, placed in enumerate(self.placed) if placed.lane == lane]

    @property
    def lanes(self) -> tuple[int, ...]:
        """Lanes in use, ascending."""
        return tuple(sorted({placed.lane for placed in self.placed}))


def in_issue_order(layer: Layer, batch_tokens: int, period_us: float, placed: Sequence[Placed]) -> Placement:
    """Sort by begin; blocks that begin together keep the graph's order."""
    rank = {block.name: index for index, block in enumerate(layer.blocks)}

    def key(item: Placed) -> tuple[float, int, int]:
        return (round(item.begin_us, 3), rank[item.block.name], item.start)

    return Placement(layer, batch_tokens, period_us, tuple(sorted(placed, key=key)))


@dataclass(frozen=True, slots=True)
class Waits:
    """Explicit waits of a placement's blocks, by index: same layer and layer before."""

    after: Mapping[int, tuple[int, ...]]
    after_previous: Mapping[int, tuple[int, ...]]


NO_WAITS = Waits({}, {})


def to_schedule(
    placement: Placement, name: str, sm_shares: Sequence[float] | None = None, waits: Waits = NO_WAITS
) -> PipelineSchedule:
    """Spell the blocks out as operators. Shares default to the whole GPU, one operation at a time."""
    operations: list[NanoOperation] = []
    last_of: list[int] = []  # index of each block's last operator
    for index, placed in enumerate(placement.placed):
        for position, operator in enumerate(placed.block.operators):
            first = position == 0
            rows = placed.end - placed.start
            operations.append(
                NanoOperation(
                    operator.name,
                    placed.start,
                    placed.end,
                    placed.lane,
                    sm_shares[index] if sm_shares else 1.0,
                    placement.layer.times.kernel(operator, rows),
                    tuple(last_of[other] for other in waits.after.get(index, ())) if first else (),
                    # rewritten below: the layer before has all of its operations
                    waits.after_previous.get(index, ()) if first else (),
                )
            )
        last_of.append(len(operations) - 1)
    operations = [
        replace(operation, after_previous=tuple(last_of[other] for other in operation.after_previous))
        for operation in operations
    ]
    target = placement.layer.times.target
    return PipelineSchedule(
        name=name,
        batch_tokens=placement.batch_tokens,
        operations=tuple(operations),
        collectives=placement.layer.collectives.value,
        model=target.model.name,
        gpu=target.gpu.name,
        num_gpus=target.num_gpus,
        decode_share=target.work.decode_share,
        mean_context=target.work.mean_context,
        prefill_pairs=target.work.prefill_pairs,
    )
