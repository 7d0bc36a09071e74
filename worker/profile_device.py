"""A loaded model as a thing that launches single operators at places: what devices under a profile have in common.

A launch is a schedule of which only one operator runs, so it takes the way that serving takes. Knows nothing of what
is worth measuring.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from autosearch.operators import Operator, layer_operators
from autosearch.pipeline import NanoOperation, PipelineSchedule
from worker.cuda_loading import LoadedModel
from worker.cuda_model import CudaModel, GraphKey
from worker.profile_points import Launch, Pair, sm_share
from worker.profiler import Reading
from worker.steady_batch import SteadyBatch, SteadyMix, fill_pages, pack_steady, steady_plan
from worker.streams import WHOLE

AROUND = ("embed", "lm_head")  # parts of an iteration that are no layer's


class Bench:
    """The model with steady batches of several sizes, one of them on it at a time."""

    def __init__(self, loaded: LoadedModel, mix: SteadyMix) -> None:
        """Raises SteadyBatchError where memory or limits do not hold the mix."""
        self.model: CudaModel = loaded.model
        self.operators = layer_operators(loaded.spec)
        self.num_layers = loaded.spec.num_layers
        self._loaded, self._mix = loaded, mix
        self._batches: dict[int, SteadyBatch] = {}
        self.rows = 0  # of the batch on the model
        fill_pages(loaded.cache)
        self.put_on(mix.rows)  # the largest: refused now or never

    def put_on(self, tokens: int) -> None:
        """Let the model hold the mix in this size, with every buffer as an iteration leaves it."""
        if tokens == self.rows:
            return
        if tokens not in self._batches:
            loaded = self._loaded
            mix, pages = self._mix.resized(tokens), loaded.capacity.num_pages
            plan = steady_plan(loaded.limits, mix, num_pages=pages, vocab_size=loaded.spec.vocab_size)
            self._batches[tokens] = pack_steady(self.model, plan)
        self._batches[tokens].put_on(self.model)
        with torch.inference_mode():
            self.model.run(GraphKey(tokens, True))
        self.rows = tokens

    def prepare(self, launches: Iterable[Launch]) -> None:
        """Make the parts of the SMs that these run on: before any is measured. Raises PartitionError."""
        schedules = {launch.place: lone(launch, self.operators, self.model.num_sms) for launch in launches}
        self.model.use_schedules(list(schedules.values()))

    def key(self, launch: Launch) -> GraphKey:
        """Of the iteration in which the launch's operator runs as it says; its rows are on the model."""
        self.put_on(launch.tokens)
        schedule = lone(launch, self.operators, self.model.num_sms)
        self.model.use_schedules([schedule])
        return GraphKey(launch.tokens, True, schedule.name)


def lone(launch: Launch, operators: tuple[Operator, ...], num_sms: int) -> PipelineSchedule:
    """A schedule with the operator at its place; the others, which are not to be run, have the rest of the SMs."""
    lane, share = launch.place.lane, sm_share(launch.place, num_sms)
    rest = (1 - lane, 1 - share) if launch.place != WHOLE else (0, 1.0)
    operations = tuple(
        NanoOperation(operator.name, 0, launch.tokens, lane, share, launch.kernel)
        if operator.name == launch.operator
        else NanoOperation(operator.name, 0, launch.tokens, *rest)
        for operator in operators
    )
    name = f"{launch.operator}-{launch.tokens}-{launch.kernel}-{lane}-{launch.place.sms}"
    return PipelineSchedule(name, launch.tokens, operations)


class HostDevice:
    """The reference kernels by the clock on the wall, for dry runs: nothing runs beside anything or is metered."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def burst(self, launch: Launch) -> float:
        """One layer, the faster of two."""
        return self._time(self._bench.key(launch), (launch.operator,), 1)

    def alone(self, launch: Launch) -> Reading:
        """All layers, the faster of two."""
        bench = self._bench
        return Reading(self._time(bench.key(launch), (launch.operator,), bench.num_layers))

    def together(self, pair: Pair) -> tuple[Reading, Reading]:
        """In turns: both take as long as both."""
        both = sum(self.alone(launch).time_us for launch in (pair.compute, pair.memory))
        return Reading(both), Reading(both)

    def layer(self, tokens: int) -> Reading:
        """All operators, the faster of two."""
        self._bench.put_on(tokens)
        names = tuple(operator.name for operator in self._bench.operators)
        return Reading(self._time(GraphKey(tokens, True), names, self._bench.num_layers))

    def around(self, tokens: int) -> Reading:
        """What is not of the layers, the faster of two."""
        self._bench.put_on(tokens)
        return Reading(self._time(GraphKey(tokens, True), AROUND, 1))

    def static_watts(self) -> None:
        return None

    def _time(self, key: GraphKey, parts: tuple[str, ...], num_layers: int) -> float:
        times = []
        with torch.inference_mode():
            for _ in range(2):
                began = time.perf_counter()
                self._bench.model.run_parts(key, parts, num_layers)
                times.append(time.perf_counter() - began)
        return min(times) / num_layers * 1e6
