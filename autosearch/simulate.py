"""Plays a schedule on a profile: when each nano-operation of each layer begins and ends.

Lanes run in order, data waits for data, and an interference model says how fast what runs together runs. The
oracle for tests and for GPUs that nobody here has. Knows nothing of how a schedule was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosearch.interference import Activity, Interference
from autosearch.operator_times import OperatorTimes
from autosearch.operators import ATTENTION, Collectives, Operator
from autosearch.pipeline import PipelineSchedule
from autosearch.precedence import ChainedLayers, NanoOperation

_DONE = 1e-9


@dataclass(frozen=True, slots=True)
class Span:
    """One nano-operation of one layer."""

    index: int  # in the schedule's operations
    layer: int
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of time in which the same operations run, with their rates."""

    begin_us: float
    end_us: float
    indexes: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Running:
    """An operation on its lane."""

    index: int
    job: tuple[int, int]  # the operation whose work it does, and the layer
    begin_us: float


@dataclass(frozen=True)
class Timeline:
    """All layers of one iteration."""

    schedule: PipelineSchedule
    num_layers: int
    spans: tuple[Span, ...]  # in order of begin
    moments: tuple[Moment, ...]

    @property
    def makespan_us(self) -> float:
        """From the first begin to the last end."""
        return max(span.end_us for span in self.spans)

    @property
    def layer_us(self) -> float:
        """From one layer's end to the next one's, in the steady middle."""
        ends = [0.0] * self.num_layers
        for span in self.spans:
            ends[span.layer] = max(ends[span.layer], span.end_us)
        first, last = self.num_layers // 4, self.num_layers - 1 - self.num_layers // 4
        return (ends[last] - ends[first]) / (last - first) if last > first else self.makespan_us / self.num_layers

    def of_layer(self, layer: int) -> tuple[Span, ...]:
        """Spans of one layer, by index of the operation."""
        return tuple(sorted((span for span in self.spans if span.layer == layer), key=lambda span: span.index))


def activities(schedule: PipelineSchedule, times: OperatorTimes) -> tuple[Activity, ...]:
    """What each operation of the schedule is, alone."""
    by_name = {operator.name: operator for operator in times.operators(Collectives(schedule.collectives))}
    return tuple(
        _activity(by_name[operation.operator], _rows(schedule, operation, times), operation.sm_share, times)
        for operation in schedule.operations
    )


def _rows(schedule: PipelineSchedule, operation: NanoOperation, times: OperatorTimes) -> int:
    """Rows of the operation; of attention, so many of a mixed batch as have its share of the work."""
    start, end, rows = operation.start, operation.end, schedule.batch_tokens
    if not schedule.decodes_first or operation.operator not in ATTENTION:
        return end - start
    work = times.target.work
    decodes = round(rows * work.decode_rows / work.batch_tokens)
    low, high = (0, decodes) if operation.operator == ATTENTION[0] else (decodes, rows)
    inside = max(0, min(end, high) - max(start, low))
    return round(inside * rows / (high - low)) if inside else 0


def _activity(operator: Operator, rows: int, sm_share: float, times: OperatorTimes) -> Activity:
    if not rows:
        return Activity(operator.resource, sm_share, 0.0, 0.0)
    return Activity(operator.resource, sm_share, times.time_us(operator, rows), times.joules(operator, rows))


def simulate(schedule: PipelineSchedule, times: OperatorTimes, interference: Interference, num_layers: int) -> Timeline:
    """Play num_layers chained layers. Raises InvalidScheduleError where the schedule cannot be run."""
    operators = times.operators(Collectives(schedule.collectives))
    schedule.validate(operators)
    return play(schedule, operators, activities(schedule, times), interference, num_layers)


def play(
    schedule: PipelineSchedule,
    operators: Sequence[Operator],
    work: Sequence[Activity],
    interference: Interference,
    num_layers: int,
) -> Timeline:
    """`simulate` without validation: shares may be imagined, as FluidShares does."""
    waits = ChainedLayers(schedule.operations, tuple(operators)).waits
    lanes: dict[int, list[int]] = {}
    for index, operation in enumerate(schedule.operations):
        lanes.setdefault(operation.lane, []).append(index)
    position = dict.fromkeys(lanes, 0)  # operations begun on each lane
    ended: list[set[int]] = [set() for _ in range(num_layers)]
    running: dict[int, _Running] = {}  # by lane
    left: dict[tuple[int, int], float] = {}  # of the work that was begun: (operation, layer); helpers share one's
    spans: list[Span] = []
    moments: list[Moment] = []
    now = 0.0
    while True:
        for lane, indexes in lanes.items():
            layer, place = divmod(position[lane], len(indexes))
            if lane in running or layer >= num_layers:
                continue
            index = indexes[place]
            if all(layer < back or other in ended[layer - back] for other, back in waits[index]):
                job = (schedule.helped(index), layer)
                running[lane] = _Running(index, job, now)
                left.setdefault(job, work[job[0]].time_us)
                position[lane] += 1
        if not running:
            break
        now = _advance(list(running.values()), left, work, interference, now, moments)
        for lane in [lane for lane, state in running.items() if left[state.job] <= _DONE]:
            state = running.pop(lane)
            spans.append(Span(state.index, state.job[1], state.begin_us, now))
            ended[state.job[1]].add(state.index)
    return Timeline(schedule, num_layers, tuple(sorted(spans, key=lambda span: span.begin_us)), tuple(moments))


def _advance(
    running: Sequence[_Running],
    left: dict[tuple[int, int], float],
    work: Sequence[Activity],
    interference: Interference,
    now: float,
    moments: list[Moment],
) -> float:
    """Run on to the next end; returns the time of it."""
    jobs = {state.job for state in running}
    if any(left[job] <= _DONE for job in jobs):
        return now
    indexes = tuple(state.index for state in running)
    rates = interference.rates([work[index] for index in indexes])
    together = {job: sum(rate for state, rate in zip(running, rates) if state.job == job) for job in jobs}
    step = min(left[job] / together[job] for job in jobs)
    for job in jobs:
        left[job] -= step * together[job]
        if left[job] < 1e-6 * work[job[0]].time_us:
            left[job] = 0.0
    moments.append(Moment(now, now + step, indexes, rates))
    return now + step
