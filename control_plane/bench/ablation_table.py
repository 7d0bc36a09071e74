"""What the ablation measured, as tables for people and rows for JSON. Knows nothing of how it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.bench.ablation_plan import Mode


@dataclass(frozen=True, slots=True)
class Row:
    """One mode, or one point of a sweep, over all its repeats."""

    name: str
    schedule: str  # by name; what it ran
    tokens_per_s: tuple[float, ...]  # of each repeat, in order
    watts: float | None = None
    sm_mhz: float | None = None
    joules_per_token: float | None = None

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.tokens_per_s)

    @property
    def spread(self) -> float:
        """Between the slowest and the fastest repeat, over the median."""
        return (max(self.tokens_per_s) - min(self.tokens_per_s)) / self.median

    def to_json(self, baseline: Row) -> dict[str, Any]:
        """Plain data; the gain is over the baseline."""
        return {
            "name": self.name,
            "schedule": self.schedule,
            "tokens_per_s": [round(value, 1) for value in self.tokens_per_s],
            "median_tokens_per_s": round(self.median, 1),
            "gain": round(self.median / baseline.median, 4),
            "watts": _rounded(self.watts, 1),
            "sm_mhz": _rounded(self.sm_mhz, 0),
            "joules_per_token": _rounded(self.joules_per_token, 7),
        }


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load. The first of the modes is non-overlap."""

    load: str
    batch: str  # what an iteration consists of, in words
    modes: tuple[Row, ...]
    nano_batches: tuple[Row, ...] = ()  # sweep of their number; named by it, "1": sequential
    shares: tuple[Row, ...] = ()  # sweep of the SMs of the overlapping lane; named by them, "0": sequential
    notes: tuple[str, ...] = ()  # why something is missing

    def gain(self, row: Row) -> float:
        """Speed over non-overlap, by medians."""
        return row.median / self.modes[0].median

    def mode(self, mode: Mode) -> Row | None:
        """None where it was not measured."""
        return next((row for row in self.modes if row.name == mode), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "load": self.load,
            "batch": self.batch,
            "modes": [row.to_json(self.modes[0]) for row in self.modes],
            "nano_batches": [row.to_json(self.nano_batches[0]) for row in self.nano_batches],
            "shares": [row.to_json(self.shares[0]) for row in self.shares],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LoadResult:
        """What to_json() gave. Raises KeyError or TypeError for something else."""
        modes, counts, shares = (tuple(map(_read, fields[name])) for name in ("modes", "nano_batches", "shares"))
        return cls(fields["load"], fields["batch"], modes, counts, shares, tuple(fields["notes"]))


def _read(fields: dict[str, Any]) -> Row:
    power = (fields[name] for name in ("watts", "sm_mhz", "joules_per_token"))
    return Row(fields["name"], fields["schedule"], tuple(fields["tokens_per_s"]), *power)


def table(result: LoadResult) -> list[str]:
    """Lines for a terminal; gains of a sweep are over its own first row, which was measured in the same turns."""
    lines = [f"load {result.load}: {result.batch}", *row_lines("mode", result.modes)]
    for title, rows in (("nano-batches", result.nano_batches), ("SMs beside", result.shares)):
        if rows:
            lines += row_lines(title, rows)
    return [*lines, *(f"  {note}" for note in result.notes)]


def row_lines(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """A table; gains are over the first row."""
    header = f"  {title:<16}{'least':>10}{'median':>10}{'most':>10} tokens/s{'gain':>8}{'spread':>8}"
    yield header + f"{'W':>7}{'MHz':>7}{'mJ/token':>10}  schedule"
    for row in rows:
        times = f"{min(row.tokens_per_s):>10.0f}{row.median:>10.0f}{max(row.tokens_per_s):>10.0f}"
        gains = f"{row.median / rows[0].median:>8.3f}{row.spread:>8.1%}"
        millijoules = None if row.joules_per_token is None else 1e3 * row.joules_per_token
        power = f"{_shown(row.watts, 0):>7}{_shown(row.sm_mhz, 0):>7}{_shown(millijoules, 2):>10}"
        yield f"  {row.name:<16}{times}         {gains}{power}  {row.schedule}"


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
