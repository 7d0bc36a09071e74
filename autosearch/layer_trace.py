"""What a device did during one layer: when each operation ran, what it had to do, and how busy that kept the card.

Utilisation is an operation's known work over the time that it took, against the card's peaks: no profiler counters.
Within an operation the rate is taken to be even, from its begin to the end of all lanes that worked on it. Knows
nothing of how operations were timed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autosearch.errors import AutosearchError
from autosearch.operator_costs import Cost
from autosearch.operators import Resource
from autosearch.plain_data import PlainDataError, build, parse_json, read_text


class TraceError(AutosearchError):
    """A file that is no trace; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the card can do; 0 where that is not known or there is nothing of the kind."""

    flops_per_s: float  # GEMMs, sustained
    mem_bytes_per_s: float
    net_bytes_per_s: float = 0.0

    def of(self, resource: Resource) -> float:
        """The amount per second."""
        if resource is Resource.COMPUTE:
            return self.flops_per_s
        return self.mem_bytes_per_s if resource is Resource.MEMORY else self.net_bytes_per_s


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """A nano-operation as it ran."""

    operator: str
    start: int  # rows [start, end)
    end: int
    lane: int
    sm_share: float
    layer: int  # 0: the one that the trace is of; neighbours may run beside it
    begin_us: float
    end_us: float
    cost: Cost  # all of its work, also what others helped with
    helps: bool = False

    @property
    def length_us(self) -> float:
        """Its time; no less than a clock tells."""
        return max(self.end_us - self.begin_us, 1e-3)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One layer in the steady middle of an iteration."""

    name: str  # of the schedule
    model: str
    gpu: str
    batch_tokens: int
    begin_us: float  # the layer's first operation begins
    end_us: float  # the next layer's does
    iteration_ms: float  # the whole iteration, where nothing watches
    watched_iteration_ms: float  # the one that was watched
    peaks: Peaks
    operations: tuple[TracedOperation, ...]

    @property
    def length_us(self) -> float:
        """From one layer to the next."""
        return self.end_us - self.begin_us

    def to_json(self) -> str:
        """One JSON object; `from_file` reads it back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_file(cls, path: Path) -> LayerTrace:
        """Raises TraceError."""
        try:
            trace = build(cls, parse_json(read_text(path)))
        except OSError as error:
            raise TraceError(f"trace {path} cannot be read: {error.strerror}") from None
        except PlainDataError as error:
            raise TraceError(
                f"{path} is no trace of a layer: {error}; `nanoflow bench ablation --traces` writes them"
            ) from None
        if not trace.operations or trace.length_us <= 0:
            raise TraceError(f"{path}: the layer has no operations or takes no time")
        return trace


def work_spans(operations: Sequence[TracedOperation]) -> list[tuple[Cost, float, float]]:
    """Each operation's work with its begin and end in microseconds; helpers count with what they help."""

    def same(operation: TracedOperation) -> tuple[int, str, int, int]:
        return (operation.layer, operation.operator, operation.start, operation.end)

    ends: dict[tuple[int, str, int, int], float] = {}
    for each in operations:
        ends[same(each)] = max(ends.get(same(each), 0.0), each.begin_us + each.length_us)
    return [(each.cost, each.begin_us, ends[same(each)]) for each in operations if not each.helps]


def measured_utilisation(trace: LayerTrace, num_bins: int) -> dict[Resource, list[float]]:
    """Mean use of each resource in equal parts of the layer; 1 is the card's peak, which short work can exceed."""
    width = trace.length_us / num_bins
    bins = {resource: [0.0] * num_bins for resource in Resource}
    for cost, begin_us, end_us in work_spans(trace.operations):
        for resource, values in bins.items():
            peak = trace.peaks.of(resource)
            if peak <= 0:
                continue
            rate = cost.of(resource) / ((end_us - begin_us) * 1e-6) / peak
            for position in range(num_bins):
                low = trace.begin_us + position * width
                overlap = min(end_us, low + width) - max(begin_us, low)
                values[position] += rate * max(0.0, overlap) / width
    return bins
