"""What the ablation compares: loads, the batch that each keeps full, and the schedules of its modes and sweeps.

The modes are those of the paper's section 6.4: nothing overlapped; nano-batches, still one after the other; and
overlapped nano-batches. Knows nothing of how anything is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from autosearch.operators import Operator
from autosearch.pipeline import PipelineSchedule, sequential
from autosearch.precedence import NanoOperation
from autosearch.workload import BATCH_STEP, RequestLengths, fitted_batch_tokens
from control_plane.bench.workload import Workload
from control_plane.options import ConfigError
from worker.folded_norms import folded_too
from worker.steady_batch import SteadyMix

T = TypeVar("T")

_LOAD = re.compile(r"(\d+)/(\d+)(?:x(\d+))?")
_REQUESTS = 2048  # of a whole run, where a load does not say


class Mode(StrEnum):
    """How an iteration is run."""

    NON_OVERLAP = "non-overlap"
    NANO_BATCH = "nano-batch only"
    OVERLAP = "overlap"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind."""

    input_len: int  # prompt tokens of each
    output_len: int  # output tokens of each; 0: prefill is all there is, which brings one token
    num_requests: int = _REQUESTS  # of a whole run

    @classmethod
    def parse(cls, text: str) -> Load:
        """From `512/1024` or `512/1024x1024`. Raises ConfigError."""
        match = _LOAD.fullmatch(text.strip())
        found = cls(*(int(part) for part in match.groups() if part)) if match else None
        if found is None or found.input_len < 1 or found.num_requests < 1:
            raise ConfigError(f"loads={text}: a load is like 512/512 or 512/512x2048: tokens in, out, and requests")
        return found

    @property
    def name(self) -> str:
        """As in the paper's figures."""
        return f"{self.input_len}/{self.output_len}"

    @property
    def workload(self) -> Workload:
        """Of a whole run."""
        return Workload(self.num_requests, self.input_len, max(1, self.output_len))

    def steady_mix(self, most_rows: int, num_slots: int, num_pages: int, page_size: int) -> SteadyMix:
        """The full iteration of a steady state, no larger than memory and slots keep full. Raises ConfigError."""
        lengths = RequestLengths(self.input_len, self.output_len)
        context = max(1, round(lengths.mean_context))
        rows = fitted_batch_tokens(num_pages * page_size, self.input_len, self.output_len, most_rows)
        while rows > 0:
            mix = SteadyMix(rows, round(rows * lengths.decode_share), context, self.input_len)
            chunks = -(-(rows - mix.num_decodes) // self.input_len)
            pages = mix.num_decodes * (-(-context // page_size) + 1) + chunks * (self.input_len // page_size + 1)
            if pages <= num_pages and mix.num_decodes + chunks <= num_slots:
                return mix
            rows -= BATCH_STEP if rows > BATCH_STEP else max(1, rows // 8)
        raise ConfigError(f"load {self.name} does not fit {num_pages} KV pages of {page_size} and {num_slots} slots")


def at_share(schedule: PipelineSchedule, share: float) -> PipelineSchedule:
    """The same with that share of the SMs for its last lane and the rest for the others, wherever they are shared."""
    last = max(operation.lane for operation in schedule.operations)

    def changed(operation: NanoOperation) -> NanoOperation:
        if operation.sm_share >= 1:
            return operation
        return replace(operation, sm_share=share if operation.lane == last else 1 - share)

    operations = tuple(changed(operation) for operation in schedule.operations)
    return replace(schedule, name=f"{schedule.name}@{share:.3f}", operations=operations, measured=None)


def kernels_of(schedule: PipelineSchedule) -> dict[str, str]:
    """The kernels that it asks for, by operator."""
    return {operation.operator: operation.kernel for operation in schedule.operations if operation.kernel}


def with_kernels(schedule: PipelineSchedule, kernels: Mapping[str, str]) -> PipelineSchedule:
    """The same in these kernels; the default ones elsewhere."""
    if not kernels:
        return schedule
    operations = tuple(replace(op, kernel=kernels.get(op.operator, op.kernel)) for op in schedule.operations)
    used = "+".join(sorted(set(kernels.values())))
    return replace(schedule, name=f"{schedule.name}+{used}", operations=operations)


def sequential_candidates(
    operators: Sequence[Operator], rows: int, overlapping: Iterable[PipelineSchedule], can_fold: bool
) -> list[PipelineSchedule]:
    """The sequential schedule in its default kernels, in those of each overlapping one, and both with folded norms.

    The fastest of them is non-overlap: else a better kernel would count as a gain of overlap. can_fold: whether the
    model's norms can be folded.
    """
    plain = sequential(operators, rows)
    found = [plain, *(with_kernels(plain, kernels_of(schedule)) for schedule in overlapping)]
    if can_fold:
        found += folded_too(found)
    return list({schedule.operations: schedule for schedule in found}.values())


def is_overlapped(schedule: PipelineSchedule) -> bool:
    """Whether anything may run beside anything else."""
    return len({operation.lane for operation in schedule.operations}) > 1


def in_turns(items: Sequence[T], num_repeats: int) -> Iterator[T]:
    """There and back (A B C C B A A …), each num_repeats times: what drifts meanwhile harms all alike."""
    for turn in range(num_repeats):
        yield from items if turn % 2 == 0 else reversed(items)
