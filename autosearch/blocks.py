"""The layer as the search sees it: blocks of operators that are split and placed together.

Element-wise steps join the operator beside them. Blocks of one split group share their row ranges: attention,
output projection and FFN may each be cut differently, as in the paper's Figure 6. Knows nothing of solvers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autosearch.operator_times import OperatorTimes
from autosearch.operators import Collectives, Operator, Resource

RANGE_STEP = 128  # rows; a nano-batch is a multiple of it, and never smaller (paper, section 4.1.2)

_GROUPS = {
    "attention": ("qkv", "decode_attention", "prefill_attention"),
    "output": ("attention_all_gather", "o", "o_all_reduce", "o_all_gather"),
    "ffn": ("up_gate", "down", "experts", "ffn_all_reduce"),
}


@dataclass(frozen=True, slots=True)
class Block:
    """Operators that run in order as one step of a lane."""

    name: str  # the operator that the others join
    operators: tuple[Operator, ...]
    resource: Resource
    group: str  # split group
    inputs: tuple[str, ...]  # blocks whose rows it reads; empty: the previous layer's last block
    earlier_rows: tuple[str, ...]  # blocks that must have run on all rows before the range's end


@dataclass(frozen=True)
class Layer:
    """Blocks in sequential order, with their times."""

    blocks: tuple[Block, ...]
    times: OperatorTimes
    collectives: Collectives

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Split groups in sequential order."""
        return tuple(dict.fromkeys(block.group for block in self.blocks))

    @property
    def last(self) -> Block:
        """The block whose rows the next layer reads."""
        return self.blocks[-1]

    def block(self, name: str) -> Block:
        """A block by name."""
        return next(block for block in self.blocks if block.name == name)

    def time_us(self, block: Block, rows: int) -> float:
        """Alone on the whole GPU; 0 for no rows."""
        if rows == 0:
            return 0.0
        return sum(self.times.time_us(operator, rows) for operator in block.operators)

    def sequential_us(self, rows: int) -> float:
        """One layer, one operator after the other."""
        return sum(self.time_us(block, rows) for block in self.blocks)

    def lower_bound_us(self, rows: int) -> float:
        """No schedule is faster than the busiest resource with nothing split (and nothing slowed down)."""
        return max(
            sum(self.time_us(block, rows) for block in self.blocks if block.resource is resource)
            for resource in Resource
        )


def build_layer(times: OperatorTimes, collectives: Collectives) -> Layer:
    """Put element-wise operators to their neighbours and find the blocks' inputs."""
    operators = times.operators(collectives)
    home = {operator.name: operator.joins or operator.name for operator in operators}
    names = [operator.name for operator in operators if not operator.joins]
    blocks = tuple(_block(name, [op for op in operators if home[op.name] == name], home) for name in names)
    return Layer(blocks, times, collectives)


def _block(name: str, members: Sequence[Operator], home: dict[str, str]) -> Block:
    def outside(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(home[other] for other in names if home[other] != name))

    main = next(operator for operator in members if operator.name == name)
    return Block(
        name=name,
        operators=tuple(members),
        resource=main.resource,
        group=next(group for group, owned in _GROUPS.items() if name in owned),
        inputs=outside([other for operator in members for other in operator.inputs]),
        earlier_rows=outside([other for operator in members for other in operator.earlier_rows]),
    )
