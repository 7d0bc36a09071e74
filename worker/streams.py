"""Lanes of a schedule on a GPU: streams on disjoint sets of SMs, and the order between them.

A lane's share of the SMs is a green context (CUDA driver API, "Green Contexts"), made before any capture. Everything
that a lane must wait for on another stream becomes an event, as few as the schedule's order leaves; within a captured
graph these are its edges. Knows nothing of what the operations compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autosearch.operators import Operator
from autosearch.pipeline import PipelineSchedule
from autosearch.precedence import ChainedLayers, NanoOperation, Wait, comes_after, unrolled
from worker.folded_norms import NO_PASS

GROUP_SMS = 8  # the smallest partition that Hopper makes


class PartitionError(RuntimeError):
    """The device cannot be divided as a schedule asks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation runs: a lane's part of the SMs, or the whole device."""

    lane: int = 0
    sms: int | None = None  # None: the whole device, on the stream that is current


WHOLE = Place()


class Streams(Protocol):
    """What runs operations at places and keeps an order between places."""

    def at(self, place: Place) -> Any:
        """A context in which kernels are launched at the place."""

    def mark(self, place: Place) -> Any:
        """An event after all that the place has been given so far."""

    def wait(self, place: Place, event: Any) -> None:
        """What the place is given from now on comes after the event."""


class OneStream:
    """Everything on the current stream, in issue order: for devices without partitions."""

    def at(self, place: Place) -> Any:
        return nullcontext()

    def mark(self, place: Place) -> None:
        return None

    def wait(self, place: Place, event: None) -> None:
        return None


class LaneOrder:
    """Where each operation of a schedule runs and what it must wait for at other places."""

    def __init__(self, schedule: PipelineSchedule, operators: Sequence[Operator], num_sms: int) -> None:
        """Raises PartitionError where more than two lanes share the SMs."""
        self.operations = schedule.operations
        self.places = _places(schedule, num_sms)
        self._layers = ChainedLayers(schedule.operations, tuple(operators))
        self.waits = _events(self._layers.waits, self.places)
        self.marked = frozenset(wait[0] for waits in self.waits for wait in waits)

    @property
    def partitions(self) -> tuple[Place, ...]:
        """Places other than the whole device, each once."""
        return tuple(dict.fromkeys(place for place in self.places if place != WHOLE))

    @property
    def num_events(self) -> int:
        """Waits between places in one layer."""
        return sum(len(waits) for waits in self.waits)

    def may_overtake(self, index: int) -> bool:
        """Whether the operation may begin while its place is still busy with what it was given before.

        True of what helps, where all that it waits for had ended before that began.
        """
        if not self.operations[index].helps or self._is_behind_event(index):
            return False
        return all(self.places[other] != self.places[index] for other, _ in self._layers.own_waits(index))

    def _is_behind_event(self, index: int) -> bool:
        """Whether its place waits for an event between the launch before and its own: folded norms launch nothing."""
        while not self.waits[index]:
            index, _ = _previous(self.places, index)
            if self.operations[index].kernel != NO_PASS:
                return False
        return True

    def run(self, num_layers: int, streams: Streams, launch: Callable[[int, int], None]) -> None:
        """Launch all layers' operations, launch(layer, index), in issue order; ends with everything joined."""
        used = self.partitions
        begun = streams.mark(WHOLE) if used else None
        for place in used:
            streams.wait(place, begun)
        events: dict[Wait, Any] = {}  # (operation, layer)
        for layer in range(num_layers):
            for index, place in enumerate(self.places):
                for other, back in self.waits[index]:
                    if layer >= back:
                        streams.wait(place, events[other, layer - back])
                with streams.at(place):
                    launch(layer, index)
                if index in self.marked:
                    events[index, layer] = streams.mark(place)
        for place in used:
            streams.wait(WHOLE, streams.mark(place))


def _events(waits: Sequence[Sequence[Wait]], places: Sequence[Place]) -> tuple[tuple[Wait, ...], ...]:
    """For each operation the waits for other places that nothing else implies: not its place's order, no other wait."""
    orders = [(*waits[index], _previous(places, index)) for index in range(len(places))]
    before = unrolled(orders)
    return tuple(
        tuple(
            wait
            for wait in waits[index]
            if places[wait[0]] != places[index] and not any(comes_after(before, other, wait) for other in orders[index])
        )
        for index in range(len(places))
    )


def _previous(places: Sequence[Place], index: int) -> Wait:
    """What the operation's place was given before it."""
    mine = [i for i, place in enumerate(places) if place == places[index]]
    position = mine.index(index)
    return (mine[position - 1], 0) if position else (mine[-1], 1)


def _places(schedule: PipelineSchedule, num_sms: int) -> tuple[Place, ...]:
    """One lane gets whole groups of SMs, the other what these leave too: the first one, unless shares say else."""
    lanes = sorted({operation.lane for operation in schedule.operations if operation.sm_share < 1})
    if len(lanes) > 2:
        raise PartitionError(f"{schedule.name}: lanes {lanes} share the SMs; two can be told apart on one GPU")
    left = num_sms % GROUP_SMS
    wanting = [lane for lane in lanes if _wants(schedule, lane, num_sms, left)]
    with_left = (wanting or lanes or [0])[0]

    def place(operation: NanoOperation) -> Place:
        if operation.sm_share >= 1:
            return WHOLE
        spare = left if operation.lane == with_left else 0
        groups = math.floor((operation.sm_share * num_sms - spare) / GROUP_SMS + 1e-6)
        if groups < 1:
            raise PartitionError(
                f"{schedule.name}: {operation.label} has {operation.sm_share:.3f} of {num_sms} SMs; "
                f"at least {GROUP_SMS + spare} can be given"
            )
        return Place(lanes.index(operation.lane), groups * GROUP_SMS + spare)

    return tuple(place(operation) for operation in schedule.operations)


def _wants(schedule: PipelineSchedule, lane: int, num_sms: int, left: int) -> bool:
    """Whether all of the lane's shares are whole groups and what such groups leave."""
    shares = {op.sm_share for op in schedule.operations if op.lane == lane and op.sm_share < 1}
    return all(abs((share * num_sms - left) / GROUP_SMS % 1 - 0.5) > 0.5 - 1e-6 for share in shares)


class CudaStreams:
    """Streams of one GPU, made as they are asked for: ask for all before the first capture."""

    def __init__(self, device: torch.device) -> None:
        """Raises PartitionError where cuda-bindings are not installed."""
        try:
            from cuda.bindings import driver
        except ImportError:
            raise PartitionError(
                "schedules that share the SMs need cuda-bindings: pip install 'nanoflow-runtime[gpu]', "
                "or leave --schedules out"
            ) from None
        self._driver = driver
        self._device = device
        torch.cuda.current_stream(device).synchronize()  # the primary context is there
        self._handle = self._ok(driver.cuDeviceGet(device.index or 0))
        self._whole = self._ok(
            driver.cuDeviceGetDevResource(self._handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        )
        self._streams: dict[Place, torch.cuda.Stream] = {}
        self._contexts: list[Any] = []

    def prepare(self, places: Sequence[Place]) -> None:
        """Make the places' streams. Raises PartitionError."""
        for place in places:
            if place != WHOLE and place not in self._streams:
                self._streams[place] = self._make(place)

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        if place == WHOLE:
            yield
        else:
            with torch.cuda.stream(self._streams[place]):
                yield

    def mark(self, place: Place) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(place))
        return event

    def wait(self, place: Place, event: torch.cuda.Event) -> None:
        self._stream(place).wait_event(event)

    def _stream(self, place: Place) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if place == WHOLE else self._streams[place]

    def _make(self, place: Place) -> torch.cuda.Stream:
        driver, num_sms = self._driver, int(self._whole.sm.smCount)
        assert place.sms is not None
        # Whole groups lie at one end of the device, what has the SMs that such groups leave at the other.
        is_first = place.sms % GROUP_SMS == 0 if num_sms % GROUP_SMS else place.lane == 1
        taken = place.sms if is_first else num_sms - place.sms
        groups, _, rest = self._ok(driver.cuDevSmResourceSplitByCount(1, self._whole, 0, taken))
        part = groups[0] if is_first else rest
        if part.sm.smCount != place.sms:
            raise PartitionError(f"the driver gives {part.sm.smCount} of {num_sms} SMs where {place.sms} are asked for")
        description = self._ok(driver.cuDevResourceGenerateDesc([part], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._ok(driver.cuGreenCtxCreate(description, self._handle, flags))
        self._contexts.append(context)
        stream = self._ok(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        return torch.cuda.ExternalStream(int(stream), device=self._device)  # type: ignore[no-untyped-call]

    def _ok(self, result: tuple[Any, ...]) -> Any:
        """The values of a driver call. Raises PartitionError."""
        code, *values = result
        if int(code):
            raise PartitionError(f"SM partitions: the driver says {code!r}")
        return values[0] if len(values) == 1 else values
