"""When each operation of a few layers runs: stamps before and after it, on the stream that it runs on.

On a GPU the stamps are events that the captured iteration records as it is replayed, so lanes, edges and the
operations' order are those of serving. They cost a graph node each, and kernels that are chained elsewhere
(programmatic dependent launch) are not across a stamp: `LayerTrace` sets the layer's length beside the one without.
Knows nothing of what operations cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from worker.cuda_model import CudaModel, GraphKey
from worker.streams import Place, Streams

Moments = dict[tuple[int, int], tuple[Any, Any]]  # (layer, operation) -> its two stamps


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


def watch_layers(
    model: CudaModel, key: GraphKey, layers: Sequence[int], settle_s: float, num_samples: int = 15
) -> list[Seen]:
    """Run the key's iteration over and over, look at it num_samples times; in the order of layers and schedule."""
    num_operations = len(model.schedule(key).operations)
    moments: Moments = {}
    samples: list[dict[tuple[int, int], tuple[float, float]]] = []
    if model.view.block.is_cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.run_watched(
                key, lambda inner: WatchedStreams(inner, num_operations, layers, _recorded_event, moments)
            )
        start = time.perf_counter()
        while len(samples) < num_samples:
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            if time.perf_counter() - start >= settle_s:
                samples.append(_milliseconds(moments))
    else:
        for _ in range(num_samples):
            model.run_watched(
                key, lambda inner: WatchedStreams(inner, num_operations, layers, time.perf_counter, moments)
            )
            first = min(begin for begin, _ in moments.values())
            samples.append({at: (1e3 * (b - first), 1e3 * (e - first)) for at, (b, e) in moments.items()})
    return [Seen(*at, *(1e3 * statistics.median(s[at][side] for s in samples) for side in (0, 1))) for at in moments]


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _milliseconds(moments: Moments) -> dict[tuple[int, int], tuple[float, float]]:
    """From the first stamp of all."""
    origin = next(iter(moments.values()))[0]
    since = {at: tuple(origin.elapsed_time(event) for event in pair) for at, pair in moments.items()}
    first = min(begin for begin, _ in since.values())
    return {at: (begin - first, end - first) for at, (begin, end) in since.items()}
