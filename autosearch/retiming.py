"""Times of a placement, played instead of solved: every block as soon as rows and lanes allow.

Knows nothing of solvers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosearch.interference import Activity, Interference
from autosearch.placement import Placement, in_issue_order, to_schedule
from autosearch.simulate import activities, play

_LAYERS = 8  # enough for the flow to become steady


@dataclass(frozen=True)
class Undisturbed:
    """Every operation at its full speed, as Stage I has it."""

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """All 1."""
        return (1.0,) * len(running)


def retimed(placement: Placement, interference: Interference) -> Placement:
    """The same blocks in the same lane order, at the times that they have in a steady layer."""
    schedule = to_schedule(placement, "flow")
    times = placement.layer.times
    operators = times.operators(placement.layer.collectives)
    timeline = play(schedule, operators, activities(schedule, times), interference, _LAYERS)
    spans = timeline.of_layer(_LAYERS // 2)
    first = min(span.begin_us for span in spans)
    placed, position = [], 0
    for item in placement.placed:
        own = spans[position : position + len(item.block.operators)]
        position += len(item.block.operators)
        placed.append(replace(item, begin_us=own[0].begin_us - first, end_us=own[-1].end_us - first))
    return in_issue_order(placement.layer, placement.batch_tokens, timeline.layer_us, placed)
