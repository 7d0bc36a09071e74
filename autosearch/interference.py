"""How fast operators run beside each other: models for the simulator to choose from.

A rate is progress over the progress alone on the whole GPU. Knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autosearch.operators import Resource
from autosearch.profile_table import ProfileError, ProfileTable

_SHARE_TOLERANCE = 0.02  # a measured triple stands for shares this close to it


@dataclass(frozen=True, slots=True)
class Activity:
    """One operation that runs now."""

    resource: Resource
    sm_share: float
    time_us: float  # alone on the whole GPU
    joules: float | None = None  # dynamic energy of all of it


class Interference(Protocol):
    """Rates of what runs together."""

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """One rate per activity, in (0, 1]."""


@dataclass(frozen=True)
class Pairwise:
    """The paper's: an operation's share decides its rate, whoever its neighbours are (Table 3).

    But two that are bound by one resource, as decode attention and what helps it, get no more of it than there is.
    """

    table: ProfileTable

    @cached_property
    def _curves(self) -> dict[Resource, tuple[tuple[float, float], ...]]:
        return {resource: self.table.rates(resource) for resource in Resource}

    def rate(self, resource: Resource, sm_share: float) -> float:
        """P(R), by straight lines between measured shares."""
        return _along(self._curves[resource], sm_share)

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """Each by its own share; those of one resource together at most 1."""
        asked = [self.rate(activity.resource, activity.sm_share) for activity in running]
        sums = dict.fromkeys(Resource, 0.0)
        for activity, rate in zip(running, asked):
            sums[activity.resource] += rate
        return tuple(rate / max(1.0, sums[activity.resource]) for activity, rate in zip(running, asked))


@dataclass(frozen=True)
class MeasuredTriples:
    """Pairwise, but where compute, memory and network run at once and the profile has the triple, its rates."""

    table: ProfileTable

    @cached_property
    def _pairwise(self) -> Pairwise:
        return Pairwise(self.table)

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """Measured rates where they exist."""
        kinds = [activity.resource for activity in running]
        if sorted(kinds) == sorted(Resource):
            shares = [running[kinds.index(resource)].sm_share for resource in Resource]
            for triple in self.table.triples:
                if all(abs(a - b) <= _SHARE_TOLERANCE for a, b in zip(triple.sm_shares, shares)):
                    by_kind = dict(zip(Resource, triple.rates))
                    return tuple(by_kind[kind] for kind in kinds)
        return self._pairwise.rates(running)


@dataclass(frozen=True)
class PowerBudget:
    """Another model under a power limit: where the card would draw more, everything slows down together."""

    base: Interference
    budget_w: float
    static_w: float

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """Raises ProfileError where the profile has no joules."""
        rates = self.base.rates(running)
        watts = 0.0
        for activity, rate in zip(running, rates):
            if activity.joules is None:
                raise ProfileError("the profile has no joules per operator: a power budget cannot be kept")
            if activity.time_us > 0:
                watts += activity.joules / (activity.time_us * 1e-6) * rate
        slower = (self.budget_w - self.static_w) / watts if watts > 0 else 1.0
        return tuple(rate * min(1.0, slower) for rate in rates)


@dataclass(frozen=True)
class FluidShares:
    """An ideal: memory and network take fixed shares while they run, compute what is left at every moment.

    What Stage II starts from: it says which operations would meet if shares could change at any time.
    """

    table: ProfileTable
    shares: Mapping[Resource, float]  # of memory and network

    @cached_property
    def _pairwise(self) -> Pairwise:
        return Pairwise(self.table)

    def rates(self, running: Sequence[Activity]) -> tuple[float, ...]:
        """An operation alone has the whole GPU."""
        if len(running) == 1:
            return (1.0,)
        taken = sum(self.shares[activity.resource] for activity in running if activity.resource in self.shares)
        return tuple(
            self._pairwise.rate(activity.resource, self.shares.get(activity.resource, max(0.05, 1 - taken)))
            for activity in running
        )


def _along(curve: Sequence[tuple[float, float]], share: float) -> float:
    below = (0.0, 0.0)
    for point in curve:
        if share <= point[0]:
            part = (share - below[0]) / (point[0] - below[0])
            return below[1] + part * (point[1] - below[1])
        below = point
    return curve[-1][1]
