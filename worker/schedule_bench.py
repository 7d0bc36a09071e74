"""Whole iterations of one steady batch by any schedule, sustained: what the tuner and the benchmarks time.

On a GPU each schedule is captured once, as serving captures it, and replayed; on a CPU, for tests, it runs step by
step. Knows nothing of candidates or of what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autosearch.operators import layer_operators
from autosearch.pipeline import PipelineSchedule, sequential
from scheduler.plan import IterationPlan
from worker.cuda_loading import graph_key
from worker.cuda_model import CudaModel, GraphKey
from worker.steady_batch import SteadyBatch, pack_steady
from worker.tuner import Reading

_PER_WAIT = 4  # iterations that are queued before the host waits for them


class ScheduleBench:
    """Runs schedules of plan's batch size on a loaded model. To be used from one thread."""

    def __init__(self, model: CudaModel, plan: IterationPlan, joules: Callable[[], float] = lambda: 0.0) -> None:
        """joules: the card's energy counter."""
        self._model, self._plan, self._joules = model, plan, joules
        self._cuda = model.view.block.is_cuda
        self._sequential = sequential(layer_operators(model.spec), plan.num_tokens)
        self._ready: dict[str, tuple[GraphKey, SteadyBatch]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None

    def run(self, schedule: PipelineSchedule, settle_s: float, seconds: float) -> Reading:
        """As tuner.Bench says. Raises InvalidScheduleError or PartitionError for what cannot run here."""
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
        if schedule.name in self._ready:
            return self._ready[schedule.name]
        model, rows = self._model, self._plan.num_tokens
        assert schedule.batch_tokens == rows, "a schedule of another batch size"
        if schedule.operations == self._sequential.operations:
            key = graph_key(rows, True)
        else:
            model.use_schedules([schedule])
            key = GraphKey(rows, True, schedule.name)
        batch = pack_steady(model, self._plan, model.cuts(key))
        with torch.inference_mode():
            batch.put_on(model)
            model.run(key)  # compiles what is not, before a capture
            if self._cuda:
                torch.cuda.synchronize()
                model.capture(key, self._pool)
        self._ready[schedule.name] = key, batch
        return key, batch

    def _repeat(self, key: GraphKey, seconds: float) -> Reading:
        count, joules, start = 0, self._joules(), time.perf_counter()
        if not self._cuda:
            while not count or time.perf_counter() - start < seconds:
                self._model.run(key)
                count += 1
            return Reading((time.perf_counter() - start) / count * 1e3, (self._joules() - joules) / count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        while not count or time.perf_counter() - start < seconds:
            for _ in range(_PER_WAIT):
                self._model.run(key)
            count += _PER_WAIT
            end.record()
            end.synchronize()
        return Reading(begin.elapsed_time(end) / count, (self._joules() - joules) / count)
