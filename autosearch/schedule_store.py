"""A folder of found schedules: one file each, and an index by fingerprint so that nothing is searched twice.

Knows nothing of how schedules are found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autosearch.errors import AutosearchError
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule, named_by_file
from autosearch.plain_data import PlainDataError, build, parse_json, read_text

INDEX = "plans.json"


class StoreError(AutosearchError):
    """The folder cannot be used."""


def read_folder(folder: Path) -> tuple[PipelineSchedule, ...]:
    """All schedules of a folder, named by their files. Raises StoreError where there is none, or one is unreadable."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder; `nanoflow tune --out` makes one")
    files = [path for path in sorted(folder.glob("*.json")) if path.name != INDEX]
    if not files:
        raise StoreError(f"no schedule lies in {folder}; `nanoflow tune` makes them")
    return tuple(map(_read, files))


def _read(path: Path) -> PipelineSchedule:
    try:
        return named_by_file(path)
    except InvalidScheduleError as error:
        raise StoreError(f"{path}: {error}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class StoredPlan:
    """What one search found."""

    fingerprint: str  # of everything that the search was given
    files: tuple[str, ...]  # schedule files in the folder, the kept one first
    report: Mapping[str, Any]  # the search's JSON report
    block_shares: Mapping[str, float]  # each block's part of the sequential time: how alike two models are


@dataclass(frozen=True)
class ScheduleStore:
    """Schedules and their index in one folder."""

    folder: Path

    def prepare(self) -> None:
        """Make the folder, and find out before a search whether it can be used. Raises StoreError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(".writable", "")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise StoreError(f"schedules cannot be written to {self.folder}: {error.strerror}") from None
        self.plans()

    def plans(self) -> dict[str, StoredPlan]:
        """All entries whose files still exist, by fingerprint. Raises StoreError for a broken index."""
        try:
            entries = parse_json(read_text(self.folder / INDEX))
            if not isinstance(entries, dict):
                raise PlainDataError("it must be an object")
            found = {key: build(StoredPlan, entry, key) for key, entry in entries.items()}
        except FileNotFoundError:
            return {}
        except (OSError, PlainDataError) as error:
            raise StoreError(f"{self.folder / INDEX} cannot be read: {error}; remove it to search anew") from None
        return {key: plan for key, plan in found.items() if self._complete(plan)}

    def _complete(self, plan: StoredPlan) -> bool:
        """Whether all files exist, are schedules, and are of this very search."""
        try:
            return all(self.schedule(name).fingerprint == plan.fingerprint for name in plan.files)
        except (OSError, InvalidScheduleError):
            return False

    def schedule(self, name: str) -> PipelineSchedule:
        """Read one file of the folder."""
        return PipelineSchedule.from_file(self.folder / name)

    def save(self, plan: StoredPlan, schedules: Mapping[str, PipelineSchedule]) -> None:
        """Write the schedules, then the index that names them. Raises StoreError where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, schedule in schedules.items():
                self._write(name, schedule.to_json())
            entries = {key: asdict(known) for key, known in self.plans().items()} | {plan.fingerprint: asdict(plan)}
            self._write(INDEX, json.dumps(entries, indent=1))
        except OSError as error:
            raise StoreError(f"schedules cannot be written to {self.folder}: {error.strerror}") from None

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all."""
        part = self.folder / f".{name}.part"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.folder / name)

    def alike(self, block_shares: Mapping[str, float], batch_tokens: int, tolerance: float) -> Iterator[StoredPlan]:
        """Plans of the same batch size whose blocks take nearly the same parts of the time, the most alike first."""

        def distance(plan: StoredPlan) -> float:
            return max(abs(plan.block_shares[name] - share) for name, share in block_shares.items())

        same = [
            plan
            for plan in self.plans().values()
            if plan.block_shares.keys() == block_shares.keys() and plan.report.get("batch_tokens") == batch_tokens
        ]
        yield from sorted((plan for plan in same if distance(plan) <= tolerance), key=distance)
