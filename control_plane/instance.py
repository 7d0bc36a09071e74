"""An engine instance as the front end sees it, and its in-process twin.

An instance takes requests and gives back one batch of outputs per iteration. It ends only by being closed or
lost; a lost one is never used again, whoever supervises it attaches a fresh one. Knows nothing of text,
transport, metrics or Ray (`control_plane.cluster` has the remote one).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from autosearch.pipeline import PipelineSchedule
from scheduler.plan import Cancel, EngineCapacity, OutputBatch
from scheduler.ports import ExecutorError
from scheduler.request import NewRequest
from worker.rank_executor import RankExecutor

log = logging.getLogger(__name__)


class InstanceLost(Exception):
    """The instance is gone for good: nothing that it was given and has not yet put out will ever come."""


class Instance(Protocol):
    """What the front end needs of an engine. All calls come from one asyncio loop."""

    @property
    def name(self) -> str:
        """The metrics label, so best the same as that of a lost one that it replaces; unique among attached ones."""

    @property
    def capacity(self) -> EngineCapacity:
        """The fitted limits; constant for the instance's life."""

    async def submit(self, requests: Sequence[NewRequest]) -> None:
        """Hand requests over, in order. Raises InstanceLost."""

    async def cancel(self, cancels: Sequence[Cancel]) -> None:
        """Ask for the end of requests that were submitted before. Raises InstanceLost."""

    async def next_outputs(self) -> list[OutputBatch]:
        """Wait until there are outputs, then return all of them, oldest first.

        One caller at a time. Raises InstanceLost, after the last outputs that arrived were returned.
        """

    async def flush_cache(self) -> int:
        """Drop all cached pages that no live request uses; returns how many. Raises InstanceLost."""

    async def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        """Make a set of schedules ready on all ranks, while requests go on. Numbers are used once.

        Raises worker.schedule_sets.SchedulesRefusedError where a rank cannot run them; InstanceLost.
        """

    async def use_schedules(self, number: int) -> None:
        """Run later iterations by a set that is ready. Raises InstanceLost."""

    async def drop_schedules(self, number: int) -> None:
        """Free a set that is not to be used, where a rank has it. Raises InstanceLost."""

    async def close(self) -> None:
        """Stop and free everything. Idempotent. Afterwards all other calls raise InstanceLost."""


class Engine(Protocol):
    """The one-ahead loop that a LocalInstance runs in a thread: `scheduler.loop.EngineLoop`.

    All methods but run() may be called from any thread.
    """

    def submit(self, requests: Sequence[NewRequest]) -> None: ...

    def cancel(self, cancels: Sequence[Cancel]) -> None: ...

    def flush_cache(self) -> int: ...

    def use_schedules(self, number: int) -> Future[None]: ...

    def run(self) -> None:
        """Iterate until stop(); raises what made it impossible to go on."""

    def stop(self) -> None: ...


class LocalInstance:
    """The in-process twin of a remote instance: an engine loop in a thread, outputs brought to the asyncio loop."""

    def __init__(
        self,
        name: str,
        capacity: EngineCapacity,
        make_engine: Callable[[Callable[[OutputBatch], None]], Engine],
        release: Callable[[], None] = lambda: None,
        executor: RankExecutor | None = None,
    ) -> None:
        """Start at once; must be called on the asyncio loop that will use the instance.

        make_engine gets the function to emit output batches with. release frees what the engine stood on (for
        example `executor.close`), once, after its thread has ended. executor: what the engine drives, where its
        schedules are to be exchanged.
        """
        self._name = name
        self._capacity = capacity
        self._release = release
        self._executor = executor
        self._asyncio_loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outputs: list[OutputBatch] = []
        self._outputs_lock = threading.Lock()
        self._lost: str | None = None
        self._engine = make_engine(self._emit)
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> EngineCapacity:
        return self._capacity

    async def submit(self, requests: Sequence[NewRequest]) -> None:
        self._check_alive()
        self._engine.submit(requests)

    async def cancel(self, cancels: Sequence[Cancel]) -> None:
        self._check_alive()
        self._engine.cancel(cancels)

    async def next_outputs(self) -> list[OutputBatch]:
        while True:
            lost = self._lost  # read first: outputs that came before the loss must still be returned
            with self._outputs_lock:
                outputs, self._outputs = self._outputs, []
            if outputs:
                return outputs
            if lost is not None:
                raise InstanceLost(lost)
            await self._wake.wait()
            self._wake.clear()

    async def flush_cache(self) -> int:
        self._check_alive()
        return await asyncio.to_thread(self._engine.flush_cache)

    async def prepare_schedules(self, number: int, schedules: Sequence[PipelineSchedule]) -> None:
        self._check_alive()
        await asyncio.to_thread(self._ranks.prepare_schedules, number, schedules)

    async def use_schedules(self, number: int) -> None:
        self._check_alive()
        try:
            await asyncio.wrap_future(self._engine.use_schedules(number))
        except ExecutorError as error:
            raise InstanceLost(f"instance {self._name}: {error}") from None

    async def drop_schedules(self, number: int) -> None:
        self._check_alive()
        await asyncio.to_thread(self._ranks.drop_schedules, number)

    async def close(self) -> None:
        self._engine.stop()
        await asyncio.to_thread(self._thread.join)

    @property
    def _ranks(self) -> RankExecutor:
        assert self._executor is not None, "an instance that was made without its executor"
        return self._executor

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise InstanceLost(self._lost)

    def _emit(self, batch: OutputBatch) -> None:
        """On the engine's thread. Wakes the asyncio loop only for the first batch that it has not seen."""
        with self._outputs_lock:
            self._outputs.append(batch)
            first = len(self._outputs) == 1
        if first:
            self._notify()

    def _run(self) -> None:
        reason = f"instance {self._name} was closed"
        try:
            self._engine.run()
        except Exception as error:
            log.exception("engine of instance %s ended", self._name)
            reason = f"instance {self._name} failed: {type(error).__name__}"
        finally:
            self._release()
            self._lost = reason
            self._notify()

    def _notify(self) -> None:
        try:
            self._asyncio_loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            log.debug("instance %s: the asyncio loop is closed already", self._name)
