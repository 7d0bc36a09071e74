"""Nano-operations of a layer that chains to the next one, and which of them may run at the same time.

Two may run together when neither must wait for the other: not by rows, not by lane, not by an explicit wait.
Nothing here depends on how long anything takes. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autosearch.operators import Operator

_LAYERS = 4  # unrolled; what runs beside a layer belongs to it or to its neighbours
Wait = tuple[int, int]  # for an operation, by index, of so many layers back
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class NanoOperation:
    """One operator on one range of token rows."""

    operator: str
    start: int  # rows [start, end) of the dense batch
    end: int
    lane: int = 0  # nano-operations of one lane run in order; lanes run beside each other
    sm_share: float = 1.0  # share of the GPU's SMs while it runs, in (0, 1]
    kernel: str = ""  # a kernel variant by name; empty: the worker's default
    after: tuple[int, ...] = ()  # earlier operations of this layer, by index, that must have ended before it starts
    after_previous: tuple[int, ...] = ()  # the same of the layer before
    helps: bool = False  # takes over what is left of an earlier operation on the same rows, whose lane goes on with it

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.operator}[{self.start}, {self.end})"


@dataclass(frozen=True)
class ChainedLayers:
    """The order that a schedule's operations must keep; `operations` in issue order."""

    operations: tuple[NanoOperation, ...]
    operators: tuple[Operator, ...]

    @cached_property
    def waits(self) -> tuple[tuple[Wait, ...], ...]:
        """For each operation what it waits for: (index, layers back), rows, lane and explicit waits together."""
        return tuple(tuple(sorted(set(self._waits_of(index)))) for index in range(len(self.operations)))

    def own_waits(self, index: int) -> Iterator[Wait]:
        """What the operation waits for by rows and explicitly, not by lane."""
        yield from self.data_waits[index]
        operation = self.operations[index]
        yield from ((other, 0) for other in operation.after)
        yield from ((other, 1) for other in operation.after_previous)

    def _waits_of(self, index: int) -> Iterator[Wait]:
        yield from self.own_waits(index)
        operation = self.operations[index]
        lane = [i for i, other in enumerate(self.operations) if other.lane == operation.lane]
        position = lane.index(index)
        yield (lane[position - 1], 0) if position else (lane[-1], 1)

    @cached_property
    def data_waits(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The same, by rows alone: what the operation reads."""
        by_name = {operator.name: operator for operator in self.operators}
        return tuple(tuple(self._inputs_of(operation, by_name)) for operation in self.operations)

    def _inputs_of(self, operation: NanoOperation, by_name: dict[str, Operator]) -> Iterator[tuple[int, int]]:
        operator = by_name[operation.operator]
        layers_back = 0 if operator.inputs else 1
        sources = operator.inputs or (self.operators[-1].name,)
        for index, other in enumerate(self.operations):
            if other.operator in sources and other.start < operation.end and operation.start < other.end:
                yield index, layers_back
            elif other.operator in operator.earlier_rows and other.start < operation.end:
                yield index, 0

    def concurrent(self) -> Iterator[tuple[int, ...]]:
        """Groups of operations, by index, that may all run at one moment; at most one per lane."""
        size = len(self.operations)
        ancestors = unrolled(self.waits)
        nodes = range(size, size * (_LAYERS - 1))  # the middle layers see all of their neighbours
        beside = {
            node: {
                other
                for other in range(size * _LAYERS)
                if other > node and not ancestors[other] >> node & 1 and not ancestors[node] >> other & 1
            }
            for node in range(size * _LAYERS)
        }
        seen: set[tuple[int, ...]] = set()
        for node in nodes:
            for group in _cliques((node,), beside[node], beside):
                key = tuple(sorted(member % size for member in group))
                if key not in seen:
                    seen.add(key)
                    yield key

    def without_implied_waits(self) -> tuple[NanoOperation, ...]:
        """The operations, without the explicit waits that rows, lanes and other waits imply: each costs an event."""
        operations = self.operations
        for index, operation in enumerate(operations):
            waits = [(other, 0) for other in operation.after] + [(other, 1) for other in operation.after_previous]
            for other, back in waits:
                fewer = _without(operations[index], other, back)
                trial = (*operations[:index], fewer, *operations[index + 1 :])
                if ChainedLayers(trial, self.operators).implies(index, other, back):
                    operations = trial
        return operations

    def implies(self, index: int, other: int, back: int) -> bool:
        """Whether operation `index` comes after operation `other` of `back` layers before."""
        return comes_after(unrolled(self.waits), (index, 0), (other, back))

    def largest_share(self) -> tuple[float, tuple[int, ...]]:
        """The most SMs that may ever be asked for at once, and by which operations."""
        groups = list(self.concurrent()) or [(0,)]
        return max((sum(self.operations[index].sm_share for index in group), group) for group in groups)

    def overbooked(self) -> tuple[int, ...]:
        """Operations that may together ask for more than all SMs; empty when none do."""
        share, group = self.largest_share()
        return group if share > 1 + _ROUNDING else ()


def unrolled(waits: Sequence[Sequence[Wait]]) -> list[int]:
    """Bit sets of all that each operation of some chained layers comes after, layer by layer."""
    size = len(waits)
    before: list[int] = []
    for node in range(_LAYERS * size):
        layer, index = divmod(node, size)
        bits = 0
        for other, back in waits[index]:
            if layer >= back:
                earlier = (layer - back) * size + other
                bits |= 1 << earlier | before[earlier]
        before.append(bits)
    return before


def comes_after(before: Sequence[int], later: Wait, earlier: Wait) -> bool:
    """Whether one operation comes after another, both as seen from the same layer; before: of `unrolled`."""
    size = len(before) // _LAYERS
    nodes = [(_LAYERS - 1 - back) * size + index for index, back in (later, earlier)]
    return bool(before[nodes[0]] >> nodes[1] & 1)


def _without(operation: NanoOperation, other: int, back: int) -> NanoOperation:
    if back:
        return replace(operation, after_previous=tuple(i for i in operation.after_previous if i != other))
    return replace(operation, after=tuple(i for i in operation.after if i != other))


def _cliques(group: tuple[int, ...], candidates: set[int], beside: dict[int, set[int]]) -> Iterator[tuple[int, ...]]:
    if not candidates:
        yield group
    for node in sorted(candidates):
        yield from _cliques((*group, node), candidates & beside[node], beside)


def covered(done: Sequence[NanoOperation], first: int, end: int) -> bool:
    """Whether the operations' rows hold all of [first, end)."""
    position = first
    for operation in sorted(done, key=lambda operation: operation.start):
        if operation.start <= position < operation.end:
            position = operation.end
    return position >= end
