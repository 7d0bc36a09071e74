"""The ablation on steady iterations: one batch of each load, run over and over by one schedule after the other.

Quick, since nothing fills or drains: what a mode gains while the engine is full. Turns go there and back (A B B A) in
one process, on one loaded model. Knows nothing of requests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autosearch.decode_beside import DecodeBeside
from autosearch.operators import Operator
from autosearch.pipeline import PipelineSchedule, nanobatch_only
from control_plane.bench.ablation_plan import (
    Mode,
    at_share,
    is_overlapped,
    kernels_of,
    sequential_candidates,
    with_kernels,
)
from control_plane.bench.ablation_table import LoadResult, Row
from control_plane.bench.gpu_meter import GpuMeter
from control_plane.options import ConfigError
from worker.device_batch import MAX_RANGES
from worker.folded_norms import fold_norms
from worker.schedule_choice import ScheduleChoice
from worker.steady_batch import SteadyMix
from worker.streams import GROUP_SMS
from worker.tuner import Bench, Effort, Measured, Reading, measure_in_turns

_EFFORT, _SWEEP_EFFORT = Effort(), Effort(settle_s=0.3, measure_s=0.7, num_repeats=2)
_LEFT_SMS = 40  # what is left to the other lane at least


@dataclass(frozen=True, slots=True)
class SteadyOptions:
    """What is measured, and for how long."""

    nano_batches: tuple[int, ...] = (2, 3, 4, 5, 6)  # the first is the mode's, all are swept
    attention_sms: tuple[int, ...] = ()  # SMs of the overlapping lane that are swept; empty: all that can be made
    effort: Effort = _EFFORT  # of the modes
    sweep_effort: Effort = _SWEEP_EFFORT

    def check(self, num_sms: int) -> None:
        """Raises ConfigError for what no device can do."""
        most = num_sms - 2 * GROUP_SMS
        if any(not _can_be_made(sms, num_sms) or not GROUP_SMS <= sms <= most for sms in self.attention_sms):
            raise ConfigError(
                f"attention-sms={self.attention_sms}: multiples of {GROUP_SMS} up to {most} can be made, for "
                f"attention or for the rest of {num_sms}"
            )
        if not self.nano_batches or any(not 2 <= count <= MAX_RANGES for count in self.nano_batches):
            raise ConfigError(f"nano-batch-counts={self.nano_batches}: a batch is cut into 2 to {MAX_RANGES}")


class MeteredBench:
    """A bench that also keeps the clocks of every run, by schedule."""

    def __init__(self, inner: Bench, meter: Callable[[], GpuMeter] | None) -> None:
        self._inner, self._meter = inner, meter
        self.sm_mhz: dict[str, list[float]] = {}

    def run(self, schedule: PipelineSchedule, settle_s: float, seconds: float) -> Reading:
        """As the inner one."""
        if self._meter is None:
            return self._inner.run(schedule, settle_s, seconds)
        meter = self._meter()
        meter.start()
        try:
            reading = self._inner.run(schedule, settle_s, seconds)
        finally:
            seen = meter.stop(1)
        self.sm_mhz.setdefault(schedule.name, []).append(float(seen["sm_mhz"]))
        return reading

    def in_turns(
        self, schedules: Sequence[PipelineSchedule], effort: Effort, say: Callable[[str], None]
    ) -> list[Measured]:
        """All of them there and back, on a warm card; in the order given."""
        for schedule in schedules:  # compiled, captured, and the card as warm for the first as for the last
            self.run(schedule, 0.0, effort.screen_settle_s)
        self.sm_mhz.clear()
        measured = measure_in_turns(self, schedules, effort)
        for each in measured:
            say(f"  {each.schedule.name}: {each.median_ms:.2f} ms")
        return measured

    def row(self, name: str, measured: Measured) -> Row:
        """Of a table, for one of what was measured last."""
        rows, clocks = measured.schedule.batch_tokens, self.sm_mhz.get(measured.schedule.name)
        has_energy = measured.joules > 0
        return Row(
            name,
            measured.schedule.name,
            tuple(rows / ms * 1e3 for ms in measured.ms),
            measured.joules / statistics.fmean(measured.ms) * 1e3 if has_energy else None,
            statistics.median(clocks) if clocks else None,
            measured.joules / rows if has_energy else None,
        )


@dataclass(frozen=True, slots=True)
class Ablation:
    """One load on one bench: what to run and what came of it."""

    bench: MeteredBench
    operators: Sequence[Operator]
    mix: SteadyMix
    num_sms: int
    can_fold: bool  # whether the model's norms can be folded
    options: SteadyOptions
    say: Callable[[str], None]

    def run(
        self, load: str, tuned: Sequence[PipelineSchedule] | None
    ) -> tuple[LoadResult, dict[Mode, PipelineSchedule]]:
        """The load's result, and the schedule of each mode.

        tuned: the schedules that `nanoflow tune` wrote; None: overlap is the fastest of the sweep of shares.
        """
        served, notes = self._served(tuned)
        base = served or self._family()
        sequentials = sequential_candidates(self.operators, self.mix.rows, [base] if base else [], self.can_fold)
        baseline = self._fastest(sequentials)
        self.say(f"  non-overlap is {baseline.name}")
        nano_batches = self._nano_batches(baseline)
        nano_rows = self._sweep(baseline, nano_batches, "1")
        shares = self._shares(base) if base else {}
        share_rows = self._sweep(baseline, shares, "0") if shares else ()
        if tuned is None and share_rows[1:]:
            fastest = max(share_rows[1:], key=lambda row: row.median)
            served = shares[fastest.name]
        modes = (
            (Mode.NON_OVERLAP, baseline),
            (Mode.NANO_BATCH, next(iter(nano_batches.values()))),
            (Mode.OVERLAP, served),
        )
        found = {mode: schedule for mode, schedule in modes if schedule is not None}
        measured = self._measure(list(found.values()), self.options.effort)
        rows = tuple(self.bench.row(mode, each) for mode, each in zip(found, measured))
        result = LoadResult(load, words(self.mix), rows, nano_rows, share_rows, tuple(notes))
        return result, found

    def _served(self, tuned: Sequence[PipelineSchedule] | None) -> tuple[PipelineSchedule | None, list[str]]:
        """What serving would run such a batch by, where that overlaps anything."""
        mix, by_name = self.mix, {schedule.name: schedule for schedule in tuned or ()}
        if tuned is None:
            return None, []
        choice = ScheduleChoice(tuned).choose(mix.rows, mix.num_decodes, mix.num_decodes * mix.mean_context)
        if choice.name and is_overlapped(by_name[choice.name]):
            return by_name[choice.name], []
        how = "the sequential schedule was the fastest for such batches"
        if not choice.is_known:
            share = mix.num_decodes / mix.rows
            how = (
                "none of the schedules is for such batches: nanoflow tune --batch-sizes "
                f"{mix.rows} --decode-shares {share:.3f} --mean-contexts {mix.mean_context}"
            )
        return None, [f"{Mode.OVERLAP}: {how}"]

    def _family(self) -> PipelineSchedule | None:
        """The fastest of where the tuner would start; None where nothing can be overlapped."""
        mix = self.mix
        start = DecodeBeside(self.operators, mix.rows, mix.num_decodes, self.num_sms).start()
        if not start:
            return None
        fastest = self._fastest(start)
        return self._fastest([fastest, fold_norms(fastest)]) if self.can_fold else fastest

    def _nano_batches(self, baseline: PipelineSchedule) -> dict[str, PipelineSchedule]:
        """By their number, in the sequential one's kernels."""
        kernels, rows = kernels_of(baseline), self.mix.rows
        return {
            str(count): with_kernels(nanobatch_only(self.operators, rows, count), kernels)
            for count in self.options.nano_batches
        }

    def _shares(self, base: PipelineSchedule) -> dict[str, PipelineSchedule]:
        """By the SMs of the overlapping lane."""
        possible = range(4 * GROUP_SMS, self.num_sms - _LEFT_SMS + 1, GROUP_SMS)
        sms = self.options.attention_sms or tuple(possible)
        return {str(each): at_share(base, each / self.num_sms) for each in sms}

    def _fastest(self, schedules: Sequence[PipelineSchedule]) -> PipelineSchedule:
        measured = self._measure(schedules, self.options.sweep_effort)
        return min(measured, key=lambda each: each.median_ms).schedule

    def _sweep(self, baseline: PipelineSchedule, points: Mapping[str, PipelineSchedule], none: str) -> tuple[Row, ...]:
        """The points and the sequential schedule, named `none`, in turns."""
        measured = self._measure([baseline, *points.values()], self.options.sweep_effort)
        return tuple(self.bench.row(name, each) for name, each in zip((none, *points), measured))

    def _measure(self, schedules: Sequence[PipelineSchedule], effort: Effort) -> list[Measured]:
        return self.bench.in_turns(schedules, effort, self.say)


def _can_be_made(sms: int, num_sms: int) -> bool:
    return sms % GROUP_SMS == 0 or (num_sms - sms) % GROUP_SMS == 0


def words(mix: SteadyMix) -> str:
    """For tables."""
    return f"{mix.rows} rows, {mix.num_decodes} of them decodes of {mix.mean_context} KV tokens"
