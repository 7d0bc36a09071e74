"""Times of a model's operators, from a profile that may be of another model, workload or number of GPUs.

A time is scaled by the amount of what bounds the operator: flops, bytes, or network bytes per GPU. Knows nothing
of schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autosearch.catalog import GpuSpec, KnownModel, find_model
from autosearch.errors import AutosearchError
from autosearch.operator_costs import Cost, layer_costs
from autosearch.operators import Collectives, Operator, Resource, check_parallel, layer_operators
from autosearch.profile_table import IsolatedTime, ProfileError, ProfileTable
from autosearch.specs import UnsupportedModelError
from autosearch.workload import Workload

# Operators that a dense model's profile lacks, and the measured ones whose speed per flop they are given.
_STAND_INS = {"experts": ("up_gate", "down"), "router": ("o",)}


@dataclass(frozen=True)
class Target:
    """What is to be planned: a model on GPUs, with one iteration's work."""

    model: KnownModel
    gpu: GpuSpec
    num_gpus: int
    work: Workload
    expert_imbalance: float = 1.0


@dataclass(frozen=True)
class OperatorTimes:
    """Time, energy and kernel of each operator of the target for any number of its rows."""

    table: ProfileTable
    target: Target

    def __post_init__(self) -> None:
        if self.table.measured_on.gpu != self.target.gpu.name:
            raise ProfileError(
                f"profile {self.table.name} was measured on {self.table.measured_on.gpu}, not on "
                f"{self.target.gpu.name}: give --profile of that GPU"
            )
        check_parallel(self.target.model.spec, self.target.num_gpus)
        if not 1 <= self.target.expert_imbalance <= 1e6:  # false for NaN
            raise ProfileError(f"expert imbalance {self.target.expert_imbalance} must lie between 1 and 1e6")

    @cached_property
    def measured_model(self) -> KnownModel:
        """The model that was profiled. Raises ProfileError where nobody knows it."""
        try:
            return find_model(self.table.model)
        except (AutosearchError, UnsupportedModelError) as error:
            raise ProfileError(f"profile {self.table.name} is of a model that is not at hand: {error}") from None

    def operators(self, collectives: Collectives) -> tuple[Operator, ...]:
        """The target's graph."""
        return layer_operators(self.target.model.spec, self.target.num_gpus, collectives)

    def time_us(self, operator: Operator, rows: int) -> float:
        """One layer's time on `rows` rows, alone on the whole GPU. Raises ProfileError for an unknown operator."""
        return sum(entry.time_us * factor for entry, factor in self._entries(operator, rows))

    def joules(self, operator: Operator, rows: int) -> float | None:
        """Dynamic energy of the same, on one GPU; None where the profile has none."""
        total = 0.0
        for entry, factor in self._entries(operator, rows):
            if entry.joules is None:
                return None
            total += entry.joules * factor
        return total

    def kernel(self, operator: Operator, rows: int) -> str:
        """The fastest kernel variant; empty for the worker's default."""
        entries = self._entries(operator, rows)
        return entries[0][0].kernel if entries else ""

    def _entries(self, operator: Operator, rows: int) -> list[tuple[IsolatedTime, float]]:
        """Profile entries that stand for the operator, each with the factor that its time is multiplied by."""
        names = self._measured_names(operator)
        if not names:
            return []
        here = _amount(self._cost(operator.name, rows), operator.resource, self.target.num_gpus)
        measured = self._measured_costs(rows)
        ranks = self.table.measured_on.num_gpus
        if not measured.keys() >= set(names):
            raise ProfileError(
                f"profile {self.table.name} has times for {', '.join(names)}, which {self.measured_model.name} on "
                f"{ranks} GPU(s) does not run: give a profile of the right set-up"
            )
        there = sum(_amount(measured[name], operator.resource, ranks) for name in names)
        factor = here / there if there else 0.0
        return [(self.table.best(name, rows), factor) for name in names]

    def _measured_names(self, operator: Operator) -> tuple[str, ...]:
        if operator.name in self.table.operators:
            return (operator.name,)
        if operator.name in _STAND_INS:
            return _STAND_INS[operator.name]
        if operator.joins:  # an element-wise step that the profile counts with its neighbour
            return ()
        raise ProfileError(
            f"profile {self.table.name} has no time for {operator.name}: profile {self.target.model.name} on "
            f"{self.target.num_gpus} GPU(s)"
        )

    def _cost(self, operator: str, rows: int) -> Cost:
        if rows not in self._costs:
            spec, work = self.target.model.spec, self.target.work.resized(rows)
            both = [
                layer_costs(spec, self.target.num_gpus, work, collectives, self.target.expert_imbalance)
                for collectives in Collectives
            ]
            self._costs[rows] = both[0] | both[1]
        return self._costs[rows][operator]

    def _measured_costs(self, rows: int) -> dict[str, Cost]:
        if rows not in self._costs_there:
            spec, ranks = self.measured_model.spec, self.table.measured_on.num_gpus
            work = self.table.workload.resized(rows)
            self._costs_there[rows] = layer_costs(spec, ranks, work, Collectives.ALL_REDUCE) | layer_costs(
                spec, ranks, work, Collectives.ALL_GATHER
            )
        return self._costs_there[rows]

    @cached_property
    def _costs(self) -> dict[int, dict[str, Cost]]:
        return {}

    @cached_property
    def _costs_there(self) -> dict[int, dict[str, Cost]]:
        return {}


def _amount(cost: Cost, resource: Resource, num_gpus: int) -> float:
    return cost.of(resource) / num_gpus
