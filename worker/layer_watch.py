"""When each operation of a few layers runs: stamps before and after it, on the stream that it runs on.

On a GPU the stamps are events that the captured iteration records as it is replayed, so lanes, edges and the
operations' order are those of serving. They cost a graph node each, and kernels that are chained elsewhere
(programmatic dependent launch) are not across a stamp: the iteration's time with them is told beside what was seen.
Knows nothing of what operations cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from worker.cuda_model import CudaModel, GraphKey, no_collection
from worker.streams import Place, Streams

_REPLAYS = 2  # before each look
Moments = dict[tuple[int, int], tuple[Any, Any]]  # (layer, operation) -> its two stamps
Times = dict[tuple[int, int], tuple[float, float]]  # the same in milliseconds
Sample = tuple[Times, float]  # and milliseconds of the iteration


@dataclass(frozen=True, slots=True)
class Seen:
    """An operation of a layer. Times are medians, from the first of all that were seen."""

    layer: int
    index: int  # of the operation in its schedule
    begin_us: float
    end_us: float


class WatchedStreams:
    """Streams that stamp what runs in some layers. Operations are told apart by the order of their launches."""

    def __init__(
        self, inner: Streams, num_operations: int, layers: Sequence[int], stamp: Callable[[], Any], moments: Moments
    ) -> None:
        """stamp() marks the current stream's present end; moments is filled."""
        self._inner, self._num_operations, self._layers = inner, num_operations, frozenset(layers)
        self._stamp, self._moments = stamp, moments
        self._launched = 0

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        layer, index = divmod(self._launched, self._num_operations)
        self._launched += 1
        with self._inner.at(place):
            if layer not in self._layers:
                yield
                return
            begin = self._stamp()
            yield
            self._moments[layer, index] = begin, self._stamp()

    def mark(self, place: Place) -> Any:
        return self._inner.mark(place)

    def wait(self, place: Place, event: Any) -> None:
        self._inner.wait(place, event)


def watched_layers(num_layers: int) -> tuple[int, ...]:
    """The middle one and its neighbours, whose operations may run beside it."""
    middle = num_layers // 2
    return tuple(layer for layer in (middle - 1, middle, middle + 1) if 0 <= layer < num_layers)


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen, and what looking cost."""

    seen: tuple[Seen, ...]  # in the order of layers and schedule
    middle: int  # the layer whose neighbours were watched as well
    iteration_ms: float  # with the stamps in it


def watch(model: CudaModel, key: GraphKey, settle_s: float, num_samples: int = 15) -> Watched:
    """Run the key's iteration over and over, and look at the middle of it num_samples times. All kernels have run."""
    num_layers, num_operations = model.spec.num_layers, len(model.schedule(key).operations)
    look = _look_on_gpu if model.view.block.is_cuda else _look_on_cpu
    samples = list(look(model, key, watched_layers(num_layers), num_operations, settle_s, num_samples))

    def median(at: tuple[int, int], side: int) -> float:
        return 1e3 * statistics.median(times[at][side] for times, _ in samples)

    seen = tuple(Seen(*at, median(at, 0), median(at, 1)) for at in samples[0][0])
    return Watched(seen, num_layers // 2, statistics.median(ms for _, ms in samples))


def _look_on_gpu(
    model: CudaModel, key: GraphKey, layers: Sequence[int], num_operations: int, settle_s: float, num_samples: int
) -> Iterator[Sample]:
    moments: Moments = {}
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        model.run_watched(key, lambda inner: WatchedStreams(inner, num_operations, layers, _recorded_event, moments))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    while num_samples:
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if time.perf_counter() - start >= settle_s:
            num_samples -= 1
            yield _since_first(moments, lambda a, b: a.elapsed_time(b)), begin.elapsed_time(end) / _REPLAYS


def _look_on_cpu(
    model: CudaModel, key: GraphKey, layers: Sequence[int], num_operations: int, settle_s: float, num_samples: int
) -> Iterator[Sample]:
    for _ in range(num_samples):
        moments: Moments = {}
        begin = time.perf_counter()
        model.run_watched(key, partial(_on_clock, num_operations=num_operations, layers=layers, moments=moments))
        yield _since_first(moments, lambda a, b: 1e3 * (b - a)), 1e3 * (time.perf_counter() - begin)


def _on_clock(inner: Streams, num_operations: int, layers: Sequence[int], moments: Moments) -> Streams:
    return WatchedStreams(inner, num_operations, layers, time.perf_counter, moments)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _since_first(moments: Moments, milliseconds: Callable[[Any, Any], float]) -> Times:
    """From the first stamp of all."""
    origin = next(iter(moments.values()))[0]
    since = {at: (milliseconds(origin, begin), milliseconds(origin, end)) for at, (begin, end) in moments.items()}
    first = min(begin for begin, _ in since.values())
    return {at: (begin - first, end - first) for at, (begin, end) in since.items()}
