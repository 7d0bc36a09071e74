"""A device whose times follow a formula, and whose clock moves only when it measures."""

from __future__ import annotations

import random

from autosearch.operators import Resource
from autosearch.profile_table import ProfileTable
from worker.profile_points import Launch, Pair, sm_share
from worker.profiler import Reading

NUM_SMS = 132
PUBLISHED = ProfileTable.from_file("h200-llama-3-8b")
FASTEST = {"qkv": "128x128", "o": "", "down": "", "decode_attention": "5x2"}
STATIC_WATTS = 180.0


class FormulaDevice:
    """Sustained times of the package's own H200 profile; bursts a tenth faster; other kernels a twentieth slower."""

    def __init__(self, noise: float = 0.0, burst_s: float = 0.03, sustained_s: float = 1.4) -> None:
        self.now, self.log = 100.0, []
        self._random, self._noise = random.Random(1), noise
        self._burst_s, self._sustained_s = burst_s, sustained_s

    def clock(self) -> float:
        return self.now

    def true_us(self, launch: Launch) -> float:
        whole = PUBLISHED.best(launch.operator, launch.tokens).time_us
        slower = 1.0 if launch.kernel == FASTEST.get(launch.operator, "") else 1.05
        return whole * slower / sm_share(launch.place, NUM_SMS)

    def burst(self, launch: Launch) -> float:
        self._pass(self._burst_s, launch)
        return 0.9 * self.true_us(launch)

    def alone(self, launch: Launch) -> Reading:
        self._pass(self._sustained_s, launch)
        return Reading(self.true_us(launch) * self._off(), 600.0, 1500.0)

    def together(self, pair: Pair) -> tuple[Reading, Reading]:
        """At the published rates, by straight lines where a split was not published."""
        self._pass(self._sustained_s, pair)
        gemm, attention = (
            _along(PUBLISHED.rates(kind), sm_share(launch.place, NUM_SMS))
            for kind, launch in ((Resource.COMPUTE, pair.compute), (Resource.MEMORY, pair.memory))
        )
        whole = [PUBLISHED.best(launch.operator, launch.tokens).time_us for launch in (pair.compute, pair.memory)]
        return Reading(whole[0] / gemm * self._off(), 690.0), Reading(whole[1] / attention * self._off(), 690.0)

    def layer(self, tokens: int) -> Reading:
        self._pass(self._sustained_s, tokens)
        return Reading(2000.0 * self._off(), 690.0, 1450.0)

    def around(self, tokens: int) -> Reading:
        self._pass(self._sustained_s, "around")
        return Reading(1600.0, 650.0)

    def static_watts(self) -> float:
        self._pass(self._sustained_s, "static")
        return STATIC_WATTS

    def _pass(self, seconds: float, what: object) -> None:
        self.now += seconds
        self.log.append(what)

    def _off(self) -> float:
        return 1 + self._random.uniform(-self._noise, self._noise)


def _along(curve, share):
    below = (0.0, 0.0)
    for point in curve:
        if share <= point[0]:
            return below[1] + (share - below[0]) / (point[0] - below[0]) * (point[1] - below[1])
        below = point
    return curve[-1][1]
