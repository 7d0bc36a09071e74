"""Stage I: number, row ranges and order of nano-operations, as a mixed-integer program (paper, section 4.1.2).

Interference is left out: every nano-operation takes its best profiled time. The layer repeats with a period; an
operation may run beside the next layer's, but each lane finishes a layer before it begins the next. The period
is minimised, and after it the number of nano-operations. `docs/autosearch.md` has the mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyomo.environ as pyo

from autosearch.blocks import RANGE_STEP, Block, Layer
from autosearch.operators import Resource
from autosearch.placement import Overlap, Placed, Placement, in_issue_order, lane_of
from autosearch.solvers import SolveReport, SolverOptions, solve

FINE_STEPS, COARSE_STEPS = 8, 4  # a split group's ranges lie on a grid of about this many steps
FEWER_IS_BETTER = 2e-4  # of the sequential time, per nano-batch: second objective, far below any real gain

Slot = tuple[str, int]  # (split group, index); a slot is one row range, ascending
Step = tuple[str, int]  # (block, index of its slot)


@dataclass(frozen=True)
class Stage1Problem:
    """What is to be split and ordered."""

    layer: Layer
    batch_tokens: int
    slots: Mapping[str, int]  # at most this many row ranges by split group
    overlap: Overlap = Overlap.ALL
    slowdown: Mapping[Resource, float] = field(default_factory=dict)  # beside others; empty: no interference
    period_below_us: float | None = None  # only better answers are of interest
    grid_steps: int = FINE_STEPS

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """By name, in sequential order."""
        return {block.name: block for block in self.layer.blocks}

    @cached_property
    def step_rows(self) -> int:
        """Ranges end on multiples of this, itself a multiple of 128; the last range takes what is left."""
        return RANGE_STEP * math.ceil(self.batch_tokens / RANGE_STEP / max(self.grid_steps, *self.slots.values()))

    def sizes(self, slot: Slot) -> tuple[int, ...]:
        """Rows that a slot may have; only the last slot must have some."""
        rest = self.batch_tokens % self.step_rows
        last = slot[1] == self.slots[slot[0]] - 1
        sizes = range(rest if last else 0, self.batch_tokens + 1, self.step_rows)
        return tuple(size for size in sizes if size or not last)

    def time_us(self, block: str, rows: int) -> float:
        """Profiled best, slowed where the problem says so."""
        chosen = self.blocks[block]
        return self.layer.time_us(chosen, rows) * self.slowdown.get(chosen.resource, 1.0)

    @cached_property
    def sequential_us(self) -> float:
        """Nothing split, nothing overlapped: always a feasible answer."""
        return sum(self.time_us(block, self.batch_tokens) for block in self.blocks)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All nano-operations that there may be."""
        return tuple((name, index) for name, block in self.blocks.items() for index in range(self.slots[block.group]))

    def lane(self, step: Step) -> int:
        """Lane of a step."""
        return lane_of(self.blocks[step[0]], self.overlap)

    def sources(self, block: Block) -> tuple[tuple[Block, bool], ...]:
        """Blocks whose rows it reads, and whether those are the previous layer's."""
        if not block.inputs:
            return ((self.layer.last, True),)
        return tuple((self.blocks[name], False) for name in block.inputs)

    @cached_property
    def ancestors(self) -> dict[str, set[str]]:
        """Blocks that come before a block on the same rows."""
        found: dict[str, set[str]] = {}
        for name, block in self.blocks.items():
            found[name] = set(block.inputs).union(*(found[source] for source in block.inputs))
        return found


@dataclass(frozen=True, slots=True)
class Stage1Result:
    """The best placement found; None where the solver found none in time or none is better."""

    placement: Placement | None
    report: SolveReport


def search_structure(problem: Stage1Problem, options: SolverOptions) -> Stage1Result:
    """Build, solve, extract."""
    model = build_model(problem)
    report = solve(model, options)
    return Stage1Result(extract(model, problem) if report.found else None, report)


def build_model(problem: Stage1Problem) -> pyo.ConcreteModel:
    """The program; its rules have their constraints' names."""
    model = pyo.ConcreteModel()
    _add_variables(model, problem)
    _add_ranges(model, problem)
    _add_dependencies(model, problem)
    _add_lanes(model, problem)
    penalty = FEWER_IS_BETTER * problem.sequential_us
    model.objective = pyo.Objective(expr=model.period + penalty * sum(model.used[slot] for slot in model.slots))
    return model


def _add_variables(model: Any, problem: Stage1Problem) -> None:
    slots = [(group, index) for group in problem.layer.groups for index in range(problem.slots[group])]
    model.slots = pyo.Set(initialize=slots, dimen=2)
    model.steps = pyo.Set(initialize=problem.steps, dimen=2)
    model.choices = pyo.Set(initialize=[(*slot, size) for slot in slots for size in problem.sizes(slot)], dimen=3)
    model.size_is = pyo.Var(model.choices, domain=pyo.Binary)  # the slot has exactly this many rows
    model.start = pyo.Var(model.steps, bounds=(0, _horizon(problem)))  # us from the layer's first operation
    lower = max(
        sum(problem.time_us(name, problem.batch_tokens) for name in problem.blocks if problem.lane((name, 0)) == lane)
        for lane in _lanes(problem)
    )
    upper = min(problem.sequential_us, problem.period_below_us or math.inf)
    model.period = pyo.Var(bounds=(min(lower, upper), upper))

    def rows(model: Any, group: str, index: int) -> Any:
        return sum(size * model.size_is[group, index, size] for size in problem.sizes((group, index)))

    def used(model: Any, group: str, index: int) -> Any:
        return sum(model.size_is[group, index, size] for size in problem.sizes((group, index)) if size)

    def last_row(model: Any, group: str, index: int) -> Any:
        return sum(model.rows[group, earlier] for earlier in range(index + 1))

    def duration(model: Any, name: str, index: int) -> Any:
        slot = (problem.blocks[name].group, index)
        return sum(problem.time_us(name, size) * model.size_is[*slot, size] for size in problem.sizes(slot) if size)

    model.rows = pyo.Expression(model.slots, rule=rows)
    model.used = pyo.Expression(model.slots, rule=used)
    model.last_row = pyo.Expression(model.slots, rule=last_row)
    model.duration = pyo.Expression(model.steps, rule=duration)


def _horizon(problem: Stage1Problem) -> float:
    return 1.5 * problem.sequential_us


def _lanes(problem: Stage1Problem) -> list[int]:
    return sorted({problem.lane(step) for step in problem.steps})


def _add_ranges(model: Any, problem: Stage1Problem) -> None:
    def one_size(model: Any, group: str, index: int) -> Any:
        """A slot has one size."""
        return sum(model.size_is[group, index, size] for size in problem.sizes((group, index))) == 1

    def whole_batch(model: Any, group: str) -> Any:
        """A group's slots cover the batch."""
        return model.last_row[group, problem.slots[group] - 1] == problem.batch_tokens

    def unused_first(model: Any, group: str, index: int) -> Any:
        """Slots without rows come first: of equal answers only one is left."""
        if index + 1 == problem.slots[group]:
            return pyo.Constraint.Skip
        return model.used[group, index] <= model.used[group, index + 1]

    model.one_size = pyo.Constraint(model.slots, rule=one_size)
    model.whole_batch = pyo.Constraint(list(problem.layer.groups), rule=whole_batch)
    model.unused_first = pyo.Constraint(model.slots, rule=unused_first)


def _group_pairs(problem: Stage1Problem) -> list[tuple[str, str]]:
    """Groups that read from another group."""
    pairs = ((source.group, block.group) for block in problem.layer.blocks for source, _ in problem.sources(block))
    return list(dict.fromkeys((source, reader) for source, reader in pairs if source != reader))


def _add_dependencies(model: Any, problem: Stage1Problem) -> None:
    meetings = [
        (source, reader, i, j)
        for source, reader in _group_pairs(problem)
        for i in range(problem.slots[source])
        for j in range(problem.slots[reader])
    ]
    model.meetings = pyo.Set(initialize=meetings, dimen=4)
    # Slot i of the source begins before slot j of the reader ends: the reader must wait for it.
    model.reads = pyo.Var(model.meetings, domain=pyo.Binary)

    def ranges_meet(model: Any, source: str, reader: str, i: int, j: int) -> Any:
        """A slot whose rows begin before the reader's end must be waited for (later slots end later)."""
        if i == 0:
            return model.reads[source, reader, i, j] == 1
        first_row = model.last_row[source, i - 1]
        return model.last_row[reader, j] - first_row <= problem.batch_tokens * model.reads[source, reader, i, j]

    def meet_in_order(model: Any, source: str, reader: str, i: int, j: int) -> Any:
        """Who waits for a slot waits for the slots before it (a cut: it helps the solver)."""
        if i == 0:
            return pyo.Constraint.Skip
        return model.reads[source, reader, i, j] <= model.reads[source, reader, i - 1, j]

    model.ranges_meet = pyo.Constraint(model.meetings, rule=ranges_meet)
    model.meet_in_order = pyo.Constraint(model.meetings, rule=meet_in_order)
    model.inputs_ready = pyo.ConstraintList(doc="A step starts when the steps that it reads from have ended.")
    for block in problem.layer.blocks:
        for source, chained in problem.sources(block):
            for i, j, waits in _readings(model, problem, source, block):
                free_us = _horizon(problem) * (1 - waits)
                begin = model.start[block.name, j] + (model.period if chained else 0)
                model.inputs_ready.add(begin + free_us >= model.start[source.name, i] + model.duration[source.name, i])


def _readings(model: Any, problem: Stage1Problem, source: Block, block: Block) -> Iterator[tuple[int, int, Any]]:
    """Pairs of slots, and whether the second waits for the first (1, or a binary)."""
    for j in range(problem.slots[block.group]):
        if source.group == block.group:
            yield j, j, 1
        else:
            for i in range(problem.slots[source.group]):
                yield i, j, model.reads[source.group, block.group, i, j]


def _add_lanes(model: Any, problem: Stage1Problem) -> None:
    lanes = _lanes(problem)
    model.lane_begin = pyo.Var(lanes, bounds=(0, _horizon(problem)))
    model.lane_begin[lanes[0]].fix(0)
    steps_on = {lane: [step for step in problem.steps if problem.lane(step) == lane] for lane in lanes}

    def lane_begins(model: Any, name: str, index: int) -> Any:
        """No step starts before its lane begins the layer."""
        return model.start[name, index] >= model.lane_begin[problem.lane((name, index))]

    def lane_ends(model: Any, name: str, index: int) -> Any:
        """A lane is done with a layer within one period: then it begins the next layer."""
        ends = model.start[name, index] + model.duration[name, index]
        return ends <= model.lane_begin[problem.lane((name, index))] + model.period

    def lane_busy(model: Any, lane: int) -> Any:
        """The period is no shorter than a lane's work (a cut)."""
        return model.period >= sum(model.duration[step] for step in steps_on[lane])

    def rows_in_order(model: Any, name: str, index: int) -> Any:
        """A block's slots run in ascending rows: later rows read the keys of earlier ones."""
        if index == 0:
            return pyo.Constraint.Skip
        return model.start[name, index] >= model.start[name, index - 1] + model.duration[name, index - 1]

    model.lane_begins = pyo.Constraint(model.steps, rule=lane_begins)
    model.lane_ends = pyo.Constraint(model.steps, rule=lane_ends)
    model.lane_busy = pyo.Constraint(lanes, rule=lane_busy)
    model.rows_in_order = pyo.Constraint(model.steps, rule=rows_in_order)
    _add_order(model, problem, [pair for lane in lanes for pair in _open_pairs(problem, steps_on[lane])])


def _open_pairs(problem: Stage1Problem, steps: list[Step]) -> Iterator[tuple[Step, Step]]:
    """Pairs of one lane whose order no dependency settles."""
    for position, first in enumerate(steps):
        for second in steps[position + 1 :]:
            same_rows = problem.blocks[first[0]].group == problem.blocks[second[0]].group
            settled = same_rows and first[0] in problem.ancestors[second[0]] and first[1] <= second[1]
            if first[0] != second[0] and not settled:
                yield first, second


def _add_order(model: Any, problem: Stage1Problem, pairs: list[tuple[Step, Step]]) -> None:
    model.pairs = pyo.Set(initialize=[(*first, *second) for first, second in pairs], dimen=4)
    model.first_goes_first = pyo.Var(model.pairs, domain=pyo.Binary)
    longest = problem.sequential_us

    def first_before_second(model: Any, a: str, i: int, b: str, j: int) -> Any:
        """One operation per resource at a time: the second waits, or ..."""
        free_us = longest * (1 - model.first_goes_first[a, i, b, j])
        return model.start[b, j] + free_us >= model.start[a, i] + model.duration[a, i]

    def second_before_first(model: Any, a: str, i: int, b: str, j: int) -> Any:
        """... the first does."""
        free_us = longest * model.first_goes_first[a, i, b, j]
        return model.start[a, i] + free_us >= model.start[b, j] + model.duration[b, j]

    def earlier_rows_follow(model: Any, a: str, i: int, b: str, j: int) -> Any:
        """If a step goes first, so does the same block's earlier slot (a cut)."""
        if (a, i - 1, b, j) not in model.pairs:
            return pyo.Constraint.Skip
        return model.first_goes_first[a, i, b, j] <= model.first_goes_first[a, i - 1, b, j]

    model.first_before_second = pyo.Constraint(model.pairs, rule=first_before_second)
    model.second_before_first = pyo.Constraint(model.pairs, rule=second_before_first)
    model.earlier_rows_follow = pyo.Constraint(model.pairs, rule=earlier_rows_follow)


def extract(model: Any, problem: Stage1Problem) -> Placement:
    """Read the answer: blocks with rows, their ranges and times."""
    placed = []
    for name, block in problem.blocks.items():
        row = 0
        for index in range(problem.slots[block.group]):
            rows = round(pyo.value(model.rows[block.group, index]))
            begin = max(0.0, float(pyo.value(model.start[name, index])))
            if rows:
                lane = problem.lane((name, index))
                placed.append(Placed(block, row, row + rows, lane, begin, begin + problem.time_us(name, rows)))
            row += rows
    return in_issue_order(problem.layer, problem.batch_tokens, float(pyo.value(model.period)), placed)
