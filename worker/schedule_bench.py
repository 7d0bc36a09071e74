"""Whole iterations of one steady batch by any schedule, sustained: what the tuner and the benchmarks time.

On a GPU each schedule is captured once, as serving captures it, and replayed; on a CPU, for tests, it runs step by
step. Knows nothing of candidates or of what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule, sequential
from scheduler.plan import IterationPlan
from worker.cuda_model import CudaModel, GraphKey
from worker.device_batch import row_of_tokens
from worker.folded_norms import fold_norms
from worker.layer_watch import Watched, watch
from worker.power_meter import watts_between
from worker.steady_batch import SteadyBatch, pack_steady
from worker.streams import PartitionError
from worker.tuner import Reading

# Iterations that are queued at once, the next ones while they run: to start with, and where they are short.
_PER_ROUND, _MOST_PER_ROUND = 2, 64
_POLL_S = 0.002  # between two looks at the energy counter


def sequential_ways(model: CudaModel, rows: int) -> list[PipelineSchedule]:
    """The sequential schedules of a batch size: first the one that serves, then with folded norms, or without."""
    served, plain = model.schedule(model.sequential_key(rows, True)), sequential(layer_operators(model.spec), rows)
    ways = [served, plain, *([fold_norms(plain)] if model.can_fold else [])]
    return list({way.operations: way for way in ways}.values())


class ScheduleBench:
    """Runs schedules of plan's batch size on a loaded model. To be used from one thread."""

    def __init__(self, model: CudaModel, plan: IterationPlan, joules: Callable[[], float] = lambda: 0.0) -> None:
        """joules: the card's energy counter."""
        self._model, self.plan, self._joules = model, plan, joules
        self._cuda = model.view.block.is_cuda
        self._ready: dict[tuple[str, Hashable], tuple[GraphKey, SteadyBatch]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None

    def run(self, schedule: PipelineSchedule, settle_s: float, seconds: float) -> Reading:
        """As tuner.Bench says."""
        key, batch = self._prepare(schedule)
        with torch.inference_mode():
            batch.put_on(self._model)
            self._repeat(key, settle_s)
            return self._repeat(key, seconds)

    def tokens(self, schedule: PipelineSchedule) -> list[int]:
        """What the iteration samples."""
        key, batch = self._prepare(schedule)
        with torch.inference_mode():
            batch.put_on(self._model)
            self._model.run(key)
            return self._model.sampled[: batch.num_samples].tolist()

    def _prepare(self, schedule: PipelineSchedule) -> tuple[GraphKey, SteadyBatch]:
        same = schedule.name, schedule.what_runs
        if same in self._ready:
            return self._ready[same]
        model, rows = self._model, self.plan.num_tokens
        assert schedule.batch_tokens == rows, "a schedule of another batch size"
        key = model.sequential_key(rows, True)
        if schedule.operations != model.schedule(key).operations:
            self._use(schedule)
            key = GraphKey(rows, True, schedule.name)
        batch = pack_steady(model, self.plan, model.cuts(key))
        with torch.inference_mode():
            batch.put_on(model)
            model.run(key)  # compiles what is not, before a capture
            if self._cuda:
                torch.cuda.synchronize()
                model.capture(key, self._pool)
        self._ready[same] = key, batch
        return key, batch

    def _use(self, schedule: PipelineSchedule) -> None:
        try:
            self._model.use_schedules([schedule])
        except PartitionError as error:
            raise InvalidScheduleError(str(error)) from None

    def watch(self, schedule: PipelineSchedule, settle_s: float) -> Watched:
        """When the operations of a layer run."""
        key, batch = self._prepare(schedule)
        with torch.inference_mode():
            batch.put_on(self._model)
            return watch(self._model, key, settle_s)

    def row_of_tokens(self, schedule: PipelineSchedule) -> NDArray[np.int32]:
        """[tokens] the row of each of the plan's tokens in a batch for the schedule."""
        key, _ = self._prepare(schedule)
        return row_of_tokens(self.plan, self._model.cuts(key).dealt)

    def _repeat(self, key: GraphKey, seconds: float) -> Reading:
        if self._cuda:
            return self._repeat_queued(key, seconds)
        count, joules, start = 0, self._joules(), time.perf_counter()
        while not count or time.perf_counter() - start < seconds:
            self._model.run(key)
            count += 1
        return Reading((time.perf_counter() - start) / count * 1e3, (self._joules() - joules) / count)

    def _repeat_queued(self, key: GraphKey, seconds: float) -> Reading:
        """The device always has iterations to go on with: there is no gap while the host looks."""
        energy = _EnergySteps(self._joules)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        ends: list[torch.cuda.Event] = []
        count, round_size, start = 0, _PER_ROUND, time.perf_counter()
        while len(ends) < 2 or time.perf_counter() - start < seconds:
            for _ in range(round_size):
                self._model.run(key)
            count += round_size
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            ends.append(end)
            if len(ends) > 1 and ends[-2].query():  # type: ignore[no-untyped-call]
                round_size = min(2 * round_size, _MOST_PER_ROUND)  # the device may have waited for the host
            while len(ends) > 1 and not ends[-2].query():  # type: ignore[no-untyped-call]
                energy.look()
                time.sleep(_POLL_S)
        ends[-1].synchronize()
        ms = begin.elapsed_time(ends[-1]) / count
        return Reading(ms, energy.watts() * ms / 1e3)


class _EnergySteps:
    """Power from the counter's own steps, which are coarse: between two moments when it moved."""

    def __init__(self, joules: Callable[[], float]) -> None:
        self._joules, self._begun = joules, (time.perf_counter(), joules())
        self._last = self._begun[1]
        self._steps: list[tuple[float, float]] = []

    def look(self) -> None:
        """To be called often."""
        joules = self._joules()
        if joules != self._last:
            self._last = joules
            self._steps.append((time.perf_counter(), joules))

    def watts(self) -> float:
        """Between the first and the last step; over all of the time where there were fewer than two."""
        first, last = (self._steps[0], self._steps[-1]) if self._steps else (None, None)
        found = watts_between(first, last)
        if found is None:
            found = watts_between(self._begun, (time.perf_counter(), self._joules()))
        return found or 0.0
