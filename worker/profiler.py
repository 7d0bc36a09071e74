"""Measures a profile within a time budget: bursts to rank kernels, then sustained readings, the most needed first.

Works on any Device; what is measured is `worker.profile_points`', what becomes of it `worker.profile_assembly`'s.
Knows nothing of GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from worker.profile_points import Launch, Pair, Scope, bursts, sustained_points

BURST_PART = 0.4  # of the time, at most: what bursts do not reach is ranked by the sizes that they did
_REPEATS = 2  # readings kept back for the end: the first one again, and the whole layer again


@dataclass(frozen=True, slots=True)
class Reading:
    """A sustained reading of one layer's launch."""

    time_us: float
    watts: float | None = None  # of the whole card
    sm_mhz: float | None = None


class Device(Protocol):
    """What times launches of a model's operators."""

    def burst(self, launch: Launch) -> float:
        """Microseconds of one layer, a few launches from idle."""

    def alone(self, launch: Launch) -> Reading:
        """The launch over and over, once power has settled."""

    def together(self, pair: Pair) -> tuple[Reading, Reading]:
        """Both over and over, each in a loop of its own, once power has settled; the watts are those of both."""

    def layer(self, tokens: int) -> Reading:
        """A whole layer, one operator after the other, by the worker's own choice of kernels, sustained."""

    def around(self, tokens: int) -> Reading:
        """What an iteration runs once, before and after its layers, sustained."""

    def static_watts(self) -> float | None:
        """What the card draws with its clocks up and next to nothing to do."""


@dataclass
class Measurements:
    """All that was read."""

    bursts: dict[Launch, float] = field(default_factory=dict)
    alone: dict[Launch, Reading] = field(default_factory=dict)
    pairs: dict[Pair, tuple[Reading, Reading]] = field(default_factory=dict)
    layers: list[Reading] = field(default_factory=list)  # of the largest batch, at the beginning and at the end
    around: Reading | None = None  # of the largest batch: embedding, head and greedy choice of an iteration
    again: tuple[Launch, Reading] | None = None  # the first launch that was read, at the end once more
    static_watts: float | None = None
    num_skipped_bursts: int = 0  # for want of time
    num_skipped_points: int = 0

    @property
    def num_sustained(self) -> int:
        """Sustained readings; a pair is one."""
        others = (self.around, self.again)
        return len(self.alone) + len(self.pairs) + len(self.layers) + sum(other is not None for other in others)

    @property
    def spread(self) -> float:
        """How much readings of the same thing differ, relative: the largest."""
        same = [[reading.time_us for reading in self.layers]]
        if self.again is not None:
            same.append([self.alone[self.again[0]].time_us, self.again[1].time_us])
        return max((max(times) / min(times) - 1 for times in same if len(times) > 1), default=0.0)


def measure(
    device: Device,
    scope: Scope,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Measurements:
    """All points that there is time for until `deadline` by the clock."""
    found = Measurements()
    _rank(device, scope, found, clock() + BURST_PART * (deadline - clock()), clock, progress)
    began = clock()
    found.layers.append(device.layer(scope.largest))
    found.static_watts = device.static_watts()
    found.around = device.around(scope.largest)
    slowest = (clock() - began) / 3
    points = sustained_points(scope, found.bursts)
    for number, point in enumerate(points):
        began = clock()
        if began + (1 + _REPEATS) * slowest > deadline:
            found.num_skipped_points = len(points) - number
            break
        progress("sustained readings", number / len(points))
        if isinstance(point, Pair):
            found.pairs[point] = device.together(point)
        else:
            found.alone[point] = device.alone(point)
        slowest = max(slowest, clock() - began)
    first = next(iter(found.alone), None)
    if first is not None:
        found.again = (first, device.alone(first))
    found.layers.append(device.layer(scope.largest))
    return found


def _rank(
    device: Device,
    scope: Scope,
    found: Measurements,
    deadline: float,
    clock: Callable[[], float],
    progress: Callable[[str, float], None],
) -> None:
    launches = list(bursts(scope))
    for number, launch in enumerate(launches):
        if clock() > deadline:
            found.num_skipped_bursts = len(launches) - number
            return
        progress("bursts", number / len(launches))
        found.bursts[launch] = device.burst(launch)
