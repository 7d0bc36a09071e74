"""Exchanging the schedules of all instances while they serve: on all of them or on none.

First every rank of every instance makes the new set ready beside its iterations; only then all are told to use it. One
exchange at a time, others wait. Knows nothing of files, transport or what a schedule is good for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import TypeVar

from autosearch.pipeline import PipelineSchedule
from control_plane.errors import InvalidRequestError, UnavailableError
from control_plane.instance import Instance, InstanceLost
from control_plane.instance_pool import InstancePool
from control_plane.metrics import Metrics
from worker.schedule_sets import SchedulesRefusedError

log = logging.getLogger(__name__)

T = TypeVar("T")


class ScheduleSwap:
    """The schedules that the attached instances run by."""

    def __init__(self, pool: InstancePool[T], metrics: Metrics, retry_after_s: float) -> None:
        """retry_after_s: a hint for callers who come while there is no instance."""
        self.serving: tuple[PipelineSchedule, ...] | None = None  # since an exchange; None: as instances were started
        self._pool, self._metrics, self._retry_after_s = pool, metrics, retry_after_s
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    async def replace(self, schedules: Sequence[PipelineSchedule]) -> None:
        """Serve by these. Raises InvalidRequestError or UnavailableError, and then all is as it was.

        Goes on to its end when the caller is cancelled.
        """
        await asyncio.shield(asyncio.ensure_future(self._replace(tuple(schedules))))

    async def _replace(self, schedules: tuple[PipelineSchedule, ...]) -> None:
        async with self._lock:
            instances = [link.instance for link in self._pool]
            if not instances:
                raise UnavailableError("no engine is up", self._retry_after_s)
            number = next(self._numbers)
            try:
                await self._prepare(instances, number, schedules)
                await asyncio.gather(*(instance.use_schedules(number) for instance in instances))
            except SchedulesRefusedError as error:
                raise InvalidRequestError("schedules", str(error)) from None
            except InstanceLost:
                raise UnavailableError("an engine was lost meanwhile", self._retry_after_s) from None
            self.serving = schedules
            for instance in instances:
                self._metrics.schedules_swapped(instance.name)
            log.info("%d schedules serve now: %s", len(schedules), ", ".join(each.name for each in schedules))

    async def _prepare(
        self, instances: Sequence[Instance], number: int, schedules: tuple[PipelineSchedule, ...]
    ) -> None:
        """On all of them; where one refuses, none keeps anything of it."""
        preparing = (instance.prepare_schedules(number, schedules) for instance in instances)
        results = await asyncio.gather(*preparing, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            dropping = (instance.drop_schedules(number) for instance in instances)
            await asyncio.gather(*dropping, return_exceptions=True)  # a lost one has nothing to drop
            raise failures[0]
