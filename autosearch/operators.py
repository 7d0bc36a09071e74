"""One transformer layer as a graph of named operators over a batch of token rows.

The names and edges are what `worker` runs and what the search orders. Knows nothing of kernels or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autosearch.errors import AutosearchError
from autosearch.specs import ModelSpec

ATTENTION = ("decode_attention", "prefill_attention")
# Variants of each operator's kernel by the names that profiles and schedules give them; "" is everywhere the default.
KERNELS = {
    "attn_norm": ("folded",),
    "qkv": ("128x256", "128x128", "scaled"),
    "decode_attention": ("4x4", "5x2", "cuda", "cuda-wide", "cuda-small"),
    "o": ("128x256", "128x128", "add"),
    "ffn_norm": ("folded",),
    "up_gate": ("128x256", "scaled"),
    "down": ("128x256", "128x128", "add"),
}


class Resource(StrEnum):
    """What bounds an operator (paper, section 3.2); operators of different resources gain from overlap."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


class Collectives(StrEnum):
    """Two ways to put the O projection's shards together; both move the same bytes (paper, section 4.1.2)."""

    ALL_REDUCE = "all_reduce"  # row-split O, then an all-reduce of its output
    ALL_GATHER = "all_gather"  # gather the attention output, column-split O, gather its output


class ParallelismError(AutosearchError):
    """The model cannot be split over this many ranks."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A step of a layer that may be split into nano-operations along the token rows."""

    name: str
    inputs: tuple[str, ...]  # operators whose output rows it reads, the same rows
    earlier_rows: tuple[str, ...] = ()  # operators that must have run for all rows before the range's end
    resource: Resource = Resource.COMPUTE
    joins: str = ""  # an element-wise step: it is split, and placed on a lane, together with this operator
    shared_work: bool = False  # drawn from one work list by whoever has SMs: other lanes may help with it


def kernel_problem(operator: str, kernel: str) -> str | None:
    """What is wrong with this name of a kernel; None where there is such a one."""
    known = KERNELS.get(operator, ())
    if not kernel or kernel in known:
        return None
    names = f"one of {', '.join(known)}, or none" if known else "none"
    return f"kernel {kernel!r} is not known; {operator} may name {names} (an empty text) for the default"


def check_parallel(spec: ModelSpec, num_gpus: int) -> None:
    """Raise ParallelismError unless heads and FFN divide over the ranks."""
    if num_gpus < 1 or spec.num_heads % num_gpus or spec.intermediate_size % num_gpus:
        raise ParallelismError(
            f"{spec.num_heads} query heads and an FFN of {spec.intermediate_size} do not divide over {num_gpus} GPUs"
        )


def layer_operators(
    spec: ModelSpec, tensor_parallel: int = 1, collectives: Collectives = Collectives.ALL_REDUCE
) -> tuple[Operator, ...]:
    """The layer's operators in sequential order.

    An operator with no inputs reads the previous layer's output. With tensor parallelism the projections'
    shards are put together as `collectives` says (paper, section 2.1).
    """
    reduced = tensor_parallel > 1
    return (*_attention(), *_output(reduced, collectives), *_ffn(spec, reduced, _after_output(reduced, collectives)))


def _attention() -> tuple[Operator, ...]:
    return (
        Operator("attn_norm", (), resource=Resource.MEMORY, joins="qkv"),
        Operator("qkv", ("attn_norm",)),
        Operator("rope_append", ("qkv",), resource=Resource.MEMORY, joins="qkv"),
        Operator("decode_attention", ("rope_append",), resource=Resource.MEMORY, shared_work=True),
        # A chunk that straddles two ranges: the later range's queries read the earlier one's keys.
        Operator("prefill_attention", ("rope_append",), earlier_rows=("rope_append",), shared_work=True),
    )


def _after_output(reduced: bool, collectives: Collectives) -> str:
    if not reduced:
        return "o"
    return "o_all_reduce" if collectives is Collectives.ALL_REDUCE else "o_all_gather"


def _output(reduced: bool, collectives: Collectives) -> tuple[Operator, ...]:
    attention = ("decode_attention", "prefill_attention")
    if not reduced:
        return (Operator("o", attention),)
    if collectives is Collectives.ALL_REDUCE:
        return (Operator("o", attention), Operator("o_all_reduce", ("o",), resource=Resource.NETWORK))
    return (
        Operator("attention_all_gather", attention, resource=Resource.NETWORK),
        Operator("o", ("attention_all_gather",)),
        Operator("o_all_gather", ("o",), resource=Resource.NETWORK),
    )


def _ffn(spec: ModelSpec, reduced: bool, source: str) -> tuple[Operator, ...]:
    if spec.num_experts:
        steps = [
            Operator("ffn_norm", (source,), resource=Resource.MEMORY, joins="experts"),
            Operator("router", ("ffn_norm",), joins="experts"),
            Operator("experts", ("ffn_norm", "router")),
        ]
    else:
        steps = [
            Operator("ffn_norm", (source,), resource=Resource.MEMORY, joins="up_gate"),
            Operator("up_gate", ("ffn_norm",)),
            Operator("down", ("up_gate",)),
        ]
    if reduced:
        steps.append(Operator("ffn_all_reduce", (steps[-1].name,), resource=Resource.NETWORK))
    return tuple(steps)
