"""Schedules on one GPU: each one a captured graph, held by the schedule's name.

While serving, a new one is first run on a twin of the model, with buffers and streams of its own, so that its kernels
are compiled and chosen; then the serving model's launches are captured, which runs nothing. Both happen on other
streams than the iterations, in another thread than the one that launches them. On a CPU, for tests, there is nothing to
capture. Knows nothing of which schedule an iteration runs by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autosearch.decode_beside import KERNELS, SM_STEP, decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule
from worker.cuda_model import CudaModel, GraphKey
from worker.folded_norms import fold_norms
from worker.streams import PartitionError

log = logging.getLogger(__name__)


class CudaSchedules:
    """The worker.schedule_sets.Runner of a rank on a GPU."""

    def __init__(self, model: CudaModel, twin: CudaModel | None, pool: Any) -> None:
        """twin: to try schedules on; None on a CPU, or where no new ones come. pool: of the model's graphs."""
        self._model, self._twin, self._pool = model, twin, pool
        self._device = model.view.block.device
        self._is_cuda = self._device.type == "cuda"
        self._stream = None if twin is None else torch.cuda.Stream(self._device)

    def prepare(self, schedule: PipelineSchedule) -> None:
        assert not self._is_cuda or self._twin is not None, "there is no room for new ones"
        key = GraphKey(schedule.batch_tokens, True, schedule.name)
        try:
            with torch.inference_mode():
                self._model.use_schedules([schedule])
                if self._twin is not None:
                    self._try(self._twin, schedule, key)
                    self._model.capture(key, self._pool)
        except PartitionError as error:
            raise InvalidScheduleError(str(error)) from None

    def rehearse(self) -> None:
        """Prepare typical schedules, run them and forget them: before serving, in the thread that will prepare others.

        What is compiled, loaded and reserved at the first time would stop iterations if it came beside them.
        """
        rows = self._model.limits.rows
        if rows < 2:
            return
        share = round(self._model.num_sms / 2 / SM_STEP) * SM_STEP / self._model.num_sms
        beside = decode_beside(layer_operators(self._model.spec), rows, rows // 2, share, kernel=KERNELS[0])
        beside = replace(beside, name="a rehearsal")  # no name that a user's has
        for schedule in (beside, fold_norms(beside)) if self._model.can_fold else (beside,):
            try:
                self.prepare(schedule)
                with torch.inference_mode():
                    self._model.run(GraphKey(rows, True, schedule.name))
                self.mark()()
            except InvalidScheduleError as error:
                log.warning("no schedule that shares the SMs can be exchanged here: %s", error)
            except Exception:  # to serve without exchanges is better than not to serve
                log.exception("an exchange of schedules could not be rehearsed: those to come may fail, or take long")
            finally:
                self.release(schedule.name)

    def release(self, name: str) -> None:
        self._model.forget(name)

    def mark(self) -> Callable[[], None]:
        """In the thread that launches iterations."""
        if not self._is_cuda:
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize

    def _try(self, twin: CudaModel, schedule: PipelineSchedule, key: GraphKey) -> None:
        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                twin.use_schedules([schedule])
                twin.warm_up(key)
                self._stream.synchronize()
            finally:
                twin.forget(schedule.name)
