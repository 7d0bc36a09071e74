"""Runs candidate schedules on the device, in turns, and keeps the fastest: a search proposes, a measurement decides.

First candidates run for a moment each: those that were proposed, then, as long as that helps, what a family has near
the best one so far, and the best few once more with folded norms. Then these few and the sequential schedule run again
and again, there and back (A B C C B A ...), long enough for power to settle. A candidate that does not beat the
sequential schedule, with folded norms or without, is not kept. Knows nothing of how schedules are run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autosearch.pipeline import Figures, PipelineSchedule
from autosearch.workload import Workload
from worker.folded_norms import folded_too, is_folded


@dataclass(frozen=True, slots=True)
class Reading:
    """One schedule, run for a while."""

    ms: float  # of one iteration
    joules: float  # of one iteration


class Family(Protocol):
    """Schedules that differ in a few numbers."""

    def start(self) -> list[PipelineSchedule]:
        """Where to begin."""

    def near(self, schedule: PipelineSchedule) -> list[PipelineSchedule]:
        """What differs a little from one of them; empty for others."""


class Bench(Protocol):
    """Runs whole iterations of one batch by a schedule."""

    def run(self, schedule: PipelineSchedule, settle_s: float, seconds: float) -> Reading:
        """Over and over: settle_s unmeasured, then at least `seconds` measured."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured."""

    screen_settle_s: float = 0.2
    screen_s: float = 0.3
    num_finalists: int = 4
    settle_s: float = 0.6
    measure_s: float = 1.4
    num_repeats: int = 4  # of each finalist, half of them on the way back


@dataclass(frozen=True, slots=True)
class Measured:
    """A finalist's readings."""

    schedule: PipelineSchedule
    ms: tuple[float, ...]  # of all repeats
    joules: float  # of one iteration, mean

    @property
    def median_ms(self) -> float:
        """What counts."""
        return statistics.median(self.ms)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one batch."""

    best: PipelineSchedule  # with its figures; the sequential one where nothing beat it
    finalists: tuple[Measured, ...]  # the fastest first
    sequential: Measured  # the faster one: with folded norms or without
    screened: tuple[tuple[str, float], ...]  # all candidates by name with their first milliseconds

    @property
    def gain(self) -> float:
        """The best one's speed over the sequential one's."""
        return self.sequential.median_ms / self.finalists[0].median_ms


def tune(
    bench: Bench,
    sequential: Sequence[PipelineSchedule],
    family: Family,
    proposed: Iterable[PipelineSchedule],
    workload: Workload,
    num_layers: int,
    effort: Effort = Effort(),
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Measure for one batch: the family, and what others proposed. What comes back is planned for that batch.

    sequential: with folded norms and without; first the one that is served where no schedule is chosen.
    """
    bench.run(sequential[0], effort.settle_s, effort.screen_s)  # the card is as warm for the first as for the last
    screening = _Screening(bench, sequential, effort, say)
    ranked = screening.add([*proposed, *family.start()])
    while steps := _unseen(family, ranked, screening.known):
        ranked = screening.add(steps)
    best_few = ranked[: effort.num_finalists]
    if len(sequential) > 1:
        best_few = screening.add(folded_too(best_few))[: effort.num_finalists]
    finalists = measure_in_turns(bench, [*sequential, *best_few], effort)
    baseline = min(finalists[: len(sequential)], key=lambda measured: measured.median_ms)
    by_time = tuple(sorted(finalists, key=lambda measured: measured.median_ms))
    best = _planned_for(workload, by_time[0], finalists[0], num_layers)
    return Tuned(best, by_time, baseline, tuple(sorted(screening.ms.items(), key=lambda item: item[1])))


class _Screening:
    """First readings of all candidates, each once, whatever it is called."""

    def __init__(
        self, bench: Bench, sequential: Sequence[PipelineSchedule], effort: Effort, say: Callable[[str], None]
    ) -> None:
        self._bench, self._effort, self._say = bench, effort, say
        self._names = {schedule.name for schedule in sequential}
        self._pool: list[PipelineSchedule] = []
        self.known = {schedule.what_runs for schedule in sequential}
        self.ms: dict[str, float] = {}  # by name

    def add(self, schedules: Iterable[PipelineSchedule]) -> list[PipelineSchedule]:
        """Run those that are new; all so far, the fastest first."""
        for schedule in schedules:
            if schedule.what_runs in self.known:
                continue
            self.known.add(schedule.what_runs)
            schedule = _named_apart(schedule, self._names)
            self._names.add(schedule.name)
            reading = self._bench.run(schedule, self._effort.screen_settle_s, self._effort.screen_s)
            self.ms[schedule.name] = reading.ms
            self._say(f"{schedule.name}: {reading.ms:.2f} ms")
            self._pool.append(schedule)
        return sorted(self._pool, key=lambda schedule: self.ms[schedule.name])


def _planned_for(workload: Workload, best: Measured, served: Measured, num_layers: int) -> PipelineSchedule:
    """The best one, with its batch and its figures. served: what runs where no schedule is chosen."""
    seconds, served_s = best.median_ms / 1e3, served.median_ms / 1e3
    rows = workload.batch_tokens
    return replace(
        best.schedule,
        decode_share=workload.decode_rows / rows,
        mean_context=workload.decode_context_tokens / max(1.0, workload.decode_rows),
        prefill_pairs=workload.prefill_pairs,
        measured=Figures(best.median_ms * 1e3 / num_layers, rows / seconds, rows / served_s),
    )


def _named_apart(schedule: PipelineSchedule, names: Container[str]) -> PipelineSchedule:
    """Readings are kept by name: a candidate's may be one that another schedule has."""
    name, number = schedule.name, 2
    while name in names:
        name, number = f"{schedule.name} ({number})", number + 1
    return replace(schedule, name=name)


def _unseen(family: Family, ranked: Sequence[PipelineSchedule], known: Container[Hashable]) -> list[PipelineSchedule]:
    """What the family has near the fastest one of it, with folded norms where that has them."""
    for schedule in ranked:
        if near := family.near(schedule):
            near = folded_too(near) if is_folded(schedule) else near
            return [each for each in near if each.what_runs not in known]
    return []


def measure_in_turns(bench: Bench, schedules: Sequence[PipelineSchedule], effort: Effort) -> list[Measured]:
    """All of them there and back, until each has had its repeats; in the order given."""
    readings: dict[str, list[Reading]] = {schedule.name: [] for schedule in schedules}
    for turn in range(effort.num_repeats):
        for schedule in schedules if turn % 2 == 0 else reversed(schedules):
            readings[schedule.name].append(bench.run(schedule, effort.settle_s, effort.measure_s))
    return [
        Measured(
            schedule,
            tuple(reading.ms for reading in readings[schedule.name]),
            statistics.fmean(reading.joules for reading in readings[schedule.name]),
        )
        for schedule in schedules
    ]
