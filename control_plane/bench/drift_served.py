"""One trace through scheduler and engine, part after part, its plans in turns: fed as it is served.

A part begins with its first request. When no request of an earlier part is left and a generation of its own has ended,
its plans take turns, there and back (A B C C B A ...), while requests go on coming and going; then the next part
begins. The plan is switched between two iterations, as serving does. Knows nothing of devices: the clock is an
argument.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from control_plane.bench.ablation_plan import in_turns
from control_plane.bench.ablation_table import Row
from control_plane.bench.drift_plan import Part, RequestSource
from control_plane.bench.drift_table import PartResult
from scheduler.plan import OutputBatch, StepStats
from scheduler.request import NewRequest
from worker.schedule_choice import ScheduleChoice
from worker.tuner import Effort

CHOICE = "choice"  # the plan that is no fixed one
_QUEUED_STEPS = 3  # iterations that the requests that wait would fill


class Meter(Protocol):
    """As GpuMeter."""

    def start(self) -> None:
        """Begin to read."""

    def stop(self, num_tokens: int) -> dict[str, Any]:
        """Medians since start()."""


@dataclass(slots=True)
class Turn:
    """Iterations by one plan."""

    plan: str
    settled_s: float  # by the clock; what ended before is not counted
    began_s: float | None = None  # when the first counted iteration began: the end of the one before it
    ended_s: float = 0.0
    steps: list[StepStats] = field(default_factory=list)
    power: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Of prompts and outputs."""
        return sum(stats.num_tokens for stats in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """From the end of the iteration before the first counted one to the end of the last."""
        assert self.began_s is not None, "a turn that has ended has begun"
        return self.num_tokens / (self.ended_s - self.began_s)


class DriftTrace:
    """Takes what the loop emits, in the loop's thread, submits what comes next, and says by which plan to go on."""

    def __init__(
        self,
        parts: Sequence[Part],
        plans: Mapping[str, ScheduleChoice | None],
        use: Callable[[ScheduleChoice | None], None],
        *,
        rows: int,
        vocab_size: int,
        effort: Effort,
        meter: Callable[[], Meter] | None = None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """plans: by name, CHOICE among them. use: has later iterations run by one. rows: of a full batch."""
        self.done = threading.Event()
        self.failures: list[str] = []
        self.turns: dict[str, list[Turn]] = {part.name: [] for part in parts}  # by part, in order
        self._parts, self._plans, self._use, self._effort = parts, plans, use, effort
        self._new_meter, self._say, self._clock = meter, say, clock
        self._sources = [RequestSource(part, str(number), vocab_size) for number, part in enumerate(parts)]
        self._queue = [_QUEUED_STEPS * rows // part.load.input_len + _QUEUED_STEPS for part in parts]
        self._submitted, self._ended = [0] * len(parts), [0] * len(parts)
        self._submit: Callable[[Sequence[NewRequest]], None] = lambda requests: None
        self._number = 0  # of the part
        self._to_come: Iterator[str] | None = None  # plans of the part's later turns; None until it is steady
        self._turn: Turn | None = None
        self._meter: Meter | None = None

    def begin(self, submit: Callable[[Sequence[NewRequest]], None]) -> None:
        """Submit the first requests."""
        self._submit = submit
        self._use(self._plans[CHOICE])
        self._feed(0)

    def __call__(self, batch: OutputBatch) -> None:
        now = self._clock()
        for end in batch.ends:
            self._ended[int(end.request_id.partition("-")[0])] += 1
        self.failures += [end.error or str(end.finish_reason) for end in batch.ends if end.finish_reason != "length"]
        if self.failures:
            self.done.set()
        if batch.stats is None or self.done.is_set():
            return
        if self._turn is not None:
            self._count(self._turn, now, batch.stats)
        elif self._is_steady(batch.load.num_running):
            self._say(f"part {self._parts[self._number].name}: steady, {self._submitted[self._number]} requests so far")
            self._to_come = in_turns(list(self._plans), self._effort.num_repeats)
            self._next_turn(now)
        if not self.done.is_set():
            self._feed(batch.load.num_waiting)

    def fail(self, error: BaseException) -> None:
        """The loop itself ended."""
        self.failures.append(f"{type(error).__name__}: {error}")
        self.done.set()

    def _is_steady(self, num_running: int) -> bool:
        """No earlier part's request is left, and as many of its own have ended as now run."""
        before = slice(self._number)
        return self._submitted[before] == self._ended[before] and self._ended[self._number] >= num_running

    def _count(self, turn: Turn, now: float, stats: StepStats) -> None:
        """The iteration that was in flight when the plan was switched is the first told: it is never counted."""
        if turn.began_s is None:
            if now >= turn.settled_s:
                turn.began_s = now
                self._start_meter()
            return
        turn.steps.append(stats)
        if now - turn.began_s < self._effort.measure_s:
            return
        turn.ended_s = now
        if self._meter is not None:
            turn.power = self._meter.stop(turn.num_tokens)
        part = self._parts[self._number].name
        self._say(f"  {part} {turn.plan}: {turn.tokens_per_s:.0f} tokens/s in {len(turn.steps)} iterations")
        self.turns[part].append(turn)
        self._next_turn(now)

    def _start_meter(self) -> None:
        if self._new_meter is not None:
            self._meter = self._new_meter()
            self._meter.start()

    def _next_turn(self, now: float) -> None:
        assert self._to_come is not None, "the part is steady"
        plan = next(self._to_come, None)
        if plan is not None:
            self._use(self._plans[plan])
            self._turn = Turn(plan, now + self._effort.settle_s)
            return
        self._turn, self._to_come = None, None
        self._use(self._plans[CHOICE])
        if self._number + 1 == len(self._parts):
            self.done.set()
        else:
            self._number += 1

    def _feed(self, num_waiting: int) -> None:
        """Keep the queue long enough that every batch can be full."""
        missing, source = self._queue[self._number] - num_waiting, self._sources[self._number]
        if missing > 0:
            self._submitted[self._number] += missing
            self._submit([source.draw() for _ in range(missing)])


def part_result(part: Part, batch: str, turns: Sequence[Turn], plans: Sequence[str]) -> PartResult:
    """plans: names of the fixed ones, the sequential one first. batch: in words."""
    rows = {name: _row(name, [turn for turn in turns if turn.plan == name]) for name in (CHOICE, *plans)}
    every = [stats for turn in turns for stats in turn.steps]
    chosen = [stats for turn in turns if turn.plan == CHOICE for stats in turn.steps]
    return PartResult(
        part.name,
        batch,
        sum(stats.num_decodes for stats in every) / sum(stats.num_tokens for stats in every),
        rows.pop(CHOICE),
        tuple(rows.values()),
        sum(stats.overlapped for stats in chosen) / len(chosen),
        sum(stats.unmeasured for stats in chosen) / len(chosen),
    )


def _row(name: str, turns: Sequence[Turn]) -> Row:
    speeds = tuple(turn.tokens_per_s for turn in turns)
    powers = [turn.power for turn in turns if turn.power]
    watts = statistics.median(power["watts"] for power in powers) if powers else None
    clock = statistics.median(power["sm_mhz"] for power in powers) if powers else None
    joules = None if watts is None else watts / statistics.median(speeds)
    return Row(name if name == CHOICE else "fixed", name, speeds, watts, clock, joules)
