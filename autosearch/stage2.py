"""Stage II: SM shares under interference, as a mixed-integer program (paper, section 4.1.3).

The structure is fixed: row ranges, order on each lane, and who runs beside whom. A nano-operation with the share
R takes D / P(R); what may run at one moment asks for no more than the whole GPU; what is not to meet is kept
apart by explicit waits. The period is minimised. `docs/autosearch.md` has the mathematics.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyomo.environ as pyo

from autosearch.interference import FluidShares
from autosearch.operators import Resource
from autosearch.pipeline import PipelineSchedule
from autosearch.placement import COMPUTE_LANE, Placement, Waits, to_schedule
from autosearch.retiming import retimed
from autosearch.solvers import SolveReport, SolverOptions, solve

_TOUCH_US = 1.0  # operations that share less time than this do not meet

Meeting = tuple[int, int, int]  # blocks i < j, and by how many layers j's is later: -1, 0 or 1


@dataclass(frozen=True)
class Stage2Problem:
    """A placement whose times say which blocks meet."""

    placement: Placement

    @cached_property
    def shares(self) -> dict[Resource, tuple[tuple[float, float], ...]]:
        """(SM share, rate) to choose from, by resource."""
        table = self.placement.layer.times.table
        return {resource: table.rates(resource) for resource in Resource}

    def choices(self, index: int) -> tuple[tuple[float, float], ...]:
        """(SM share, rate) of one block."""
        return self.shares[self.placement.placed[index].block.resource]

    def alone_us(self, index: int) -> float:
        """D: profiled best on the whole GPU."""
        placed = self.placement.placed[index]
        return self.placement.layer.time_us(placed.block, placed.end - placed.start)

    @cached_property
    def pairs(self) -> tuple[Meeting, ...]:
        """All pairs of blocks on different lanes, in neighbouring layers."""
        placed = self.placement.placed
        return tuple(
            (i, j, later)
            for i, j in itertools.combinations(range(len(placed)), 2)
            if placed[i].lane != placed[j].lane
            for later in (-1, 0, 1)
        )

    def _times(self, pair: Meeting) -> tuple[float, float, float, float]:
        i, j, later = pair
        first, second = self.placement.placed[i], self.placement.placed[j]
        shift = later * self.placement.period_us
        return first.begin_us, first.end_us, second.begin_us + shift, second.end_us + shift

    @cached_property
    def meetings(self) -> frozenset[Meeting]:
        """Pairs that run beside each other, or that no wait may keep apart: none points to an earlier layer."""
        return frozenset(pair for pair in self.pairs if self._meets(pair))

    def _meets(self, pair: Meeting) -> bool:
        begin, end, other_begin, other_end = self._times(pair)
        if min(end, other_end) - max(begin, other_begin) > _TOUCH_US:
            return True
        return (pair[2] == 1 and not self.goes_first(pair)) or (pair[2] == -1 and self.goes_first(pair))

    def goes_first(self, pair: Meeting) -> bool:
        """Whether i begins before j."""
        begin, _, other_begin, _ = self._times(pair)
        return begin <= other_begin

    @cached_property
    def gatherings(self) -> tuple[tuple[int, ...], ...]:
        """Largest groups of blocks, one per lane, that all meet; their shares must fit together."""
        groups = {tuple(sorted(set(pair[:2]))) for pair in self.meetings}
        for i, j, later in self.meetings:
            for other, k, beyond in self.meetings:
                # k meets both: seen from i it is `beyond` layers later, seen from j `beyond - later`
                if other == i and k > j and (j, k, beyond - later) in self.meetings:
                    groups.add((i, j, k))
        return tuple(sorted(groups))

    @cached_property
    def data_waits(self) -> tuple[tuple[int, int, int], ...]:
        """(i, j, layers): block j reads what block i of so many layers before has written."""
        placed, layer = self.placement.placed, self.placement.layer
        found = []
        for j, reader in enumerate(placed):
            sources, back = (reader.block.inputs, 0) if reader.block.inputs else ((layer.last.name,), 1)
            for i, source in enumerate(placed):
                if source.block.name in sources and source.start < reader.end and reader.start < source.end:
                    found.append((i, j, back))
                elif source.block.name in reader.block.earlier_rows and source.start < reader.end:
                    found.append((i, j, 0))
        return tuple(found)

    @cached_property
    def kept_apart(self) -> tuple[tuple[int, int, int], ...]:
        """(i, j, layers): block j must wait for block i so that they do not meet."""
        return tuple(
            (i, j, later) if self.goes_first((i, j, later)) else (j, i, -later)
            for i, j, later in self.pairs
            if (i, j, later) not in self.meetings
        )


@dataclass(frozen=True)
class Stage2Result:
    """A schedule with shares and its period; None where the solver found none in time."""

    schedule: PipelineSchedule | None
    period_us: float
    placement: Placement
    report: SolveReport


def flows(placement: Placement, most: int) -> list[Placement]:
    """The placement as it would run if shares could change at any moment, for the best few pairs of shares."""
    table = placement.layer.times.table
    found = [
        retimed(placement, FluidShares(table, {Resource.MEMORY: memory, Resource.NETWORK: network}))
        for memory, network in _guesses(placement)
    ]
    return sorted(found, key=lambda flow: flow.period_us)[:most]


def _guesses(placement: Placement) -> Iterator[tuple[float, float]]:
    """Shares of memory and network to try a flow with. Memory-bound blocks on the compute lane take the larger part."""
    table = placement.layer.times.table
    lanes = {placed.block.resource: placed.lane for placed in placement.placed}
    below_one = {resource: [share for share, _ in table.rates(resource) if share < 1] for resource in Resource}
    small = {resource: [share for share in below_one[resource] if share <= 0.5] or [0.5] for resource in Resource}
    memory = small[Resource.MEMORY]
    if lanes.get(Resource.MEMORY, COMPUTE_LANE) == COMPUTE_LANE:
        memory = [share for share in below_one[Resource.MEMORY] if share >= 0.5] or [0.5]
    network = small[Resource.NETWORK] if Resource.NETWORK in lanes else [0.0]
    yield from ((one, other) for one, other in itertools.product(memory, network) if one + other <= 1)


def search_shares(problem: Stage2Problem, options: SolverOptions, name: str) -> Stage2Result:
    """Build, solve, extract."""
    model = build_model(problem)
    report = solve(model, options)
    if not report.found:
        return Stage2Result(None, float("inf"), problem.placement, report)
    placement, shares = extract(model, problem)
    schedule = to_schedule(placement, name, shares, _waits(problem, placement))
    return Stage2Result(schedule, placement.period_us, placement, report)


def build_model(problem: Stage2Problem) -> pyo.ConcreteModel:
    """The program; its rules have their constraints' names."""
    model = pyo.ConcreteModel()
    count = len(problem.placement.placed)
    model.blocks = pyo.RangeSet(0, count - 1)
    choices = [(index, choice) for index in range(count) for choice in range(len(problem.choices(index)))]
    model.choices = pyo.Set(initialize=choices, dimen=2)
    model.share_is = pyo.Var(model.choices, domain=pyo.Binary)  # the block has exactly this share
    model.start = pyo.Var(model.blocks, bounds=(0, 4 * problem.placement.period_us))
    model.period = pyo.Var(bounds=(0, 4 * problem.placement.period_us))

    def chosen(model: Any, index: int, worth: Any) -> Any:
        rated = enumerate(problem.choices(index))
        return sum(worth(share, rate) * model.share_is[index, choice] for choice, (share, rate) in rated)

    model.share = pyo.Expression(model.blocks, rule=lambda m, i: chosen(m, i, lambda share, rate: share))
    model.duration = pyo.Expression(
        model.blocks, rule=lambda m, i: problem.alone_us(i) * chosen(m, i, lambda share, rate: 1 / rate)
    )
    model.area = pyo.Expression(
        model.blocks, rule=lambda m, i: problem.alone_us(i) * chosen(m, i, lambda share, rate: share / rate)
    )
    _add_constraints(model, problem)
    model.objective = pyo.Objective(expr=model.period)
    return model


def _add_constraints(model: Any, problem: Stage2Problem) -> None:
    lanes = [problem.placement.lane(lane) for lane in problem.placement.lanes]

    def one_share(model: Any, index: int) -> Any:
        """A block has one share."""
        return sum(model.share_is[index, choice] for choice in range(len(problem.choices(index)))) == 1

    def inputs_ready(model: Any, i: int, j: int, back: int) -> Any:
        """A block starts when the blocks that it reads from have ended."""
        return model.start[j] + back * model.period >= model.start[i] + model.duration[i]

    def lane_in_order(model: Any, i: int, j: int, back: int) -> Any:
        """A lane runs its blocks in Stage I's order, one at a time, and a layer before the next one."""
        return model.start[j] + back * model.period >= model.start[i] + model.duration[i]

    def kept_apart(model: Any, i: int, j: int, back: int) -> Any:
        """Blocks that are not to meet wait for each other."""
        return model.start[j] + back * model.period >= model.start[i] + model.duration[i]

    def shares_fit(model: Any, *group: int) -> Any:
        """What may run at one moment asks for no more than the whole GPU."""
        return sum(model.share[index] for index in group) <= 1

    def area_fits(model: Any) -> Any:
        """Share times duration, summed over all blocks, fits into the period (a cut)."""
        return sum(model.area[index] for index in model.blocks) <= model.period

    order = [(i, j, 0) for lane in lanes for i, j in itertools.pairwise(lane)]
    order += [(lane[-1], lane[0], 1) for lane in lanes]
    model.one_share = pyo.Constraint(model.blocks, rule=one_share)
    model.inputs_ready = pyo.Constraint(_triples(problem.data_waits), rule=inputs_ready)
    model.lane_in_order = pyo.Constraint(_triples(order), rule=lane_in_order)
    model.kept_apart = pyo.Constraint(_triples(problem.kept_apart), rule=kept_apart)
    model.shares_fit = pyo.ConstraintList()
    for group in problem.gatherings:
        model.shares_fit.add(shares_fit(model, *group))
    model.area_fits = pyo.Constraint(rule=area_fits)


def _triples(keys: Any) -> pyo.Set:
    return pyo.Set(initialize=list(dict.fromkeys(keys)), dimen=3)


def extract(model: Any, problem: Stage2Problem) -> tuple[Placement, list[float]]:
    """Read the answer: begin, end and share of each block, in the problem's order."""
    shares, placed = [], []
    for index, item in enumerate(problem.placement.placed):
        rated = problem.choices(index)
        choice = max(range(len(rated)), key=lambda choice: pyo.value(model.share_is[index, choice]))
        share, rate = rated[choice]
        begin = float(pyo.value(model.start[index]))
        shares.append(share)
        placed.append(replace(item, begin_us=begin, end_us=begin + problem.alone_us(index) / rate))
    timed = replace(problem.placement, period_us=float(pyo.value(model.period)), placed=tuple(placed))
    return timed, shares


def _waits(problem: Stage2Problem, placement: Placement) -> Waits:
    """The waits that keep blocks apart and that rows and lanes do not imply already."""
    after: dict[int, tuple[int, ...]] = {}
    after_previous: dict[int, tuple[int, ...]] = {}
    for i, j, back in _needed(problem, placement):
        waits = after_previous if back else after
        waits[j] = (*waits.get(j, ()), i)
    return Waits(after, after_previous)


def _needed(problem: Stage2Problem, placement: Placement) -> Iterator[tuple[int, int, int]]:
    """Of each lane only the last block that another one must wait for; earlier ones are done before it."""
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    lanes = {index: placement.placed[index].lane for index in range(len(placement.placed))}
    for i, j, back in problem.kept_apart:
        key, rank = (j, lanes[i]), (-back, placement.lane(lanes[i]).index(i))
        if key not in latest or rank > (-latest[key][1], placement.lane(lanes[i]).index(latest[key][0])):
            latest[key] = (i, back)
    for (j, _), (i, back) in sorted(latest.items()):
        yield i, j, back
