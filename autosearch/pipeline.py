"""A pipeline schedule: which operator runs on which token rows, in what order, on which share of the GPU.

Order and overlap are data: the sequential engine and the nano-batched one are two schedules, not two code
paths. Knows nothing of how a schedule was found or of how it is run.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autosearch.operators import Collectives, Operator, kernel_problem
from autosearch.plain_data import PlainDataError, build, parse_json, read_text
from autosearch.precedence import ChainedLayers, NanoOperation, covered
from autosearch.workload import Workload, WorkloadError

__all__ = ["Figures", "InvalidScheduleError", "NanoOperation", "PipelineSchedule", "nanobatch_only", "sequential"]


MAX_LANES = 4  # compute, memory, network and one more: what may run at once is found by trying all groups
_BATCH = ("decode_share", "mean_context", "prefill_pairs")  # fields that say what batch a schedule was planned for


class InvalidScheduleError(ValueError):
    """A schedule that cannot be run; the message says which rule it breaks and where."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How fast the schedule is: predicted by the search, or measured on the device."""

    layer_us: float  # from one layer to the next, in the steady middle of an iteration
    tokens_per_s_per_gpu: float
    sequential_tokens_per_s_per_gpu: float  # the sequential schedule, by the same means


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The schedule of one layer, chained to the next one's."""

    name: str
    batch_tokens: int  # B_dense: rows that the ranges cover
    operations: tuple[NanoOperation, ...]  # in issue order, a valid order for one lane alone
    collectives: str = Collectives.ALL_REDUCE.value  # which of the two graphs it orders, with tensor parallelism
    model: str = ""  # what it was planned for; empty: anything
    gpu: str = ""
    num_gpus: int = 1
    decode_share: float | None = None  # of the batch it was planned for
    mean_context: float | None = None  # KV tokens per decode it was planned for
    prefill_pairs: float | None = None  # query-key pairs of the prefill rows it was planned for
    decodes_first: bool = False  # rows list all decodes first; else each range gets its share of them
    fingerprint: str = ""  # of all that the search was given; another one makes the plan stale
    predicted: Figures | None = None
    measured: Figures | None = None

    @property
    def planned_for(self) -> Workload | None:
        """The batch that it was planned for; None where it is for any."""
        if self.decode_share is None or self.mean_context is None or self.prefill_pairs is None:
            return None
        decode_rows = self.decode_share * self.batch_tokens
        return Workload(self.batch_tokens, decode_rows, decode_rows * self.mean_context, self.prefill_pairs)

    @property
    def what_runs(self) -> Hashable:
        """Equal where two schedules differ in names and figures alone."""
        return self.batch_tokens, self.operations, self.decodes_first

    def ranges(self, operator: str) -> tuple[tuple[int, int], ...]:
        """Row ranges of an operator, ascending."""
        return tuple(sorted((op.start, op.end) for op in self.operations if op.operator == operator and not op.helps))

    def helped(self, index: int) -> int:
        """Which operation the one at `index` helps; itself where it helps none. The schedule must be valid."""
        helper = self.operations[index]
        if not helper.helps:
            return index
        same = (helper.operator, helper.start, helper.end)
        return next(i for i, op in enumerate(self.operations) if (op.operator, op.start, op.end) == same)

    def boundaries(self) -> tuple[int, ...]:
        """All range ends of all operators, ascending; the last one is batch_tokens."""
        return tuple(sorted({op.end for op in self.operations}))

    def validate(self, operators: Sequence[Operator]) -> None:
        """Raise InvalidScheduleError unless the schedule can be run on these operators.

        It runs every operator once on every row, in an order that keeps all inputs, and what may run at one
        moment, however long each takes, never asks for more than all SMs.
        """
        known = {operator.name: operator for operator in operators}
        self._check_numbers()
        for op in self.operations:
            if op.operator not in known:
                raise InvalidScheduleError(
                    f"{self.name}: operator {op.operator!r} is not run here; the schedule was planned for "
                    f"{self.model or 'any model'} on {self.num_gpus} GPU(s) with --collectives {self.collectives}"
                )
            if not 0 < op.sm_share <= 1:
                raise InvalidScheduleError(f"{self.name}: {op.label} has sm_share {op.sm_share}, not in (0, 1]")
        for name in known:
            self._check_cover(name)
        self._check_order(known)
        self._check_helpers(known)
        self._check_waits()
        self._check_shares(operators)

    def _check_numbers(self) -> None:
        """What no schedule of any operators can have."""
        if self.batch_tokens < 1:
            raise InvalidScheduleError(f"{self.name}: a batch of {self.batch_tokens} rows is none")
        num_lanes = len({op.lane for op in self.operations})
        if num_lanes > MAX_LANES:
            raise InvalidScheduleError(f"{self.name}: {num_lanes} lanes, and {MAX_LANES} at most are told apart")
        for figures in (self.predicted, self.measured):
            if figures and min(figures.tokens_per_s_per_gpu, figures.sequential_tokens_per_s_per_gpu) <= 0:
                raise InvalidScheduleError(f"{self.name}: its figures say that nothing runs: {figures}")
        for op in self.operations:
            problem = kernel_problem(op.operator, op.kernel)
            if problem:
                raise InvalidScheduleError(f"{self.name}: {op.label}: {problem}")
        absent = [name for name in _BATCH if getattr(self, name) is None]
        if 0 < len(absent) < len(_BATCH):
            raise InvalidScheduleError(
                f"{self.name}: it says only in part what batch it was planned for, without {' and '.join(absent)}: "
                f"give all of {', '.join(_BATCH)}, or none of them where it is for any batch"
            )
        try:
            _ = self.planned_for
        except WorkloadError as error:
            raise InvalidScheduleError(f"{self.name}: it was planned for no batch that can be: {error}") from None

    def _check_cover(self, operator: str) -> None:
        position = 0
        for start, end in self.ranges(operator):
            if start != position or end <= start:
                raise InvalidScheduleError(f"{self.name}: {operator} has [{start}, {end}) where row {position} is due")
            position = end
        if position != self.batch_tokens:
            raise InvalidScheduleError(f"{self.name}: {operator} covers {position} of {self.batch_tokens} rows")

    def _check_order(self, known: dict[str, Operator]) -> None:
        done: dict[str, list[NanoOperation]] = {name: [] for name in known}
        for op in self.operations:
            operator = known[op.operator]
            needs = [(name, op.start) for name in operator.inputs] + [(name, 0) for name in operator.earlier_rows]
            for name, first in needs:
                if not covered(done[name], first, op.end):
                    raise InvalidScheduleError(f"{self.name}: {op.label} runs before {name} of its rows")
            done[op.operator].append(op)

    def _check_helpers(self, known: dict[str, Operator]) -> None:
        begun: dict[tuple[str, int, int], int] = {}  # lane of each operation so far
        for index, op in enumerate(self.operations):
            same, before = (op.operator, op.start, op.end), self.operations[:index]
            if not op.helps:
                begun[same] = op.lane
            elif not known[op.operator].shared_work:
                raise InvalidScheduleError(f"{self.name}: {op.label} is helped, and cannot be shared")
            elif any(op.operator in known[other.operator].inputs and overlap(op, other) for other in before):
                raise InvalidScheduleError(f"{self.name}: {op.label} is helped after what reads its rows")
            elif begun.get(same, op.lane) == op.lane:
                raise InvalidScheduleError(f"{self.name}: {op.label} helps nothing that began on another lane")

    def _check_waits(self) -> None:
        for index, op in enumerate(self.operations):
            if any(not 0 <= other < index for other in op.after):
                raise InvalidScheduleError(f"{self.name}: {op.label} waits for {op.after}, not all earlier operations")
            if any(not 0 <= other < len(self.operations) for other in op.after_previous):
                raise InvalidScheduleError(f"{self.name}: {op.label} waits for {op.after_previous} of the layer before")

    def _check_shares(self, operators: Sequence[Operator]) -> None:
        if len({op.lane for op in self.operations}) < 2:
            return
        together = ChainedLayers(self.operations, tuple(operators)).overbooked()
        if together:
            names = ", ".join(f"{self.operations[i].label} {self.operations[i].sm_share:.2f}" for i in together)
            raise InvalidScheduleError(f"{self.name}: these may run at once on more than all SMs: {names}")

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> PipelineSchedule:
        """Raises InvalidScheduleError where fields are missing, unknown, of the wrong type or impossible."""
        try:
            schedule = build(cls, parse_json(text))
        except PlainDataError as error:
            raise InvalidScheduleError(f"not a pipeline schedule: {error}") from None
        if schedule.collectives not in tuple(Collectives):
            raise InvalidScheduleError(f"{schedule.name}: collectives {schedule.collectives!r} are none of ours")
        schedule._check_numbers()
        return schedule

    @classmethod
    def from_file(cls, path: str | Path) -> PipelineSchedule:
        """Read a schedule file. Raises OSError where it cannot be read, InvalidScheduleError as `from_json` does."""
        try:
            return cls.from_json(read_text(Path(path)))
        except PlainDataError as error:
            raise InvalidScheduleError(f"{path} is no pipeline schedule: {error}") from None


def named_by_file(path: Path) -> PipelineSchedule:
    """`PipelineSchedule.from_file`, with the file's name: of the schedules in one folder, no two have the same."""
    return replace(PipelineSchedule.from_file(path), name=path.stem)


def overlap(one: NanoOperation, other: NanoOperation) -> bool:
    """Whether they have rows in common."""
    return one.start < other.end and other.start < one.end


def sequential(operators: Sequence[Operator], batch_tokens: int) -> PipelineSchedule:
    """One operator after the other, each on the whole batch."""
    operations = tuple(NanoOperation(operator.name, 0, batch_tokens) for operator in operators)
    return PipelineSchedule(f"sequential-{batch_tokens}", batch_tokens, operations)


def nanobatch_only(operators: Sequence[Operator], batch_tokens: int, num_nano_batches: int) -> PipelineSchedule:
    """Equal nano-batches, operator by operator, nothing overlapped (the paper's ablation, section 6.4)."""
    cuts = [batch_tokens * i // num_nano_batches for i in range(num_nano_batches + 1)]
    operations = tuple(
        NanoOperation(operator.name, start, end)
        for operator in operators
        for start, end in zip(cuts, cuts[1:])
        if end > start
    )
    return PipelineSchedule(f"nanobatch{num_nano_batches}-{batch_tokens}", batch_tokens, operations)
