"""A GPU under a profile: bursts from idle, and loops that run until power has settled.

A burst is a graph of a few layers' launches, replayed twice; what an empty graph of its kind takes is taken off. A
sustained reading replays a graph of all layers without a pause; two operators beside each other are two such graphs
on two streams, whose kernels were captured on their parts of the SMs. Knows nothing of what is worth measuring.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from worker.cuda_model import GraphKey
from worker.power_meter import Card, next_step, watts_between
from worker.profile_device import AROUND, Bench
from worker.profile_points import Launch, Pair
from worker.profiler import Reading
from worker.streams import WHOLE

_BURST_LAYERS, _BURST_REPLAYS = 8, 2
# Power counts as settled once two windows in a row agree, not before the least time; the longest ends it anyway.
_WINDOW_S, _AGREE = 0.2, 0.007
_LEAST_SETTLE_S, _LONGEST_SETTLE_S = 0.6, 2.0
_PAIR_SETTLE_S = 1.0  # two kernels' common clock takes longer to find its level
_MEASURE_S = 0.6  # and on to the energy counter's next step
_TURN_MS, _AHEAD, _MOST_REPLAYS = 4.0, 3, 64  # replays are queued by turns of so long, so many turns ahead
_POLL_S = 5e-4
_LONGEST_TURN_S = 10.0

Clock = Callable[[], float]


class ProfilingError(RuntimeError):
    """The device does not do what is measured."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a loop had come on the device."""

    num_turns: int
    event: torch.cuda.Event


class Loop:
    """A graph replayed on a stream of its own, always some milliseconds ahead of the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph, self._stream = graph, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._replays = min(_MOST_REPLAYS, max(1, math.ceil(_TURN_MS / max(1e-3, self._one_ms()))))
        self._queued: deque[torch.cuda.Event] = deque()
        self._num_ended = 0
        self._last = self._turn()

    def feed(self) -> None:
        """Queue as many turns as have ended. To be called every few milliseconds."""
        while self._queued and self._queued[0].query():  # type: ignore[no-untyped-call]
            self._last = self._queued.popleft()
            self._num_ended += 1
        while len(self._queued) < _AHEAD:
            self._queued.append(self._turn())

    def mark(self) -> Mark:
        """The last turn that feed() saw the end of."""
        return Mark(self._num_ended, self._last)

    def ms_between(self, begin: Mark, end: Mark) -> float:
        """Milliseconds of one replay; infinite where no turn has ended between the two."""
        turns = end.num_turns - begin.num_turns
        if turns == 0:
            return math.inf
        begin.event.synchronize()
        return float(begin.event.elapsed_time(end.event)) / (turns * self._replays)

    def _turn(self, replays: int | None = None) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            for _ in range(self._replays if replays is None else replays):
                self._graph.replay()
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
        return end

    def _one_ms(self) -> float:
        begin = self._turn(1)
        end = self._turn(1)
        end.synchronize()
        return float(begin.elapsed_time(end))


class _Run:
    """Loops that keep the device busy while time passes."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], clock: Clock, sleep: Callable[[float], None]) -> None:
        torch.cuda.synchronize()
        self.loops = [Loop(graph) for graph in graphs]
        self._clock, self._sleep = clock, sleep

    def keep_busy(self) -> None:
        """One look at every loop."""
        for loop in self.loops:
            loop.feed()
        self._sleep(_POLL_S)

    def marks(self) -> list[Mark]:
        return [loop.mark() for loop in self.loops]

    def times_ms(self, since: Sequence[Mark]) -> list[float]:
        """Of one replay of each loop."""
        return [loop.ms_between(mark, loop.mark()) for loop, mark in zip(self.loops, since)]

    def pass_time(self, seconds: float) -> None:
        """And let every loop come on a turn at least. Raises ProfilingError."""
        marks, until = self.marks(), self._clock() + seconds
        while self._clock() < until or any(a.num_turns == b.num_turns for a, b in zip(self.marks(), marks)):
            self.keep_busy()
            if self._clock() > until + _LONGEST_TURN_S:
                raise ProfilingError(f"the GPU did not end a few replays within {_LONGEST_TURN_S} s")

    def settle(self, least_s: float) -> None:
        """Run until the times of one window and the next agree."""
        start, before = self._clock(), [math.inf] * len(self.loops)
        while self._clock() - start < _LONGEST_SETTLE_S:
            marks = self.marks()
            self.pass_time(_WINDOW_S)
            times = self.times_ms(marks)
            agree = all(abs(now / then - 1) < _AGREE for now, then in zip(times, before))
            if agree and self._clock() - start >= least_s:
                return
            before = times


class CudaDevice:
    """One GPU with its instruments."""

    def __init__(
        self, bench: Bench, card: Card, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bench, self._card, self._clock, self._sleep = bench, card, clock, sleep
        self._burst_layers = min(_BURST_LAYERS, bench.num_layers)
        self._empty_ms: dict[tuple[int, bool], float] = {}  # by tokens, and whether all SMs are there
        gc.freeze()  # captures may collect garbage first: let them look at what is new

    def burst(self, launch: Launch) -> float:
        """Microseconds of one layer, a few launches from idle."""
        key = self._bench.key(launch)
        kind = (launch.tokens, launch.place == WHOLE)
        if kind not in self._empty_ms:
            self._empty_ms[kind] = self._burst_ms(key, ())
        return max(0.0, self._burst_ms(key, (launch.operator,)) - self._empty_ms[kind]) / self._burst_layers * 1e3

    def alone(self, launch: Launch) -> Reading:
        """The launch over and over, once power has settled."""
        (reading,) = self._sustained([self._graph(self._bench.key(launch), (launch.operator,))], _LEAST_SETTLE_S)
        return reading

    def together(self, pair: Pair) -> tuple[Reading, Reading]:
        """Both over and over. Only attention draws tickets, so that the GEMM's graph leaves those alone."""
        graphs = [self._graph(self._bench.key(launch), (launch.operator,)) for launch in (pair.compute, pair.memory)]
        compute, memory = self._sustained(graphs, _PAIR_SETTLE_S)
        return compute, memory

    def layer(self, tokens: int) -> Reading:
        """All operators, sequentially."""
        self._bench.put_on(tokens)
        names = tuple(operator.name for operator in self._bench.operators)
        (reading,) = self._sustained([self._graph(GraphKey(tokens, True), names)], _LEAST_SETTLE_S)
        return reading

    def around(self, tokens: int) -> Reading:
        """An iteration of no layer's operators."""
        self._bench.put_on(tokens)
        (reading,) = self._sustained([self._graph(GraphKey(tokens, True), AROUND)], _LEAST_SETTLE_S)
        return replace(reading, time_us=reading.time_us * self._bench.num_layers)

    def static_watts(self) -> float | None:
        """By an iteration without operators: a few tiny kernels, so that the clocks stay up."""
        (reading,) = self._sustained([self._graph(GraphKey(self._bench.rows, True), ())], _LEAST_SETTLE_S)
        return reading.watts

    def _graph(self, key: GraphKey, parts: Collection[str], num_layers: int | None = None) -> torch.cuda.CUDAGraph:
        """All kernels run once before they are captured."""
        with torch.inference_mode():
            return self._bench.model.capture_parts(key, parts, num_layers)

    def _burst_ms(self, key: GraphKey, parts: Collection[str]) -> float:
        """Of one replay. The first one runs while the others are queued, so that no launch is waited for."""
        graph = self._graph(key, parts, self._burst_layers)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record()
        for _ in range(_BURST_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _BURST_REPLAYS

    def _sustained(self, graphs: Sequence[torch.cuda.CUDAGraph], settle_s: float) -> tuple[Reading, ...]:
        run = _Run(graphs, self._clock, self._sleep)
        run.settle(settle_s)
        begin, marks = next_step(self._card, run.keep_busy, self._clock), run.marks()
        run.pass_time(_MEASURE_S)
        end = next_step(self._card, run.keep_busy, self._clock)
        times, mhz = run.times_ms(marks), self._card.sm_mhz()
        torch.cuda.synchronize()  # what is still queued
        watts = watts_between(begin, end)
        return tuple(Reading(ms / self._bench.num_layers * 1e3, watts, mhz) for ms in times)
