"""Traces of one layer by each mode's schedule, as files for `nanoflow plot`. Knows nothing of how pictures look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autosearch.layer_trace import Peaks
from autosearch.pipeline import PipelineSchedule
from autosearch.specs import ModelSpec
from control_plane.bench.ablation_plan import Mode
from control_plane.bench.ablation_table import LoadResult
from scheduler.plan import IterationPlan
from worker.schedule_bench import ScheduleBench
from worker.traced_layer import Rows, Where, traced_layer

_SETTLE_S = 0.6  # before the first look


@dataclass(frozen=True, slots=True)
class Tracer:
    """Where traces go, and what is known of the device."""

    folder: Path
    spec: ModelSpec
    model: str
    device: str
    peaks: Peaks
    say: Callable[[str], None]

    def write(
        self,
        bench: ScheduleBench,
        plan: IterationPlan,
        result: LoadResult,
        schedules: Mapping[Mode, PipelineSchedule],
    ) -> None:
        """A file for each mode; one whose iteration cannot be watched is told of and left out."""
        for mode, schedule in schedules.items():
            row = result.mode(mode)
            assert row is not None, "each mode has a row"
            try:
                watched = bench.watch(schedule, _SETTLE_S)
            except RuntimeError as error:  # the figures are there already
                self.say(f"  no trace of {result.load} {mode}: {error}")
                continue
            where = Where(self.model, self.device, plan.num_tokens / row.median * 1e3, self.peaks)
            rows = Rows.of_plan(plan, bench.row_of_tokens(schedule))
            trace = traced_layer(self.spec, rows, schedule, watched, where)
            path = self.folder / f"{result.load.replace('/', '-')}-{mode.replace(' ', '-')}.json"
            path.write_text(trace.to_json() + "\n", encoding="utf-8")
            times = f"an iteration takes {watched.iteration_ms:.2f} ms watched, {where.iteration_ms:.2f} ms unwatched"
            self.say(f"  {path}: {trace.length_us:.0f} us a layer; {times}")
