"""A family of schedules for one GPU: decode attention beside other rows' GEMMs, and nothing else split.

A batch lists its decodes first. Cut between decodes and prefill rows, or within the decodes, it becomes two nano-
batches of which the first has most of the attention: while that runs on a part of the SMs, the other one's
projections (and prefill attention, and what comes before it) run on the rest; all else runs on whole batches and all
SMs. When the GEMMs have ended, their SMs help with the attention. So a layer has one phase in which two resources are
busy, two hand-overs and few waits. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autosearch.operators import ATTENTION, Operator
from autosearch.pipeline import NanoOperation, PipelineSchedule

GEMM_LANE, ATTENTION_LANE = 0, 1
ROW_STEP = 128  # rows of a GEMM tile
SM_STEP = 8  # the smallest partition on Hopper
KERNELS = ("cuda", "cuda-wide", "cuda-small")  # decode attention that keeps many bytes on their way per SM


def decode_beside(
    operators: Sequence[Operator],
    batch_tokens: int,
    split: int,
    attention_share: float,
    num_beside: int = 3,
    kernel: str = "",
    num_before: int = 0,
) -> PipelineSchedule:
    """The schedule that has decode attention of rows [0, split) beside other operators of the other rows.

    attention_share: of the SMs, for attention. num_beside: how many operators, from the one after attention, the
    other rows run beside it; what is left of them runs after it. num_before: how many of those before it too, the
    last first: prefill attention (of all rows), then what it waits for. kernel: variant of decode attention while SMs
    are shared.
    """
    names = [operator.name for operator in operators]
    decode, prefill = ATTENTION
    first = names.index(prefill) + 1
    before, beside, after = names[: first - 2], names[first : first + num_beside], names[first + num_beside :]
    num_whole = len(before) + 1 - max(1, num_before)
    early = before[num_whole:]  # of the other rows beside attention
    rest = 1 - attention_share

    def whole(name: str, start: int = 0, end: int = batch_tokens) -> NanoOperation:
        return NanoOperation(name, start, end)

    def shared(name: str, start: int = split) -> NanoOperation:
        return NanoOperation(name, start, batch_tokens, GEMM_LANE, rest)

    operations = [*map(whole, before[:num_whole]), *(whole(name, 0, split) for name in early)]
    operations += [] if num_before else [whole(prefill)]
    last = (len(operations) - 1,)
    operations += [
        NanoOperation(decode, 0, split, ATTENTION_LANE, attention_share, kernel, after=last),
        *map(shared, early),
        *([shared(prefill, 0)] if num_before else []),
        NanoOperation(decode, split, batch_tokens, GEMM_LANE, rest, kernel),
        *map(shared, beside),
        NanoOperation(decode, 0, split, GEMM_LANE, rest, kernel, helps=True),
        *(whole(name, 0, split) for name in beside),
        *(whole(name) for name in after),
    ]
    steps = f"{num_before}+{num_beside}" if num_before else f"{num_beside}"
    parts = ("decode-beside", f"{batch_tokens}-{split}-{attention_share:.3f}-{steps}", kernel)
    name = "-".join(part for part in parts if part)
    return PipelineSchedule(name, batch_tokens, tuple(operations), decodes_first=True)


@dataclass(frozen=True, slots=True)
class Point:
    """One schedule of the family."""

    cut: int  # rows before it have their decode attention on the attention lane
    sms: int  # of that lane
    num_beside: int
    kernel: str
    num_before: int = 0


class DecodeBeside:
    """The family for one batch, as a landscape to climb: where to start, and what lies near a schedule."""

    def __init__(
        self,
        operators: Sequence[Operator],
        batch_tokens: int,
        num_decodes: int,
        num_sms: int,
        kernels: Sequence[str] = KERNELS,
    ) -> None:
        """kernels: variants of decode attention to try, the first to start with."""
        self._operators, self._rows, self._num_sms = tuple(operators), batch_tokens, num_sms
        self._decodes, self._kernels = num_decodes, tuple(kernels)
        names = [operator.name for operator in operators]
        self._most_before = names.index(ATTENTION[-1])
        self._most_beside = len(names) - 1 - names.index(ATTENTION[-1])

    def start(self) -> list[PipelineSchedule]:
        """Cuts after the decodes and within them, at few shares. Empty where there is nothing to cut."""
        after = -(-self._decodes // ROW_STEP) * ROW_STEP
        within = [ROW_STEP * round(part * self._decodes / ROW_STEP) for part in (0.75, 0.5)]
        beside, kernel = self._most_beside - 1, self._kernels[0]
        points = [Point(cut, sms, beside, kernel) for cut in (after, *within) for sms in (48, 64, 80)]
        return self._schedules(points)

    def near(self, schedule: PipelineSchedule) -> list[PipelineSchedule]:
        """A step in each direction; empty for a schedule that is not of the family, whatever it is called."""
        point = self._point_of(schedule)
        if point is None:
            return []
        steps = [replace(point, sms=sms) for sms in self._sizes_near(point.sms)]
        steps += [replace(point, cut=point.cut + more) for more in (-ROW_STEP, ROW_STEP)]
        steps += [replace(point, num_beside=point.num_beside + more) for more in (-1, 1)]
        steps += [replace(point, num_before=point.num_before + more) for more in (-1, 1)]
        # More beside attention wants more SMs, and fewer for it.
        steps += [
            replace(point, sms=point.sms - more * SM_STEP, num_beside=point.num_beside + more) for more in (-1, 1)
        ]
        steps += [replace(point, kernel=kernel) for kernel in self._kernels if kernel != point.kernel]
        return self._schedules(steps)

    def _sizes_near(self, sms: int) -> list[int]:
        """One group of SMs fewer and more, and with what is left beside whole groups for this lane or the other."""
        left = self._num_sms % SM_STEP
        between = (left - sms) % SM_STEP if left else 0  # 0: has it already
        odd = [sms + between - SM_STEP, sms + between] if between else [sms - left, sms - left + SM_STEP]
        return [sms - SM_STEP, sms + SM_STEP, *(odd if left else [])]

    def _schedules(self, points: Iterable[Point]) -> list[PipelineSchedule]:
        """Of those points that there are."""
        return list({schedule.name: schedule for schedule in map(self._at, filter(self._is_there, points))}.values())

    def _is_there(self, point: Point) -> bool:
        return (
            self._decodes > 0
            and 0 < point.cut < self._rows
            and SM_STEP <= point.sms <= self._num_sms - 2 * SM_STEP
            and 1 <= point.num_beside <= self._most_beside
            and 0 <= point.num_before <= self._most_before
        )

    def _at(self, point: Point) -> PipelineSchedule:
        share = point.sms / self._num_sms
        return decode_beside(
            self._operators, self._rows, point.cut, share, point.num_beside, point.kernel, point.num_before
        )

    def _point_of(self, schedule: PipelineSchedule) -> Point | None:
        """Where the schedule stands, in other kernels of projections and norms too."""
        operations = schedule.operations
        decodes = [index for index, operation in enumerate(operations) if operation.operator == ATTENTION[0]]
        if len(decodes) != 3 or schedule.batch_tokens != self._rows or not schedule.decodes_first:
            return None
        first, others, helper = decodes  # the other operators between them are those beside attention
        attention = operations[first]
        sms = round(attention.sm_share * self._num_sms)
        point = Point(attention.end, sms, helper - others - 1, attention.kernel, others - first - 1)
        is_it = self._is_there(point) and self._at(point).operations == _in_default_kernels(schedule)
        return point if is_it else None


def _in_default_kernels(schedule: PipelineSchedule) -> tuple[NanoOperation, ...]:
    """Its operations, attention's as they are."""
    return tuple(
        operation if operation.operator in ATTENTION else replace(operation, kernel="")
        for operation in schedule.operations
    )
