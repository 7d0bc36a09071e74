"""A pipeline schedule: which operator runs on which token rows, in what order, on which share of the GPU.

Order and overlap are data: the sequential engine and the nano-batched one are two schedules, not two code
paths. Knows nothing of how a schedule was found or of how it is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autosearch.operators import Operator


class InvalidScheduleError(ValueError):
    """A schedule that cannot be run; the message says which rule it breaks and where."""


@dataclass(frozen=True, slots=True)
class NanoOperation:
    """One operator on one range of token rows."""

    operator: str
    start: int  # rows [start, end) of the dense batch
    end: int
    lane: int = 0  # nano-operations of one lane run in order; lanes run beside each other
    sm_share: float = 1.0  # share of the GPU's SMs while it runs, in (0, 1]
    kernel: str = ""  # a kernel variant by name; empty: the worker's default


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The schedule of one layer, chained to the next one's."""

    name: str
    batch_tokens: int  # B_dense: rows that the ranges cover
    operations: tuple[NanoOperation, ...]  # in issue order, a valid order for one lane alone

    def ranges(self, operator: str) -> tuple[tuple[int, int], ...]:
        """Row ranges of an operator, ascending."""
        return tuple(sorted((op.start, op.end) for op in self.operations if op.operator == operator))

    def boundaries(self) -> tuple[int, ...]:
        """All range ends of all operators, ascending; the last one is batch_tokens."""
        return tuple(sorted({op.end for op in self.operations}))

    def validate(self, operators: Sequence[Operator]) -> None:
        """Raise InvalidScheduleError unless the schedule runs every operator once on every row, in order."""
        known = {operator.name: operator for operator in operators}
        for op in self.operations:
            if op.operator not in known:
                raise InvalidScheduleError(f"{self.name}: unknown operator {op.operator!r}")
            if not 0 < op.sm_share <= 1:
                raise InvalidScheduleError(f"{self.name}: {_label(op)} has sm_share {op.sm_share}, not in (0, 1]")
        for name in known:
            self._check_cover(name)
        self._check_order(known)

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
                if not _covered(done[name], first, op.end):
                    raise InvalidScheduleError(f"{self.name}: {_label(op)} runs before {name} of its rows")
            done[op.operator].append(op)

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> PipelineSchedule:
        """Raises InvalidScheduleError where fields are missing, unknown or of the wrong type."""
        try:
            fields = json.loads(text)
            operations = tuple(NanoOperation(**op) for op in fields.pop("operations"))
            return cls(operations=operations, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidScheduleError(f"not a pipeline schedule: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> PipelineSchedule:
        """Read a schedule file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _label(op: NanoOperation) -> str:
    return f"{op.operator}[{op.start}, {op.end})"


def _covered(done: Iterable[NanoOperation], first: int, end: int) -> bool:
    position = first
    for op in sorted(done, key=lambda op: op.start):
        if op.start <= position < op.end:
            position = op.end
    return position >= end


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
