"""A profile: how long each operator takes alone, and how fast two of them run beside each other.

`worker` measures it, a file keeps it, the search reads it. It says what it was measured on: times of another GPU,
clock or kernel version are never mixed in. Knows nothing of how times are measured or used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from autosearch.errors import AutosearchError
from autosearch.operators import Resource, kernel_problem
from autosearch.plain_data import PlainDataError, build, parse_json, read_text
from autosearch.workload import Workload

SCHEMA_VERSION = 1
SHORTEST_US, LONGEST_US = 1e-3, 1e9  # what an operator may take where it takes time at all
SLOWEST_RATE = 1e-3  # beside others; slower is no running
PROFILE_FOLDER = Path(__file__).parent / "profiles"  # published measurements that come with the package


class ProfileError(AutosearchError):
    """A profile that cannot be used for this question; the message says why and how to mend it."""


class StaleProfileError(ProfileError):
    """The profile was measured with other versions than those that run now."""


@dataclass(frozen=True, slots=True)
class IsolatedTime:
    """One operator alone on a share of one GPU."""

    operator: str
    tokens: int  # rows of the nano-batch
    time_us: float  # of one layer on one rank
    sm_share: float = 1.0
    kernel: str = ""  # variant by name; empty: the worker's default
    joules: float | None = None  # dynamic energy on one GPU, without the static power
    derived: bool = False  # computed from other published numbers, not read off a clock

    @property
    def possible(self) -> bool:
        """Whether a clock could show this."""
        timed = self.time_us == 0 or SHORTEST_US <= self.time_us <= LONGEST_US
        return timed and self.tokens >= 1 and 0 < self.sm_share <= 1 and (self.joules is None or self.joules >= 0)


@dataclass(frozen=True, slots=True)
class ConcurrentRate:
    """Two operators beside each other, each one's rate over its rate alone on the whole GPU (paper, Table 3)."""

    resources: tuple[Resource, Resource]
    sm_shares: tuple[float, float]
    rates: tuple[float, float]
    spread: float = 0.0  # standard deviation of the rates over shapes, relative to the mean


@dataclass(frozen=True, slots=True)
class TripleRate:
    """Three operators at once; shares and rates are of compute, memory, network, in this order."""

    sm_shares: tuple[float, float, float]
    rates: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What the numbers were measured on; any difference makes another profile."""

    gpu: str  # a name of the catalog
    num_gpus: int  # tensor parallel ranks
    num_sms: int
    clock_mhz: float | None = None
    power_limit_w: float | None = None
    static_power_w: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # driver, libraries, kernels: name to version


@dataclass(frozen=True)
class ProfileTable:
    """All measurements of one model's layer on one kind of GPU."""

    name: str
    source: str  # where the numbers come from
    model: str  # a name of the catalog, or a model folder
    measured_on: MeasuredOn
    workload: Workload  # the batch that attention was measured with
    spread: float  # relative; a predicted gain below it is no gain
    isolated: tuple[IsolatedTime, ...]
    concurrent: tuple[ConcurrentRate, ...]
    triples: tuple[TripleRate, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def fingerprint(self) -> str:
        """Hash over all content; a change of GPU, clock or any version changes it."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def _num_rows(self) -> int:
        """A file says how many it has: one that lost some would still be a table."""
        return len(self.isolated) + len(self.concurrent) + len(self.triples)

    @cached_property
    def _by_operator(self) -> dict[str, tuple[IsolatedTime, ...]]:
        names = dict.fromkeys(entry.operator for entry in self.isolated)
        return {name: tuple(entry for entry in self.isolated if entry.operator == name) for name in names}

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators with isolated times."""
        return tuple(self._by_operator)

    def pareto(self, operator: str, tokens: int) -> tuple[IsolatedTime, ...]:
        """The entries that no other one beats in time, SM share and joules together, fastest first."""
        entries = [entry for entry in self._by_operator.get(operator, ()) if entry.tokens == tokens]
        # Unknown joules beat nobody's.
        keys = [(e.time_us, e.sm_share, math.inf if e.joules is None else e.joules) for e in entries]

        def beaten(key: tuple[float, float, float]) -> bool:
            return any(other != key and all(a <= b for a, b in zip(other, key)) for other in keys)

        return tuple(sorted((e for e, key in zip(entries, keys) if not beaten(key)), key=lambda e: e.time_us))

    def best(self, operator: str, tokens: float) -> IsolatedTime:
        """The fastest entry on the whole GPU, between profiled sizes by a straight line, past them by the last one.

        Raises ProfileError when the operator was not profiled.
        """
        fastest: dict[int, IsolatedTime] = {}
        for entry in self._by_operator.get(operator, ()):
            if entry.sm_share == 1.0:
                known = fastest.get(entry.tokens)
                fastest[entry.tokens] = entry if known is None or entry.time_us < known.time_us else known
        if not fastest:
            raise ProfileError(f"profile {self.name} has no time for {operator}: profile the model on this set-up")
        return _interpolate([fastest[size] for size in sorted(fastest)], tokens)

    def rates(self, resource: Resource) -> tuple[tuple[float, float], ...]:
        """(SM share, rate) of a resource class beside others, ascending; ends with (1, 1). Worst pair per share."""
        rates = {1.0: 1.0}
        for pair in self.concurrent:
            for kind, share, rate in zip(pair.resources, pair.sm_shares, pair.rates):
                if kind is resource and share < 1:
                    rates[share] = min(rate, rates.get(share, 1.0))
        return tuple(sorted(rates.items()))

    def check_current(self, gpu: str, versions: Mapping[str, str]) -> None:
        """Raise StaleProfileError where GPU or a version differs from what runs now."""
        if gpu != self.measured_on.gpu:
            raise StaleProfileError(f"profile {self.name} is of {self.measured_on.gpu}, not of {gpu}: profile again")
        for name, version in versions.items():
            measured = self.measured_on.versions.get(name)
            if measured != version:
                raise StaleProfileError(
                    f"profile {self.name} was measured with {name} {measured}, not {version}: profile again"
                )

    def to_json(self) -> str:
        """One JSON object, as `profiles/schema.json` describes it."""
        return json.dumps({"num_rows": self._num_rows, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ProfileTable:
        """Raises ProfileError where fields are missing, unknown or impossible."""
        try:
            data = parse_json(text)
            # Profiles that were written before the count came are taken as they are.
            num_rows = data.pop("num_rows", None) if isinstance(data, dict) else None
            table = build(cls, data)
        except (PlainDataError, AutosearchError) as error:
            raise ProfileError(f"not a profile table: {error}") from None
        table._check()
        if num_rows not in (None, table._num_rows):
            raise ProfileError(
                f"profile {table.name} was cut or changed: of {num_rows} rows in isolated, concurrent and triples, "
                f"{table._num_rows} are there: copy the file again, or measure it anew with `nanoflow profile`"
            )
        return table

    @classmethod
    def from_file(cls, path: str | Path) -> ProfileTable:
        """Read a file, or a profile of the package by its name. Raises ProfileError."""
        found = Path(path)
        if not found.is_file() and (PROFILE_FOLDER / f"{path}.json").is_file():
            found = PROFILE_FOLDER / f"{path}.json"
        try:
            return cls.from_json(read_text(found))
        except OSError as error:
            built_in = ", ".join(profile_names())
            raise ProfileError(f"profile {path} cannot be read: {error.strerror}; the package has {built_in}") from None
        except (PlainDataError, ProfileError) as error:
            raise ProfileError(f"profile {path} cannot be used: {error}") from None

    def _check(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ProfileError(f"profile {self.name} has schema {self.schema_version}, this is {SCHEMA_VERSION}")
        if self.measured_on.num_gpus < 1 or self.measured_on.num_sms < 1:
            raise ProfileError(f"profile {self.name}: it was measured on at least one GPU with at least one SM")
        if not 0 <= self.spread < 1:
            raise ProfileError(f"profile {self.name}: spread {self.spread} must lie in [0, 1)")
        for entry in self.isolated:
            if not entry.possible:
                raise ProfileError(
                    f"profile {self.name}: impossible isolated time {entry}; times are 0 or from {SHORTEST_US} to "
                    f"{LONGEST_US:.0e} µs, shares in (0, 1]"
                )
            problem = kernel_problem(entry.operator, entry.kernel)
            if problem:
                raise ProfileError(f"profile {self.name}: {entry.operator} of {entry.tokens} tokens: {problem}")
        if self.isolated and not any(entry.time_us for entry in self.isolated):
            raise ProfileError(f"profile {self.name}: no operator takes any time")
        together: tuple[ConcurrentRate | TripleRate, ...] = (*self.concurrent, *self.triples)
        for measured in together:
            if not all(0 < part <= 1 for part in measured.sm_shares):
                raise ProfileError(f"profile {self.name}: shares must lie in (0, 1]: {measured}")
            if not all(SLOWEST_RATE <= rate <= 1 for rate in measured.rates):
                raise ProfileError(f"profile {self.name}: rates must lie in [{SLOWEST_RATE}, 1]: {measured}")


def profile_names() -> tuple[str, ...]:
    """Profiles that come with the package."""
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.json") if path.stem != "schema"))


def _interpolate(points: list[IsolatedTime], tokens: float) -> IsolatedTime:
    if len(points) == 1 or tokens == points[0].tokens:
        only = points[0]
        factor = tokens / only.tokens
        return IsolatedTime(only.operator, only.tokens, only.time_us * factor, 1.0, only.kernel, _times(only, factor))
    high = next((i for i, point in enumerate(points) if point.tokens >= tokens), len(points) - 1)
    below, above = points[max(0, high - 1)], points[max(1, high)]
    along = (tokens - below.tokens) / (above.tokens - below.tokens)

    def between(first: float, second: float) -> float:
        return max(0.0, first + along * (second - first))

    joules = None
    if below.joules is not None and above.joules is not None:
        joules = between(below.joules, above.joules)
    nearest = below if along < 0.5 else above
    return IsolatedTime(
        nearest.operator, round(tokens), between(below.time_us, above.time_us), 1.0, nearest.kernel, joules
    )


def _times(entry: IsolatedTime, factor: float) -> float | None:
    return None if entry.joules is None else entry.joules * factor
