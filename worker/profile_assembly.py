"""From readings to a ProfileTable, as the search wants it: sustained times, rates of pairs, joules.

Bursts only rank. What has no sustained reading of its own gets its burst, slowed as the same operator's nearest
sustained reading was, and is marked `derived`. Knows nothing of how anything was measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from autosearch.operators import Resource
from autosearch.profile_table import (
    SHORTEST_US,
    SLOWEST_RATE,
    ConcurrentRate,
    IsolatedTime,
    MeasuredOn,
    ProfileTable,
)
from autosearch.workload import Workload
from worker.profile_points import Launch, Pair, Scope, sm_share
from worker.profiler import Measurements, Reading
from worker.streams import WHOLE

_LEAST_SPREAD, _LARGEST_SPREAD = 0.005, 0.99  # two readings that agree by chance are no proof; a table's bound


def assemble(
    found: Measurements, scope: Scope, name: str, model: str, measured_on: MeasuredOn, workload: Workload
) -> ProfileTable:
    """The profile of what was found."""
    return ProfileTable(
        name=name,
        source=f"nanoflow profile: {found.num_sustained} sustained readings, {len(found.bursts)} bursts; operators "
        "without a reading of their own by their burst times the nearest reading's sustained over burst",
        model=model,
        measured_on=measured_on,
        workload=workload,
        spread=round(min(_LARGEST_SPREAD, max(_LEAST_SPREAD, found.spread)), 4),
        isolated=tuple(_isolated(found, scope)),
        concurrent=tuple(_concurrent(found, scope)),
    )


def whole_us(found: Measurements, operator: str, tokens: int) -> float | None:
    """Sustained microseconds of the operator alone on the whole GPU, the fastest kernel; None without a reading."""
    times = [
        reading.time_us
        for launch, reading in found.alone.items()
        if (launch.operator, launch.tokens, launch.place) == (operator, tokens, WHOLE)
    ]
    return min(times, default=None)


def pair_rates(found: Measurements, pair: Pair) -> tuple[float, float] | None:
    """Each one's rate over its rate alone on the whole GPU (paper, Table 3); None where one was not read alone."""
    rates = []
    for launch, reading in zip((pair.compute, pair.memory), found.pairs[pair]):
        alone = whole_us(found, launch.operator, launch.tokens)
        if alone is None:
            return None
        rates.append(min(1.0, max(SLOWEST_RATE, alone / reading.time_us)))
    return rates[0], rates[1]


def _isolated(found: Measurements, scope: Scope) -> Iterator[IsolatedTime]:
    for launch, burst_us in found.bursts.items():
        reading, derived = found.alone.get(launch), False
        if reading is None:
            reading, derived = _estimate(found, scope, launch, burst_us), True
        time_us = max(SHORTEST_US, reading.time_us)
        yield IsolatedTime(
            launch.operator,
            launch.tokens,
            round(time_us, 4),
            sm_share(launch.place, scope.num_sms),
            launch.kernel,
            _dynamic_joules(reading, found.static_watts),
            derived,
        )


def _estimate(found: Measurements, scope: Scope, launch: Launch, burst_us: float) -> Reading:
    """Slowed as the nearest reading of the operator was, at its watts; the burst itself where there is none."""

    def distance(other: Launch) -> float:
        shares = abs(sm_share(other.place, scope.num_sms) - sm_share(launch.place, scope.num_sms))
        return abs(math.log(other.tokens / launch.tokens)) + shares

    same = [other for other in found.alone if other.operator == launch.operator]
    if not same:
        return Reading(burst_us)
    nearest = min(same, key=distance)
    reading = found.alone[nearest]
    slower = reading.time_us / max(SHORTEST_US, found.bursts[nearest])
    return Reading(burst_us * slower, reading.watts)


def _dynamic_joules(reading: Reading, static_watts: float | None) -> float | None:
    """Of one layer, without what the card draws anyway."""
    if reading.watts is None or static_watts is None:
        return None
    return round(max(0.0, reading.watts - static_watts) * reading.time_us * 1e-6, 6)


def _concurrent(found: Measurements, scope: Scope) -> Iterator[ConcurrentRate]:
    """One entry for each split: GEMMs' mean rates, weighted by their time alone, with the spread over them."""
    by_split: dict[int, list[tuple[float, float, float]]] = defaultdict(list)  # weight, both rates
    for pair in found.pairs:
        rates, weight = pair_rates(found, pair), whole_us(found, pair.compute.operator, pair.compute.tokens)
        if rates is not None and weight is not None and pair.memory.place.sms is not None:
            by_split[pair.memory.place.sms].append((weight, *rates))
    for split in sorted(by_split):
        shares = ((scope.num_sms - split) / scope.num_sms, split / scope.num_sms)
        compute, memory = ([(each[0], each[side]) for each in by_split[split]] for side in (1, 2))
        means = (_mean(compute), _mean(memory))
        spread = max(_deviation(compute, means[0]), _deviation(memory, means[1]))
        yield ConcurrentRate((Resource.COMPUTE, Resource.MEMORY), shares, means, round(spread, 4))


def _mean(weighted: list[tuple[float, float]]) -> float:
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)


def _deviation(weighted: list[tuple[float, float]], mean: float) -> float:
    return math.sqrt(_mean([(weight, (value - mean) ** 2) for weight, value in weighted])) / mean
