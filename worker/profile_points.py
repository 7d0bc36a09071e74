"""What a profile measures, and in which order: pure planning, a device is somebody else's.

Bursts of every operator × tokens × SM share × kernel rank the kernels. Sustained readings are dear (a second or two
each), so only the fastest kernels get them, the most needed ones first. A schedule has two lanes on one GPU
(worker.streams), so pairs are all that can meet; there are no triples. Knows nothing of times beyond comparing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autosearch.operators import Operator, Resource
from worker.kernels.decode_attention_cuda import VARIANTS as CUDA_VARIANTS
from worker.streams import GROUP_SMS, WHOLE, Place
from worker.triton_kernels import DECODE_VARIANTS, GEMM_VARIANTS

_LINEAR = ("", GEMM_VARIANTS[1])
# Variants by name as in worker.kernel_set; operators that are not listed have one.
KERNELS: dict[str, tuple[str, ...]] = {
    "qkv": _LINEAR,
    "o": _LINEAR,
    "down": _LINEAR,
    "decode_attention": (*DECODE_VARIANTS, *CUDA_VARIANTS),
}
MOST_SUSTAINED = 150
# Attention's part of the SMs in pairs; the middle one is the likeliest to pay and comes first.
_LEAST_PART, _LIKELY_PART, _LARGEST_PART = 0.12, 0.38, 0.56


@dataclass(frozen=True, slots=True)
class Launch:
    """One operator on all rows of a steady batch of so many tokens."""

    operator: str
    tokens: int
    kernel: str = ""
    place: Place = WHOLE


@dataclass(frozen=True, slots=True)
class Pair:
    """Two operators beside each other, each on its own part of the SMs."""

    compute: Launch
    memory: Launch


Point = Launch | Pair


@dataclass(frozen=True)
class Scope:
    """What is profiled."""

    operators: tuple[Operator, ...]  # of the model's layer
    num_sms: int
    batch_sizes: tuple[int, ...]  # ascending

    @property
    def largest(self) -> int:
        return self.batch_sizes[-1]

    @property
    def paired(self) -> int:
        """Tokens of a nano-batch that runs beside another: the profiled size that is nearest to half of the batch."""
        return min(self.batch_sizes, key=lambda tokens: abs(tokens - self.largest / 2))

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """SMs of the memory lane in the pairs, the likeliest first."""
        parts = range(GROUP_SMS, self.num_sms - GROUP_SMS, GROUP_SMS)
        wanted = [sms for sms in parts if _LEAST_PART <= sms / self.num_sms <= _LARGEST_PART]
        return tuple(sorted(wanted, key=lambda sms: abs(sms / self.num_sms - _LIKELY_PART)))

    @cached_property
    def compute_bound(self) -> tuple[str, ...]:
        """The GEMMs: what is compute-bound and runs alone on a lane beside attention."""
        return tuple(o.name for o in self.operators if o.resource is Resource.COMPUTE and not o.shared_work)

    @cached_property
    def memory_bound(self) -> str:
        """What runs beside the GEMMs."""
        return next(o.name for o in self.operators if o.resource is Resource.MEMORY and not o.joins)

    def compute_place(self, split: int) -> Place:
        """What the first lane has when the memory lane has `split` SMs."""
        return Place(0, self.num_sms - split)

    def places(self, operator: Operator) -> tuple[Place, ...]:
        """The whole GPU, then the parts that the operator's lane may have."""
        if operator.name == self.memory_bound:
            return (WHOLE, *(Place(1, split) for split in self.splits))
        return (WHOLE, *(self.compute_place(split) for split in self.splits))


def sm_share(place: Place, num_sms: int) -> float:
    """The place's part of the SMs."""
    return 1.0 if place.sms is None else place.sms / num_sms


def bursts(scope: Scope) -> Iterator[Launch]:
    """All that is timed for a moment: the sizes of the sustained readings first, one size at a time."""
    first = (scope.paired, scope.largest)
    for tokens in dict.fromkeys((*first, *reversed(scope.batch_sizes))):
        for operator in scope.operators:
            # Element-wise steps are never what decides a share.
            places = scope.places(operator) if tokens in first or not operator.joins else (WHOLE,)
            for place in places:
                for kernel in KERNELS.get(operator.name, ("",)):
                    yield Launch(operator.name, tokens, kernel, place)


def fastest(times: Mapping[Launch, float]) -> dict[tuple[str, int, Place], Launch]:
    """The kernel that was the fastest for each (operator, tokens, place); the first of equals."""
    best: dict[tuple[str, int, Place], Launch] = {}
    for launch, time in times.items():
        key = (launch.operator, launch.tokens, launch.place)
        if key not in best or time < times[best[key]]:
            best[key] = launch
    return best


def sustained_points(scope: Scope, times: Mapping[Launch, float]) -> list[Point]:
    """At most MOST_SUSTAINED points for the kernels that bursts found fastest, the most needed ones first.

    Whole operators of the batch and of the nano-batch; pairs, the longest GEMM first; the other sizes; at last the
    operators alone on their parts.
    """
    best = fastest(times)
    points: list[Point] = [*_alone(scope, best, dict.fromkeys((scope.largest, scope.paired)))]
    points += _pairs(scope, best, times)
    points += _alone(scope, best, reversed(scope.batch_sizes))
    points += (best[key] for key in best if key[1] == scope.paired and key[2] != WHOLE and _counts(scope, key[0]))
    return list(dict.fromkeys(points))[:MOST_SUSTAINED]


def _alone(
    scope: Scope, best: Mapping[tuple[str, int, Place], Launch], sizes: Iterator[int] | Mapping[int, None]
) -> Iterator[Launch]:
    for tokens in sizes:
        for operator in scope.operators:
            if (operator.name, tokens, WHOLE) in best:
                yield best[operator.name, tokens, WHOLE]


def _pairs(
    scope: Scope, best: Mapping[tuple[str, int, Place], Launch], times: Mapping[Launch, float]
) -> Iterator[Pair]:
    tokens = scope.paired
    whole = {name: best[name, tokens, WHOLE] for name in scope.compute_bound if (name, tokens, WHOLE) in best}
    for name in _longest_first(whole, times):
        for split in scope.splits:
            compute = best.get((name, tokens, scope.compute_place(split)))
            memory = best.get((scope.memory_bound, tokens, Place(1, split)))
            if compute and memory:
                yield Pair(compute, memory)


def _longest_first(launches: Mapping[str, Launch], times: Mapping[Launch, float]) -> Sequence[str]:
    return sorted(launches, key=lambda name: -times[launches[name]])


def _counts(scope: Scope, operator: str) -> bool:
    """Whether its time alone on a part is worth a sustained reading."""
    return operator in scope.compute_bound or operator == scope.memory_bound
