"""The schedules that a rank runs by, and their exchange for others while it serves.

A new set is prepared beside the iterations, in a thread of its own, and used from one iteration on. What no set needs
any more is freed when the last iteration that may run by it has ended. A set is taken as a whole or not at all. Knows
nothing of devices: what makes a schedule runnable is passed in.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from autosearch.pipeline import InvalidScheduleError, PipelineSchedule
from worker.schedule_choice import ScheduleChoice, may_be_chosen

log = logging.getLogger(__name__)

_GIVE_WAY_S = 2e-4  # Python's own 5 ms are more than a whole iteration of few requests


class SchedulesRefusedError(ValueError):
    """Schedules that cannot serve here, or should not. The message says which and why; nothing has changed."""


class Runner(Protocol):
    """A device that runs iterations by schedules, each held under its name.

    mark() is called from the thread that hands iterations over, all else from one other thread.
    """

    def prepare(self, schedule: PipelineSchedule) -> None:
        """Make it runnable, beside the iterations. Raises InvalidScheduleError for what cannot run there."""

    def release(self, name: str) -> None:
        """Free what belongs to a schedule, prepared or half prepared: no iteration runs by it any more."""

    def mark(self) -> Callable[[], None]:
        """Between two iterations: what waits until all iterations before have ended."""


@dataclass(frozen=True, slots=True)
class ScheduleRules:
    """What schedules must be to take the place of those that serve."""

    model: str  # name of the model's folder
    device: str  # the GPU's name, or cpu
    batch_sizes: frozenset[int]  # rows that iterations have
    room: int  # schedules that may be held at a time, old and new; 0: never any but the first ones

    def check(self, schedules: Sequence[PipelineSchedule]) -> None:
        """Raises SchedulesRefusedError for the first one that is not fit."""
        if not schedules:
            raise SchedulesRefusedError("there are no schedules among them")
        for name, count in Counter(schedule.name for schedule in schedules).items():
            if count > 1:
                raise SchedulesRefusedError(f"{count} schedules are named {name}: give each a name of its own")
        for schedule in schedules:
            if reason := self._objection(schedule):
                raise SchedulesRefusedError(f"{schedule.name}: {reason}")

    def _objection(self, schedule: PipelineSchedule) -> str:
        """Why the schedule must not serve here; empty where it may."""
        if schedule.model and schedule.model != self.model:
            return f"it was made for model {schedule.model}, and {self.model} is served here"
        if schedule.batch_tokens not in self.batch_sizes:
            sizes = ", ".join(map(str, sorted(self.batch_sizes)))
            return f"it is for batches of {schedule.batch_tokens} rows, and those of this engine have {sizes}"
        if schedule.measured is None or schedule.planned_for is None:
            return "nothing says how fast it was, and on which batch: `nanoflow tune --candidates` measures it"
        if schedule.gpu != self.device:
            return f"it was measured on {schedule.gpu or 'an unknown GPU'}, and this engine runs on {self.device}"
        return ""


@dataclass(frozen=True, slots=True)
class ScheduleSet:
    """What iterations choose from."""

    choice: ScheduleChoice | None  # None: all are sequential
    names: frozenset[str]  # of the schedules that it may choose, as they are held

    @classmethod
    def of(cls, schedules: Sequence[PipelineSchedule]) -> ScheduleSet:
        names = frozenset(schedule.name for schedule in schedules if may_be_chosen(schedule))
        return cls(ScheduleChoice(schedules) if schedules else None, names)


@contextmanager
def _giving_way() -> Iterator[None]:
    """Meanwhile a thread that wants the interpreter, as the one that serves often does, gets it after _GIVE_WAY_S."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_GIVE_WAY_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class ScheduleSets:
    """The set that serves, those that are ready to, and what is held for them.

    prepare() and drop() may take long, and are called from any thread; use() returns at once, and is called from the
    one that hands iterations over. One thread prepares and frees, whoever asks: a GPU's libraries keep memory for each.
    """

    def __init__(self, rules: ScheduleRules, runner: Runner, first: Sequence[PipelineSchedule]) -> None:
        """first: those that serve from the start, prepared already."""
        self._rules, self._runner = rules, runner
        self._serving = ScheduleSet.of(first)
        self._held = {schedule.name: schedule for schedule in first if may_be_chosen(schedule)}
        self._ready: dict[int, ScheduleSet] = {}
        self._retired: list[Callable[[], None]] = []  # for each set that serves no more, what waits for its iterations
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="schedules")

    @property
    def choice(self) -> ScheduleChoice | None:
        """What the next iteration chooses from; None: it is sequential."""
        return self._serving.choice

    def rehearse(self, work: Callable[[], None]) -> None:
        """Before serving: do in the thread that prepares what takes long there at the first time."""
        self._run(work)

    def prepare(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """Make a set ready under this number. Raises SchedulesRefusedError."""
        self._run(lambda: self._prepare(number, schedules))

    def use(self, number: int) -> None:
        """Serve by the set that was made ready under this number, from the next iteration on."""
        self._retired.append(self._runner.mark())  # before the exchange: from then on the old set may be freed
        self._serving = self._ready[number]
        del self._ready[number]
        with suppress(RuntimeError):  # closed: all is freed with the device
            self._thread.submit(self._free)

    def use_choice(self, choice: ScheduleChoice | None) -> None:
        """Let iterations choose by this one, among the schedules that serve, until another set does: for benchmarks."""
        self._serving = replace(self._serving, choice=choice)

    def drop(self, number: int) -> None:
        """Free a set that is ready and was not used. One that is not there is ignored."""
        self._run(lambda: self._drop(number))

    def free(self) -> None:
        """Wait until all is freed that no set needs any more."""
        self._run(self._free)

    def close(self) -> None:
        """Prepare and free nothing more; waits for what is under way. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], None]) -> None:
        closed = SchedulesRefusedError("the engine is being closed")
        try:
            running = self._thread.submit(work)
        except RuntimeError:
            raise closed from None
        try:
            running.result()
        except CancelledError:
            raise closed from None

    @_giving_way()
    def _prepare(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        self._free()
        self._rules.check(schedules)
        named: list[PipelineSchedule] = []
        new: dict[str, PipelineSchedule] = {}
        for schedule in schedules:
            schedule = self._named(schedule, number, new)
            named.append(schedule)
            if may_be_chosen(schedule) and schedule.name not in self._held:
                new[schedule.name] = schedule
        self._check_room(len(new))
        try:
            for schedule in new.values():
                self._hold(schedule)
            self._ready[number] = ScheduleSet.of(named)
        finally:
            self._free()  # where one was refused, the new ones before it

    def _drop(self, number: int) -> None:
        self._ready.pop(number, None)
        self._free()

    def _named(self, schedule: PipelineSchedule, number: int, new: Mapping[str, PipelineSchedule]) -> PipelineSchedule:
        """Under the name of one that is held, or will be, and runs the same way; or under one that no other has."""
        same = next(
            (name for name, each in {**self._held, **new}.items() if each.what_runs == schedule.what_runs), None
        )
        if same is None and schedule.name in self._held:
            same = f"{schedule.name}#{number}"
        return schedule if same is None else replace(schedule, name=same)

    def _check_room(self, num_new: int) -> None:
        room, needed = self._rules.room, len(self._held) + num_new
        if num_new and not room:
            raise SchedulesRefusedError(f"no room was kept for other schedules: start with --max-schedules {needed}")
        if num_new and needed > room:
            raise SchedulesRefusedError(
                f"{num_new} new schedules beside the {len(self._held)} that serve are {needed}, and at the start "
                f"memory was reserved for {room}: leave some out, or start with --max-schedules {needed}"
            )

    def _hold(self, schedule: PipelineSchedule) -> None:
        self._held[schedule.name] = schedule
        try:
            self._runner.prepare(schedule)
        except InvalidScheduleError as error:
            raise SchedulesRefusedError(str(error)) from None
        except Exception as error:
            log.exception("schedule %s could not be prepared", schedule.name)
            raise SchedulesRefusedError(f"{schedule.name} could not be prepared: {error}") from error

    def _free(self) -> None:
        while self._retired:
            self._retired[0]()
            del self._retired[0]
        ready = list(self._ready.values())  # before the one that serves: use() puts it there, then takes it from here
        needed = frozenset[str]().union(self._serving.names, *(each.names for each in ready))
        for name in [name for name in self._held if name not in needed]:
            self._runner.release(name)
            del self._held[name]
