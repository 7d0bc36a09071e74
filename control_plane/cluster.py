"""One engine instance on Ray: a placement group, a scheduler actor, one worker actor per tensor-parallel rank.

Starts it, watches over it, and takes it down as a whole: a lost rank invalidates the whole group, so nothing
is ever repaired in place. Knows nothing of requests' meaning, of gRPC, or of when to start another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autosearch.pipeline import PipelineSchedule
from control_plane.errors import StartError
from control_plane.instance import InstanceLost
from control_plane.pulse import first_done, until_silent
from scheduler.actor import SchedulerActor
from scheduler.plan import Cancel, EngineCapacity, OutputBatch
from scheduler.request import NewRequest
from scheduler.scheduler_config import SchedulerConfig
from worker.actor import WorkerActor
from worker.backend import open_prefix_store
from worker.config import WorkerConfig
from worker.schedule_sets import SchedulesRefusedError

logger = logging.getLogger(__name__)

POLL_S = 0.5  # the scheduler actor answers at least this often; workers are asked after each such pause
PATIENCE_S = 3600.0  # for calls that may take long: an actor that is gone or silent is noticed otherwise
SILENCE_S = 4.0  # an actor that does not answer for this long is taken for dead; busy ones answer


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """All that it takes to start an instance."""

    worker: WorkerConfig
    scheduler: SchedulerConfig
    step_timeout_s: float  # an iteration that takes longer counts as hung
    placement_timeout_s: float = 60.0  # how long to wait for CPUs to become free

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray resources: the scheduler's, then one bundle per rank."""
        rank = {"CPU": 1.0, "GPU": 1.0} if self.worker.device == "cuda" else {"CPU": 1.0}
        return [{"CPU": 1.0}, *[dict(rank) for _ in range(self.worker.tensor_parallel_size)]]


class RayInstance:
    """A running instance as the front end sees it. Made by `start_instance`."""

    def __init__(
        self, name: str, capacity: EngineCapacity, group: PlacementGroup, scheduler: Any, workers: Sequence[Any]
    ) -> None:
        self.name = name
        self.capacity = capacity
        self._group = group
        self._scheduler = scheduler
        self._workers = list(workers)
        # Calls that never return: they fail at once when their actor dies, even while nothing runs.
        self._lifelines = [asyncio.ensure_future(_wait(worker.lifeline.remote())) for worker in workers]
        # They end when a worker is alive and answers no more, for example because it was stopped.
        self._pulses = [
            asyncio.ensure_future(until_silent(worker.progress.remote, POLL_S, SILENCE_S)) for worker in workers
        ]

    async def submit(self, requests: Sequence[NewRequest]) -> None:
        """Queue requests for the next plan. Raises InstanceLost."""
        await self._call(self._scheduler.submit.remote(list(requests)))

    async def cancel(self, cancels: Sequence[Cancel]) -> None:
        """Ask for the end of requests. Raises InstanceLost."""
        await self._call(self._scheduler.cancel.remote(list(cancels)))

    async def flush_cache(self) -> int:
        """Drop the cached pages that no request uses; how many. Raises InstanceLost."""
        return int(await self._call(self._scheduler.flush_cache.remote()))

    async def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """Make a set ready on all ranks. Raises SchedulesRefusedError, in a rank's words, or InstanceLost."""
        calls = [worker.prepare_schedules.remote(number, tuple(schedules)) for worker in self._workers]
        results = await asyncio.gather(*(self._call(ref, PATIENCE_S) for ref in calls), return_exceptions=True)
        for failure in [result for result in results if isinstance(result, BaseException)]:
            raise failure  # only now, when no rank is still at it

    async def use_schedules(self, number: int) -> None:
        """Run later iterations by this set, on all ranks from the same one on. Raises InstanceLost."""
        await self._call(self._scheduler.use_schedules.remote(number), PATIENCE_S)

    async def drop_schedules(self, number: int) -> None:
        """Free a set that is not to be used. Raises InstanceLost."""
        await asyncio.gather(
            *(self._call(worker.drop_schedules.remote(number), PATIENCE_S) for worker in self._workers)
        )

    async def next_outputs(self) -> list[OutputBatch]:
        """Wait for the next outputs. Raises InstanceLost as soon as any of the actors is gone or silent."""
        while True:
            outputs: list[OutputBatch] = await self._call(self._scheduler.next_outputs.remote(POLL_S))
            if outputs:
                return outputs

    async def close(self) -> None:
        """End all actors and give their resources back. Idempotent."""
        for watch in (*self._lifelines, *self._pulses):
            watch.cancel()
        await asyncio.to_thread(_take_down, self._group, [self._scheduler, *self._workers])

    async def _call(self, ref: Any, patience_s: float | None = None) -> Any:
        """The answer. patience_s: for it, instead of SILENCE_S. Raises InstanceLost."""
        patience_s = SILENCE_S if patience_s is None else patience_s
        answer = asyncio.ensure_future(_wait(ref))
        done = await first_done([answer, *self._lifelines, *self._pulses], patience_s)
        try:
            if answer in done:
                return answer.result()
            if not done:
                raise InstanceLost(f"{self.name}: its scheduler has not answered for {patience_s:g} s")
            for watch in done:
                watch.result()  # raises when the worker has ended
            raise InstanceLost(f"{self.name}: a worker has not answered for {SILENCE_S:g} s")
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, SchedulesRefusedError):
                raise error.cause from None
            raise InstanceLost(f"{self.name}: {describe(error)}") from error
        finally:
            answer.cancel()


async def start_instance(
    name: str,
    config: InstanceConfig,
    progress: Callable[[str], None],
    prepare: Callable[[str], Awaitable[None]] | None = None,
) -> RayInstance:
    """Place, start and load one instance. Raises StartError.

    `progress` hears in one line each what is being done. `prepare` gets its node's id before anything runs there.
    """
    group = await _place(config, progress)
    actors: list[Any] = []
    try:
        if prepare is not None:
            progress("preparing its node")
            table = await asyncio.to_thread(placement_group_table, group)
            await prepare(table["bundles_to_node_id"][0])
        ranks = range(config.worker.tensor_parallel_size)
        workers = [
            WorkerActor.options(
                num_cpus=1,
                num_gpus=config.bundles[1 + rank].get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=_in(group, 1 + rank),
            ).remote(config.worker, rank)
            for rank in ranks
        ]
        actors += workers
        progress("starting worker processes")
        rendezvous = await _wait(workers[0].rendezvous.remote())
        capacity = await _load(workers, rendezvous, progress)
        scheduler = SchedulerActor.options(num_cpus=1, max_restarts=0, scheduling_strategy=_in(group, 0)).remote(
            config.scheduler,
            capacity,
            workers,
            config.step_timeout_s,
            partial(open_prefix_store, config.worker) if config.worker.kv_store else None,
        )
        actors.append(scheduler)
        await _wait(scheduler.start.remote())
        return RayInstance(name, capacity, group, scheduler, workers)
    except RayError as error:
        await asyncio.to_thread(_take_down, group, actors)
        raise StartError(describe(error)) from error
    except BaseException:
        await asyncio.to_thread(_take_down, group, actors)
        raise


def describe(error: BaseException) -> str:
    """One line for a user: a remote exception's own words, or which kind of process is gone."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    if isinstance(error, RayActorError):
        return "an engine process ended unexpectedly (out of memory? `nanoflow doctor` checks)"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


async def _place(config: InstanceConfig, progress: Callable[[str], None]) -> PlacementGroup:
    progress("waiting for free resources")
    group = placement_group(config.bundles, strategy="STRICT_PACK")
    try:
        await asyncio.wait_for(_wait(group.ready()), config.placement_timeout_s)
    except TimeoutError:
        remove_placement_group(group)
        free = ray.available_resources()
        raise StartError(
            f"no node has the resources for an instance: {config.bundles} are needed on one node, "
            f"CPU {free.get('CPU', 0):g} and GPU {free.get('GPU', 0):g} are free in the cluster. "
            "Add a node, lower --tensor-parallel-size, or choose another --device"
        ) from None
    return group


async def _load(workers: Sequence[Any], rendezvous: str, progress: Callable[[str], None]) -> EngineCapacity:
    """Load all ranks side by side; the capacity that they agreed on."""
    loads = asyncio.gather(*[_wait(worker.load.remote(rendezvous)) for worker in workers])
    try:
        while not loads.done():
            progress(await _wait(workers[0].progress.remote()))
            await asyncio.wait([loads], timeout=0.5)
        capacities: list[EngineCapacity] = await loads
    finally:
        loads.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await loads  # or asyncio complains that nobody asked how it ended
    if any(capacity != capacities[0] for capacity in capacities):
        raise StartError(f"the ranks disagree about what fits: {capacities}; give --num-gpu-blocks-override")
    return capacities[0]


def _in(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)


def _take_down(group: PlacementGroup, actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)


async def _wait(ref: Any) -> Any:
    return await ref
