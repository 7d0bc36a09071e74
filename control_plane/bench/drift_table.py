"""What the drift found, as tables for people and rows for JSON. Knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.bench.ablation_table import Row, row_lines

LIMIT = 0.02  # how far the choice may be behind the best fixed plan of a part


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part, served by the measured choice and by each fixed plan in turns."""

    part: str
    batch: str  # what an iteration consists of, in words
    decode_share: float  # mean over the measured iterations
    choice: Row
    fixed: tuple[Row, ...]  # the sequential schedule first
    overlapped: float  # share of the choice's iterations that ran by another schedule than the sequential one
    unmeasured: float  # share of the choice's iterations for which no schedule had been measured

    @property
    def best(self) -> Row:
        """The fastest fixed plan, by medians."""
        return max(self.fixed, key=lambda row: row.median)

    @property
    def behind(self) -> float:
        """How much slower the choice is than the best fixed plan; below 0 where it is faster."""
        return 1 - self.choice.median / self.best.median

    @property
    def is_within(self) -> bool:
        """Whether that is no more than LIMIT."""
        return self.choice.median >= (1 - LIMIT) * self.best.median

    def to_json(self) -> dict[str, Any]:
        """Plain data; gains are over the sequential schedule."""
        return {
            "part": self.part,
            "batch": self.batch,
            "decode_share": round(self.decode_share, 4),
            "choice": self.choice.to_json(self.fixed[0]),
            "fixed": [row.to_json(self.fixed[0]) for row in self.fixed],
            "best": self.best.schedule,
            "behind": round(self.behind, 4),
            "is_within": self.is_within,
            "overlapped": round(self.overlapped, 4),
            "unmeasured": round(self.unmeasured, 4),
        }


def table(result: PartResult) -> list[str]:
    """Lines for a terminal."""
    sides = f"overlapped in {result.overlapped:.0%} of its iterations, unmeasured in {result.unmeasured:.0%}"
    return [
        f"part {result.part}: {result.batch}; measured with {result.decode_share:.1%} decodes",
        *row_lines("plan", (*result.fixed, result.choice)),
        f"  {_verdict(result)} ({result.best.schedule}); {sides}",
    ]


def summary(results: Sequence[PartResult]) -> list[str]:
    """All parts in a line each, and the verdict."""
    missed = [result.part for result in results if not result.is_within]
    verdict = f"more than {LIMIT:.0%} behind in: {', '.join(missed)}" if missed else f"within {LIMIT:.0%} in every part"
    return [
        "the measured choice beside the best fixed plan of each part",
        *(f"  {result.part:>4} decodes: {_verdict(result)}" for result in results),
        verdict,
    ]


def _verdict(result: PartResult) -> str:
    speeds = f"{result.choice.median:.0f} tokens/s beside {result.best.median:.0f}"
    return f"{speeds}, {abs(result.behind):.2%} {'ahead' if result.behind < 0 else 'behind'}"
